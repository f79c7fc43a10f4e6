"""Rules for chat parameters: effects, odd values that SDKs send, and invalid values.

An invalid value must get a 4xx, because SDKs retry a 5xx. If the server accepts it silently, the
rule fails if the value is meaningless. If the value could be interpreted somehow, the result is
only advice.
"""

import math
from typing import Any

from engine_tools.conformance.expect import (
    REFUSALS,
    RuleFailed,
    RuleSkipped,
    expect,
    field,
    is_number,
    items,
    short,
)
from engine_tools.conformance.rule import Group
from engine_tools.conformance.target import CHAT, COMPLETIONS, Target

PARAMETERS = Group("parameters")
SDK = "openai-python"
_COUNT = "Count from 1 to 100."
_OPTIONAL = (
    *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "user", "tools", "tool_choice"),
    *("response_format", "stream", "stream_options"),
)
# Each entry has a rule id, a title and request fields. A server must refuse these meaningless
# values. If it accepts other invalid values, this is only reported as advice.
_MEANINGLESS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PAR-31", "temperature below 0 is refused", {"temperature": -1}),
    ("PAR-32", "top_p above 1 is refused", {"top_p": 2}),
    ("PAR-33", "n of 0 is refused", {"n": 0}),
    ("PAR-34", "max_tokens below 0 is refused", {"max_tokens": -1}),
    ("PAR-35", "max_tokens of another type is refused", {"max_tokens": "ten"}),
    ("PAR-36", "temperature of another type is refused", {"temperature": "hot"}),
    ("PAR-37", "logit_bias keys that are no token ids are refused", {"logit_bias": {"cat": 1}}),
    ("PAR-38", "logit_bias of another type is refused", {"logit_bias": [1]}),
    ("PAR-39", "top_logprobs of 1000 is refused", {"logprobs": True, "top_logprobs": 1000}),
    ("PAR-40", "stop of another type is refused", {"stop": {"a": 1}}),
    (
        "PAR-41",
        "a response_format of an unknown type is refused",
        {"response_format": {"type": "x"}},
    ),
    ("PAR-42", "stream of another type is refused", {"stream": "sometimes"}),
    ("PAR-43", "seed of another type is refused", {"seed": "x"}),
)
_LENIENT: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PAR-51", "temperature of 99 is refused", {"temperature": 99}),
    ("PAR-52", "presence_penalty of 99 is refused", {"presence_penalty": 99}),
    ("PAR-53", "top_logprobs without logprobs is refused", {"top_logprobs": 2}),
    (
        "PAR-54",
        "stream_options without stream is refused",
        {"stream_options": {"include_usage": True}},
    ),
    ("PAR-55", "max_tokens of 0 is refused", {"max_tokens": 0}),
    ("PAR-56", "a logit_bias for a token id of 10^9 is refused", {"logit_bias": {"1000000000": 5}}),
)
# These values may be accepted or refused, but must not cause a server error.
_HARMLESS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PAR-61", "stop with five strings is no server failure", {"stop": ["v", "w", "x", "y", "z"]}),
    ("PAR-62", "a seed above 2^63 is no server failure", {"seed": 2**63 + 5}),
    ("PAR-63", "a negative seed is no server failure", {"seed": -1}),
    ("PAR-64", "a user of 200 characters is no server failure", {"user": "u" * 200}),
    ("PAR-65", "an unknown parameter is no server failure", {"no_such_parameter": {"a": [1]}}),
    ("PAR-66", "max_tokens of 10^12 is no server failure", {"max_tokens": 10**12}),
    ("PAR-67", "metadata is no server failure", {"metadata": {"run": "1"}}),
    ("PAR-68", "n of 1000 is no server failure", {"n": 1000}),
)
# Values that mean the default. They must be accepted, because clients that fill in every field
# send them.
_ACCEPTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PAR-01", "stop: null is accepted", {"stop": None}),
    ("PAR-04", "parallel_tool_calls: null is accepted", {"parallel_tool_calls": None}),
    ("PAR-05", "response_format text is accepted", {"response_format": {"type": "text"}}),
    ("PAR-06", "top_p of 0 with temperature 0 is accepted", {"temperature": 0, "top_p": 0}),
    ("PAR-07", "a null in every optional field is accepted", dict.fromkeys(_OPTIONAL)),
    ("PAR-08", "an empty logit_bias is accepted", {"logit_bias": {}}),
)
# These values mean the default too. But refusing them is only reported as advice, because OpenAI's
# own service refuses some of them.
_WELCOME: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PAR-02", "an empty stop string is accepted", {"stop": ""}),
    ("PAR-03", "tools: [] is accepted", {"tools": []}),
)


