"""Chat, completions and embeddings of the tiny server: JSON bodies, and chunks for streams."""

import base64
import itertools
import json
import random
import re
import struct
from typing import Any

from tests.support.fakes.tiny_openai.checks import (
    MODEL,
    check_fits,
    check_model,
    check_parameters,
    read_messages,
    read_prompts,
)
from tests.support.fakes.tiny_openai.model import (
    Answer,
    Mistake,
    called,
    fixed,
    generate,
    structured,
)

_numbers = itertools.count(1)


def new_id(prefix: str) -> str:
    return f"{prefix}-{next(_numbers)}"


def usage(num_prompt: int, num_output: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode())}


def chat_logprobs(tokens: list[str], count: int) -> dict[str, Any]:
    top = [{"token": f"t{n}", "logprob": -1.0 - n, "bytes": [116]} for n in range(20)]
    return {"content": [_entry(token) | {"top_logprobs": top[:count]} for token in tokens]}


class Chat:
    """One request to /v1/chat/completions."""

    def __init__(self, body: dict[str, Any], seen: set[str]) -> None:
        check_model(body)
        check_parameters(body)
        if body.get("top_logprobs") and not body.get("logprobs"):
            raise Mistake("top_logprobs needs logprobs", "top_logprobs")
        self.body = body
        text, self.num_prompt = read_messages(body.get("messages"))
        self.cached = self.num_prompt - 1 if text in seen else 0
        seen.add(text)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 50
        count = body.get("n") or 1
        self.answers = [generate(text, body, limit, n) for n in range(count)]
        self.call = called(body.get("tools") or [], body.get("tool_choice"))
        decided = structured(body.get("response_format"))
        if decided is not None:
            self.answers = [fixed(decided)]
        if self.call is not None:
            self.answers = [Answer([], "tool_calls")]
        self.call_id = new_id("call")
        self.head = {"id": new_id("chatcmpl"), "created": 1_700_000_000, "model": MODEL}

    @property
    def usage(self) -> dict[str, Any]:
        count = sum(len(answer.tokens) for answer in self.answers)
        return usage(self.num_prompt, count, self.cached)

    def logprobs(self, tokens: list[str]) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        return chat_logprobs(tokens, self.body.get("top_logprobs") or 0)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            message: dict[str, Any] = {"role": "assistant", "content": answer.text}
            if self.call is not None:
                function = {"name": self.call[0], "arguments": self.call[1]}
                call = {"id": self.call_id, "type": "function", "function": function}
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": index, "message": message, "finish_reason": answer.finish}
            choices.append(choice | {"logprobs": self.logprobs(answer.tokens)})
        head = self.head | {"object": "chat.completion"}
        return head | {"choices": choices, "usage": self.usage}

    def chunks(self) -> list[Any]:
        found = []
        for index, answer in enumerate(self.answers):
            deltas: list[Any] = [{"role": "assistant", "content": ""}]
            deltas += [{"content": token} for token in answer.tokens]
            if self.call is not None:
                deltas = [deltas[0], *self._call_deltas()]
            for delta in deltas:
                tokens = [delta["content"]] if delta.get("content") else []
                choice = {"index": index, "delta": delta, "finish_reason": None}
                found.append([choice | {"logprobs": self.logprobs(tokens) if tokens else None}])
            found.append([{"index": index, "delta": {}, "finish_reason": answer.finish}])
        head = self.head | {"object": "chat.completion.chunk"}
        chunks: list[Any] = [head | {"choices": choices} for choices in found]
        options = self.body.get("stream_options") or {}
        if options.get("continuous_usage_stats"):
            self._count_on(chunks)
        if options.get("include_usage"):
            chunks.append(head | {"choices": [], "usage": self.usage})
        return [*chunks, "[DONE]"]

    def _count_on(self, chunks: list[Any]) -> None:
        num_output = 0
        for chunk in chunks:
            num_output += 1 if chunk["choices"][0]["delta"].get("content") else 0
            chunk["usage"] = usage(self.num_prompt, num_output)

    def _call_deltas(self) -> list[Any]:
        assert self.call is not None
        name, arguments = self.call
        first = {"name": name, "arguments": ""}
        pieces: list[Any] = [
            {"index": 0, "id": self.call_id, "type": "function", "function": first}
        ]
        halves = (arguments[:3], arguments[3:])
        pieces += [{"index": 0, "function": {"arguments": half}} for half in halves]
        return [{"tool_calls": [piece]} for piece in pieces]


