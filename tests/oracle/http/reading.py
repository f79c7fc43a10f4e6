"""The whole result of a request, from the answer or the stream of any API.

A field that an API does not tell is None. Two results agree if all that both of them tell is equal.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from engine_tools.conformance.sse import DONE

Json = dict[str, Any]
# A token: its text, its logprob, its offset in the text, and the alternatives with theirs
Scored = tuple[str, float | None, int | None, tuple[tuple[str, float], ...] | None]


@dataclass
class Choice:
    """One answer. Its text was joined, if it was a stream."""

    text: str = ""
    reasoning: str | None = None
    calls: list[tuple[str, str]] | None = None  # name and arguments
    finish: str | None = None  # "length", or "stop" for any other end
    stop: str | int | None = None  # the string or token that ended it
    tells_stop: bool = False
    scores: list[Scored] | None = None
    token_ids: list[int] | None = None


@dataclass
class Whole:
    """All that a client is told of its request, but ids and times."""

    status: int = 200
    error: str | None = None
    choices: list[Choice] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    answer_id: str | None = None
    read: Json | None = None  # what it read inside the model
    problems: list[str] = field(default_factory=list)

    def choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]


@dataclass
class Reply:
    """What came back on a connection."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool


def parse_reply(data: bytes) -> Reply | None:
    """The reply in the bytes of a connection. None without a whole head."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:])
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    status = int(lines[0].split(" ")[1])
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, headers, rest, len(rest) == int(headers.get("content-length", 0)))
    pieces: list[bytes] = []
    while rest:
        size, found, after = rest.partition(b"\r\n")
        count = int(size, 16) if found else -1
        if count == 0:
            return Reply(status, headers, b"".join(pieces), True)
        if count < 0 or len(after) < count + 2:
            break
        pieces.append(after[:count])
        rest = after[count + 2 :]
    return Reply(status, headers, b"".join(pieces), False)


def read_whole(name: str, reply: Reply) -> Whole:
    """The result that a reply of the API of this name tells."""
    whole = Whole(reply.status)
    if reply.status != 200:
        whole.error = json.dumps(json.loads(reply.body), sort_keys=True)
        return whole
    api, _, stream = name.partition(".")
    if not reply.is_complete:
        whole.problems.append("the answer has no end")
    kind = KINDS[api]
    if not stream:
        kind.read(whole, json.loads(reply.body))
        return whole
    for event in _events(reply):
        if event == DONE:
            continue
        body = json.loads(event)
        if body.get("error"):
            whole.error = json.dumps(body["error"], sort_keys=True)
        else:
            kind.add(whole, body)
    return whole


def _events(reply: Reply) -> Iterator[str]:
    text = reply.body.decode()
    if "ndjson" in reply.headers["content-type"]:
        yield from text.splitlines()
        return
    for block in text.split("\n\n"):
        data = [line[6:] for line in block.splitlines() if line.startswith("data: ")]
        if data:
            yield "\n".join(data)


@dataclass(frozen=True)
class Kind:
    """How answers and events of one API are read."""

    read: Callable[[Whole, Json], None]
    add: Callable[[Whole, Json], None]


def _openai_usage(whole: Whole, usage: Json | None) -> None:
    if usage is None:
        return
    whole.prompt_tokens = usage["prompt_tokens"]
    whole.completion_tokens = usage["completion_tokens"]
    whole.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    whole.reasoning_tokens = usage["completion_tokens_details"]["reasoning_tokens"]


def _chat_scores(logprobs: list[Json]) -> list[Scored]:
    return [
        (
            each["token"],
            each["logprob"],
            None,
            tuple((top["token"], top["logprob"]) for top in each["top_logprobs"]),
        )
        for each in logprobs
    ]


def _legacy_scores(logprobs: Json) -> list[Scored]:
    rows = zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["text_offset"],
        logprobs["top_logprobs"],
        strict=True,
    )
    return [
        (token, score, offset, None if top is None else tuple(top.items()))
        for token, score, offset, top in rows
    ]


def read_values(told: Json) -> Json:
    """What a request read inside the model, without ids, times and names of tokens."""
    found = {name: told[name] for name in ("num_prompt", "token_ids", "captures")}
    found["lens"] = [
        [tuple(top.values())[-2:] if isinstance(top, dict) else tuple(top) for top in each["top"]]
        for each in told.get("lens", ())
    ]
    return found


def _read_openai(whole: Whole, body: Json) -> None:
    whole.answer_id = body["id"]
    if body.get("interp") is not None:
        whole.read = read_values(body["interp"])
    _openai_usage(whole, body.get("usage"))
    for each in body["choices"]:
        choice = whole.choice(each["index"])
        if choice.finish is not None:
            whole.problems.append(f"choice {each['index']} goes on after its end")
        said = each.get("message") or each.get("delta")
        if said is None:
            choice.text += each["text"]
        else:
            _read_message(choice, said)
        if each.get("token_ids") is not None:
            choice.token_ids = (choice.token_ids or []) + list(each["token_ids"])
        if (logprobs := each.get("logprobs")) is not None:
            legacy = "tokens" in logprobs
            more = _legacy_scores(logprobs) if legacy else _chat_scores(logprobs["content"])
            choice.scores = (choice.scores or []) + more
        if each["finish_reason"] is not None:
            choice.finish = "length" if each["finish_reason"] == "length" else "stop"
            choice.stop, choice.tells_stop = each["stop_reason"], True


def _read_message(choice: Choice, said: Json) -> None:
    choice.text += said.get("content") or ""
    choice.reasoning = (choice.reasoning or "") + (said.get("reasoning_content") or "")
    choice.calls = choice.calls or []
    for position, call in enumerate(said.get("tool_calls") or ()):
        function = call["function"]
        if call.get("index", position) >= len(choice.calls):
            choice.calls.append((function["name"], function["arguments"]))
        else:
            name, arguments = choice.calls[call["index"]]
            choice.calls[call["index"]] = (name, arguments + function["arguments"])


def _read_responses(whole: Whole, body: Json) -> None:
    choice = whole.choice(0)
    whole.answer_id = body["id"]
    choice.calls, choice.reasoning = [], ""
    for item in body["output"]:
        if item["type"] == "function_call":
            choice.calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            choice.reasoning += "".join(part["text"] for part in item["content"])
        else:
            for part in item["content"]:
                choice.text += part["text"]
                if part["logprobs"]:
                    choice.scores = (choice.scores or []) + _chat_scores(part["logprobs"])
    choice.finish = "length" if body["status"] == "incomplete" else "stop"
    usage = body["usage"]
    whole.prompt_tokens, whole.completion_tokens = usage["input_tokens"], usage["output_tokens"]
    whole.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    whole.reasoning_tokens = usage["output_tokens_details"]["reasoning_tokens"]


def _add_responses(whole: Whole, event: Json) -> None:
    """The deltas of the stream, which must make the same output as its last event."""
    kind = event["type"]
    joined = whole.choice(1)
    if kind == "response.output_text.delta":
        joined.text += event["delta"]
    elif kind == "response.reasoning_text.delta":
        joined.reasoning = (joined.reasoning or "") + event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        whole.choices.pop()
        if whole.choices:
            whole.choices[0] = Choice()
        _read_responses(whole, event["response"])
        told = whole.choices[0]
        if (joined.text, joined.reasoning or "") != (told.text, told.reasoning):
            whole.problems.append("the deltas differ from the output")


_ANTHROPIC_ENDS = {"max_tokens": "length"}


def _read_anthropic(whole: Whole, body: Json) -> None:
    whole.answer_id = body["id"]
    choice = whole.choice(0)
    choice.calls, choice.reasoning = [], ""
    for block in body["content"]:
        _add_block(choice, block)
        if block["type"] == "tool_use":
            choice.calls[-1] = (block["name"], json.dumps(block["input"]))
    _anthropic_end(whole, body, body["usage"])


def _add_block(choice: Choice, block: Json) -> None:
    if block["type"] == "text":
        choice.text += block["text"]
    elif block["type"] == "thinking":
        choice.reasoning = (choice.reasoning or "") + block["thinking"]
    else:
        choice.calls = [*(choice.calls or []), (block["name"], "")]


def _anthropic_end(whole: Whole, ending: Json, usage: Json) -> None:
    choice = whole.choice(0)
    choice.finish = _ANTHROPIC_ENDS.get(ending["stop_reason"], "stop")
    choice.stop, choice.tells_stop = ending["stop_sequence"], True
    whole.cached_tokens = usage["cache_read_input_tokens"]
    whole.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    whole.completion_tokens = usage["output_tokens"]
    whole.reasoning_tokens = usage["output_tokens_details"]["thinking_tokens"]


def _add_anthropic(whole: Whole, event: Json) -> None:
    choice = whole.choice(0)
    match event["type"]:
        case "message_start":
            whole.answer_id = event["message"]["id"]
            choice.calls, choice.reasoning = [], ""
        case "content_block_start":
            _add_block(choice, event["content_block"])
        case "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                assert choice.calls
                name, arguments = choice.calls[-1]
                choice.calls[-1] = (name, arguments + delta["partial_json"])
            elif delta["type"] == "text_delta":
                choice.text += delta["text"]
            else:
                choice.reasoning = (choice.reasoning or "") + delta["thinking"]
        case "message_delta":
            _anthropic_end(whole, event["delta"], event["usage"])


def _read_ollama(whole: Whole, body: Json) -> None:
    choice = whole.choice(0)
    part = body.get("message", body)
    choice.text += part.get("content", part.get("response", ""))
    choice.reasoning = (choice.reasoning or "") + part.get("thinking", "")
    choice.calls = choice.calls or []
    for call in part.get("tool_calls") or ():
        choice.calls.append((call["function"]["name"], json.dumps(call["function"]["arguments"])))
    if "logprobs" in body:
        choice.scores = (choice.scores or []) + _chat_scores(body["logprobs"])
    if body["done"]:
        choice.finish = "length" if body["done_reason"] == "length" else "stop"
        whole.prompt_tokens = body["prompt_eval_count"]
        whole.completion_tokens = body["eval_count"]


def _read_llamacpp(whole: Whole, body: Json | list[Json]) -> None:
    for each in body if isinstance(body, list) else [body]:
        choice = whole.choice(each["index"])
        choice.text += each["content"]
        choice.token_ids = (choice.token_ids or []) + list(each["tokens"])
        for token in each.get("completion_probabilities") or ():
            choice.scores = (choice.scores or []) + _chat_scores([token])
        if each["stop"]:
            choice.finish = "length" if each["stop_type"] == "limit" else "stop"
            whole.prompt_tokens = each["tokens_evaluated"]
            whole.completion_tokens = (whole.completion_tokens or 0) + each["tokens_predicted"]
            if each["stop_type"] == "word":
                choice.stop, choice.tells_stop = each["stopping_word"], True


def _read_sglang(whole: Whole, body: Json | list[Json]) -> None:
    for index, each in enumerate(body if isinstance(body, list) else [body]):
        _one_sglang(whole, index, each)


def _add_sglang(whole: Whole, event: Json) -> None:
    _one_sglang(whole, event.get("index", 0), event)


def _one_sglang(whole: Whole, index: int, body: Json) -> None:
    """An answer, or all of it so far."""
    choice, meta = whole.choice(index), body["meta_info"]
    if not body["text"].startswith(choice.text):
        whole.problems.append("the text of a stream changes")
    choice.text, choice.token_ids = body["text"], list(body["output_ids"])
    if "output_token_logprobs" in meta:
        tops = meta.get("output_top_logprobs") or [None] * len(meta["output_token_logprobs"])
        choice.scores = [
            (text, score, None, None if top is None else tuple((t, s) for s, _, t in top))
            for (score, _, text), top in zip(meta["output_token_logprobs"], tops, strict=True)
        ]
    if (finish := meta["finish_reason"]) is not None:
        choice.finish = finish["type"]
        whole.prompt_tokens = meta["prompt_tokens"]
        whole.completion_tokens = (whole.completion_tokens or 0) + meta["completion_tokens"]
        whole.cached_tokens = meta["cached_tokens"]
        if isinstance(finish.get("matched"), str):
            choice.stop, choice.tells_stop = finish["matched"], True


def _read_kserve(whole: Whole, body: Json) -> None:
    choice = whole.choice(0)
    choice.text += body["text_output"]
    whole.prompt_tokens = body["num_input_tokens"]
    whole.completion_tokens = (whole.completion_tokens or 0) + body["num_output_tokens"]
    if body["finish_reason"] is not None:
        choice.finish = "length" if body["finish_reason"] == "length" else "stop"


_OPENAI = Kind(_read_openai, _read_openai)
_OLLAMA = Kind(_read_ollama, _read_ollama)
_KSERVE = Kind(_read_kserve, _read_kserve)
KINDS = {
    **dict.fromkeys(("completions", "chat", "foreign", "azure"), _OPENAI),
    **dict.fromkeys(("ollama_raw", "ollama_chat", "ollama_generate"), _OLLAMA),
    **dict.fromkeys(("kserve", "kserve_json"), _KSERVE),
    "llamacpp": Kind(_read_llamacpp, _read_llamacpp),
    "sglang": Kind(_read_sglang, _add_sglang),
    "responses": Kind(_read_responses, _add_responses),
    "anthropic": Kind(_read_anthropic, _add_anthropic),
}


def differences(got: Whole, expected: Whole) -> list[str]:
    """What two results of the same request tell differently."""
    if got.error is not None or expected.error is not None:
        same = got.error == expected.error
        return [] if same else [f"error: {got.error}, not {expected.error}"]
    found = [f"problem: {each}" for each in got.problems]
    for name in ("status", "prompt_tokens", "completion_tokens", "reasoning_tokens", "read"):
        _compare(found, name, getattr(got, name), getattr(expected, name))
    if len(got.choices) != len(expected.choices):
        return [*found, f"{len(got.choices)} choices, not {len(expected.choices)}"]
    for index, (one, other) in enumerate(zip(got.choices, expected.choices, strict=True)):
        for each in fields(Choice):
            where = f"choice {index} {each.name}"
            if each.name == "stop" and one.tells_stop and other.tells_stop:
                if one.stop != other.stop:
                    found.append(f"{where}: {one.stop!r}, not {other.stop!r}")
            elif each.name == "scores":
                _compare_scores(found, where, one.scores, other.scores)
            elif each.name not in ("stop", "tells_stop"):
                _compare(found, where, getattr(one, each.name), getattr(other, each.name))
    return found


def _compare(found: list[str], where: str, got: Any, expected: Any) -> None:
    if got is not None and expected is not None and got != expected:
        found.append(f"{where}: {got!r}, not {expected!r}")


def _with_alternatives(score: Scored) -> Scored:
    """Some APIs tell the token itself among its alternatives, and those with one text once."""
    token, logprob, offset, top = score
    if top is None or logprob is None:
        return score
    told: dict[str, float] = {token: logprob}
    for text, each in top:
        told.setdefault(text, each)
    return token, logprob, offset, tuple(sorted(told.items()))


def _compare_scores(
    found: list[str], where: str, got: list[Scored] | None, expected: list[Scored] | None
) -> None:
    if got is None or expected is None:
        return
    if len(got) != len(expected):
        found.append(f"{where}: {len(got)} tokens, not {len(expected)}")
        return
    for position, (one, other) in enumerate(zip(got, expected, strict=True)):
        pairs = zip(_with_alternatives(one), _with_alternatives(other), strict=True)
        for name, (mine, its) in zip(("token", "logprob", "offset", "top"), pairs, strict=True):
            _compare(found, f"{where}[{position}] {name}", mine, its)