def _add_tables() -> None:
    for is_needed, table in ((True, _ACCEPTED), (False, _WELCOME)):
        for id, title, fields in table:
            sees = "BadRequestError for an ordinary request"
            client = "clients that send every field"
            PARAMETERS.rule(id, title, client=client, sees=sees)(_accepts(fields, is_needed))
    for id, title, fields in _MEANINGLESS:
        sees = "the mistake goes unnoticed, or is sent three times if the status is 5xx"
        PARAMETERS.rule(id, title, client=SDK, sees=sees)(_refuses(fields, is_lenient=False))
    for id, title, fields in _LENIENT:
        sees = "the parameter is silently ignored, or sent three times if the status is 5xx"
        PARAMETERS.rule(id, title, client=SDK, sees=sees)(_refuses(fields, is_lenient=True))
    for id, title, fields in _HARMLESS:
        sees = "InternalServerError, after the request was sent three times"
        PARAMETERS.rule(id, title, client=SDK, sees=sees)(_survives(fields))


def _accepts(fields: dict[str, Any], is_needed: bool) -> Any:
    async def check(target: Target) -> None:
        reply = await target.post(CHAT, target.chat(**{"max_tokens": 2} | fields))
        if reply.status in REFUSALS and not is_needed:
            raise RuleFailed(reply.summary, is_advice=True)
        reply.ok()

    return check


def _refuses(fields: dict[str, Any], *, is_lenient: bool) -> Any:
    async def check(target: Target) -> None:
        reply = await target.post(CHAT, target.chat(**{"max_tokens": 2} | fields))
        if is_lenient and reply.status == 200:
            raise RuleFailed("accepted in silence", is_advice=True)
        reply.refused()

    return check


def _survives(fields: dict[str, Any]) -> Any:
    async def check(target: Target) -> None:
        reply = await target.post(CHAT, target.chat(**{"max_tokens": 2} | fields))
        expect(reply.status < 500, reply.summary)

    return check


@PARAMETERS.rule(
    "PAR-11",
    "max_tokens is respected, with finish_reason length",
    client="agents that continue a cut answer",
    sees="a cut answer that looks complete, or one that is not cut",
)
async def max_tokens(target: Target) -> None:
    await _is_limited(target, {"max_tokens": 3})


@PARAMETERS.rule(
    "PAR-12",
    "max_completion_tokens is respected",
    client="LangChain",
    sees="the limit is ignored: answers run on",
)
async def max_completion_tokens(target: Target) -> None:
    await _is_limited(target, {"max_tokens": None, "max_completion_tokens": 3})


async def _is_limited(target: Target, limit: dict[str, Any]) -> None:
    body = (await target.post(CHAT, target.chat(_COUNT, **limit))).ok()
    count = field(body, "usage", "completion_tokens")
    expect(count == 3, f"{count} tokens for a limit of 3")
    reason = field(body, "choices", 0, "finish_reason")
    expect(reason == "length", f"finish_reason is {short(reason)}")