class Completion:
    """One request to /v1/completions."""

    def __init__(self, body: dict[str, Any]) -> None:
        check_model(body)
        check_parameters(body)
        if body.get("suffix"):
            raise Mistake("this model has no suffix", "suffix")
        if (body.get("best_of") or 16) < (body.get("n") or 1):
            raise Mistake("best_of should not be below n", "best_of")
        if (body.get("logprobs") or 0) > 5:
            raise Mistake("logprobs should be from 0 to 5", "logprobs")
        self.body = body
        self.prompts = read_prompts(body.get("prompt"))
        for _, count in self.prompts:
            check_fits(count)
        limit = body.get("max_tokens") or 16
        self.answers = [generate(text, body, limit) for text, _ in self.prompts]
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": 1_700_000_000}
        self.head |= {"model": MODEL}

    @property
    def usage(self) -> dict[str, Any]:
        count = sum(len(answer.tokens) for answer in self.answers)
        return usage(sum(count for _, count in self.prompts), count)

    def _logprobs(self, prompt: str, answer: Answer) -> dict[str, Any] | None:
        if self.body.get("logprobs") is None:
            return None
        scored = re.findall(r"\s*\S+", prompt) if self.body.get("echo") else []
        tokens = scored + answer.tokens
        ends = list(itertools.accumulate(len(token) for token in tokens))
        return {
            "tokens": tokens,
            "token_logprobs": [None if scored and not n else -0.5 for n in range(len(tokens))],
            "top_logprobs": [{token: -0.5, "other": -2.0} for token in tokens],
            "text_offset": [0, *ends[:-1]],
        }

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, ((prompt, _), answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            text = prompt + answer.text if self.body.get("echo") else answer.text
            choice = {"index": index, "text": text, "finish_reason": answer.finish}
            choices.append(choice | {"logprobs": self._logprobs(prompt, answer)})
        return self.head | {"choices": choices, "usage": self.usage}

    def chunks(self) -> list[Any]:
        answer = self.answers[0]
        pieces: list[Any] = [(token, None) for token in answer.tokens] + [("", answer.finish)]
        chunks: list[Any] = [
            self.head | {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
            for text, reason in pieces
        ]
        if (self.body.get("stream_options") or {}).get("include_usage"):
            chunks.append(self.head | {"choices": [], "usage": self.usage})
        return [*chunks, "[DONE]"]


def vector(text: str, dimensions: int) -> list[float]:
    rng = random.Random(text)
    values = [rng.uniform(-1, 1) for _ in range(dimensions)]
    length = sum(value * value for value in values) ** 0.5
    return [struct.unpack("f", struct.pack("f", value / length))[0] for value in values]


def embeddings(body: dict[str, Any]) -> dict[str, Any]:
    check_model(body)
    prompts = read_prompts(body["input"]) if body.get("input") != [] and "input" in body else []
    encoding = body.get("encoding_format") or "float"
    if not prompts or encoding not in ("float", "base64"):
        raise Mistake("input and encoding_format: float or base64", "input")
    data = []
    for index, (text, count) in enumerate(prompts):
        check_fits(count)
        values: Any = vector(text, body.get("dimensions") or 32)
        if encoding == "base64":
            values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    total = sum(count for _, count in prompts)
    counts = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "model": MODEL, "data": data, "usage": counts}


def rerank(body: dict[str, Any]) -> dict[str, Any]:
    check_model(body)
    if not body.get("documents"):
        raise Mistake("there are no documents", "documents")
    words = set(body["query"].lower().split())
    scores = [len(words & set(text.lower().split())) / 10 for text in body["documents"]]
    order = sorted(range(len(scores)), key=lambda n: -scores[n])
    ranked = [{"index": n, "relevance_score": scores[n]} for n in order]
    return {"results": ranked[: body.get("top_n") or len(ranked)]}


def batch_line(line: str) -> str:
    request = json.loads(line)
    response = {"status_code": 200, "body": Chat(request["body"], set()).whole()}
    return json.dumps({"custom_id": request["custom_id"], "response": response, "error": None})