@PARAMETERS.rule(
    "PAR-13",
    "A stop string ends the answer and is not part of it",
    client="Continue",
    sees="the stop string and what follows it in the user's file",
)
async def stop(target: Target) -> None:
    whole = field(await target.plain_chat(), "choices", 0, "message", "content")
    if len(whole) < 8:
        raise RuleSkipped("the model's answer is too short to stop in")
    mark = whole[4:8]
    for value in (mark, ["\x01never\x01", mark]):
        body = (await target.post(CHAT, target.chat(stop=value))).ok()
        said = field(body, "choices", 0, "message", "content")
        expect(mark not in said, f"{short(mark)} is in the answer")
        expect(said == whole[: whole.index(mark)], f"{short(said)} before {short(mark)}")
        reason = body["choices"][0]["finish_reason"]
        expect(reason == "stop", f"finish_reason is {short(reason)}")


@PARAMETERS.rule(
    "PAR-14",
    "The same seed gives the same answer",
    client="evaluation harnesses",
    sees="results that can't be repeated",
)
async def seed(target: Target) -> None:
    said = [await _say(target, "Invent a name.", seed=7, temperature=1) for _ in range(3)]
    # The first answer may have been computed without a prefix cache hit, which can round
    # differently.
    expect(said[1] == said[2], f"{short(said[1])}, then {short(said[2])}")


@PARAMETERS.rule(
    "PAR-15",
    "Different seeds give different answers",
    client="evaluation harnesses",
    sees="samples that are all the same",
)
async def other_seeds(target: Target) -> None:
    said = {await _say(target, "Invent a name.", seed=n, temperature=1.5) for n in range(6)}
    expect(len(said) > 1, "six seeds at temperature 1.5 gave one answer")


async def _say(target: Target, prompt: str, **fields: Any) -> str:
    body = (await target.post(CHAT, target.chat(prompt, **{"max_tokens": 10} | fields))).ok()
    return str(field(body, "choices", 0, "message", "content"))


@PARAMETERS.rule(
    "PAR-16",
    "n gives as many choices, numbered from 0",
    client=SDK,
    sees="fewer choices than asked for",
)
async def several(target: Target) -> None:
    reply = await target.post(CHAT, target.chat(n=3, temperature=1, max_tokens=4))
    found = items(reply.ok_unless_refused("n"), "choices")
    indexes = [field(each, "index") for each in found]
    expect(sorted(indexes) == [0, 1, 2], f"indexes are {indexes}")


async def _logprobs(target: Target) -> list[Any]:
    async def ask() -> list[Any]:
        body = target.chat(_COUNT, logprobs=True, top_logprobs=3, max_tokens=4)
        answer = (await target.post(CHAT, body)).ok_unless_refused("logprobs")
        return items(answer, "choices", 0, "logprobs", "content")

    return await target.once("logprobs", ask)


@PARAMETERS.rule(
    "PAR-17",
    "logprobs: one entry for each token, none above 0",
    client=SDK,
    sees="missing log-probabilities",
)
async def logprobs(target: Target) -> None:
    found = await _logprobs(target)
    expect(len(found) == 4, f"{len(found)} entries for 4 tokens")
    for entry in found:
        value = field(entry, "logprob")
        expect(is_number(value) and value <= 0, f"a logprob is {short(value)}")


@PARAMETERS.rule(
    "PAR-18",
    "logprobs: bytes are those of the token",
    client="evaluation harnesses",
    sees="text that can't be put together from tokens",
)
async def logprob_bytes(target: Target) -> None:
    for entry in await _logprobs(target):
        token, raw = field(entry, "token"), field(entry, "bytes")
        expect(raw is None or bytes(raw).decode(errors="replace") == token, f"{short(entry)}")


@PARAMETERS.rule(
    "PAR-19",
    "top_logprobs: as many as asked for, the likeliest first",
    client="evaluation harnesses",
    sees="wrong rankings",
)
async def top_logprobs(target: Target) -> None:
    for entry in await _logprobs(target):
        values = [field(each, "logprob") for each in items(entry, "top_logprobs")]
        expect(len(values) == 3, f"{len(values)} top_logprobs, not 3")
        expect(values == sorted(values, reverse=True), f"in the order {values}")
        expect(sum(map(math.exp, values)) <= 1.001, f"probabilities above 1 in all: {values}")


@PARAMETERS.rule(
    "PAR-20",
    "top_logprobs: 0 gives logprobs without alternatives",
    client=SDK,
    sees="a 400, or no logprobs",
)
async def no_top_logprobs(target: Target) -> None:
    reply = await target.post(CHAT, target.chat(logprobs=True, top_logprobs=0, max_tokens=2))
    found = items(reply.ok_unless_refused("logprobs"), "choices", 0, "logprobs", "content")
    expect(not found[0].get("top_logprobs"), f"{short(found[0].get('top_logprobs'))}")


@PARAMETERS.rule(
    "PAR-21",
    "logprobs are null when they were not asked for",
    client=SDK,
    sees="larger answers than needed",
    severity="advice",
)
async def logprobs_off(target: Target) -> None:
    found = field(await target.plain_chat(), "choices", 0).get("logprobs")
    expect(found is None, f"logprobs are {short(found)}")


@PARAMETERS.rule(
    "PAR-22",
    "logit_bias of 100 makes a token certain",
    client="Open WebUI, constrained classifiers",
    sees="the bias is silently ignored",
)
async def bias_forces(target: Target) -> None:
    said = []
    for token in ("300", "301"):
        body = target.chat(logit_bias={token: 100}, max_tokens=3)
        answer = (await target.post(CHAT, body)).ok_unless_refused("logit_bias")
        said.append(field(answer, "choices", 0, "message", "content"))
    plain = field(await target.plain_chat(), "choices", 0, "message", "content")
    expect(said[0] != said[1], f"bias for two tokens gives {short(said[0])} twice")
    expect(not plain.startswith(said[0]) or not said[0], "the answer is the same without a bias")


@PARAMETERS.rule(
    "PAR-23",
    "logit_bias of -100 bans a token",
    client="constrained classifiers",
    sees="the bias is silently ignored",
)
async def bias_bans(target: Target) -> None:
    answer = await target.post(COMPLETIONS, target.completion(max_tokens=1))
    first = field(answer.ok(), "choices", 0, "text")
    body = {"model": target.model, "prompt": first, "add_special_tokens": False}
    reply = await target.post("/tokenize", body)
    if reply.status != 200 or not reply.json().get("tokens"):
        raise RuleSkipped("no /tokenize to learn a token's id from")
    banned = {str(token): -100 for token in reply.json()["tokens"]}
    other = await target.post(COMPLETIONS, target.completion(max_tokens=1, logit_bias=banned))
    said = field(other.ok_unless_refused("logit_bias"), "choices", 0, "text")
    expect(said != first, f"{short(first)} is written although it is banned")


@PARAMETERS.rule(
    "PAR-24",
    "An unknown parameter is refused by its name, or accepted",
    client=SDK,
    sees="a 400 that does not say which key of extra_body to leave out",
)
async def unknown_key(target: Target) -> None:
    reply = await target.post(CHAT, target.chat(no_such_parameter=1, max_tokens=2))
    if reply.status != 200:
        expect("no_such_parameter" in reply.refused().message, reply.summary)


@PARAMETERS.rule(
    "PAR-25",
    "A context overflow is a 400 that LiteLLM and its users recognise",
    client="LiteLLM, Aider",
    sees="a plain BadRequestError: no fallback to a larger model, no history summary",
)
async def overflow(target: Target) -> None:
    length = target.context_length or 200_000
    if length > 400_000:
        raise RuleSkipped(f"a context of {length} tokens is too long to overflow here")
    reply = await target.post(CHAT, target.chat("word " * (length + 200), max_tokens=4))
    said = reply.refused().message.lower()
    expect(any(known in said for known in _OVERFLOWS), f"its message is {short(said)}")


_OVERFLOWS = (
    "this model's maximum context length is",
    "is longer than the model's context length",
    "exceeds the available context size",
)

_add_tables()
