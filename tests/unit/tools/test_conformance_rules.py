"""Every rule of the conformance kit passes on a server that keeps it, and fails on one that does
not. A rule that no fault below can break proves nothing, and one of these tests says so.
"""

import random
from typing import Any

import httpx
import pytest

from engine_tools.conformance.rule import RuleResult
from engine_tools.conformance.rules import GROUPS
from engine_tools.conformance.run import find_target, run_rule, run_rules
from tests.support.fakes.tiny_openai.app import Fault, Outgoing, TinyServer
from tests.support.fakes.tiny_openai.broken_streams import (
    all_name_pieces,
    early_finish,
    half_pairs,
    last_word_in_finish,
    merge_usage,
    mixed_up,
    new_id_each,
    no_finish,
    repeat_role,
    torn_emoji,
    unnamed,
)
from tests.support.fakes.tiny_openai.faults import (
    CHAT,
    GONE,
    answers,
    asks,
    events,
    header,
    put,
    says,
    status,
)

RULES = {rule.id: rule for group in GROUPS for rule in group.rules}
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
BIAS, TOOLS = "logit_bias", "tools"
CHOICE = "choices.0"
DELTA = "choices.0.delta"
CALLS = "choices.0.message.tool_calls"


def client_of(fault: Fault = lambda outgoing: None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=TinyServer(fault).app)
    return httpx.AsyncClient(transport=transport, base_url="http://tiny")


async def outcomes(fault: Fault, rule_ids: list[str]) -> dict[str, RuleResult]:
    async with client_of(fault) as client:
        target = await find_target(client, "tiny/words")
        return {id: await run_rule(RULES[id], target) for id in rule_ids}


async def test_a_conforming_server_passes_every_rule():
    async with client_of() as client:
        results = await run_rules(await find_target(client, None), GROUPS)
    assert {r.rule.id: r.detail for r in results if r.outcome != "pass"} == {}
    assert len(results) == len(RULES) == sum(len(group.rules) for group in GROUPS)


# --- faults of whole classes -----------------------------------------------------------------

PLAIN_KEYS = {"model", "messages", "max_tokens", "temperature", "prompt", "input"}


def accept_mistakes(outgoing: Outgoing) -> None:
    """A server that checks nothing: 200 and an ordinary answer to whatever comes."""
    if outgoing.status in (400, 404, 405):
        outgoing.status = 200
        message = {"role": "assistant", "content": "fine"}
        outgoing.body = {"choices": [{"index": 0, "message": message}], "data": [], "usage": {}}


def fail_on_mistakes(outgoing: Outgoing) -> None:
    """A server whose checks raise: every mistake of a client is its own failure."""
    if 400 <= outgoing.status < 500:
        outgoing.status = 500


def has_extras(outgoing: Outgoing) -> bool:
    return bool(outgoing.request) and not outgoing.request.keys() <= PLAIN_KEYS


REFUSALS = (
    "ERR-01 ERR-08 ERR-09 ERR-10 ERR-11 ERR-12 ERR-13 ERR-14 ERR-16 MOD-05 CHAT-12 CHAT-13 CHAT-17"
    " PAR-31 PAR-32 PAR-33 PAR-34 PAR-35 PAR-36 PAR-37 PAR-38 PAR-39 PAR-40 PAR-41 PAR-42 PAR-43"
    " PAR-51 PAR-52 PAR-53 PAR-54 PAR-55 PAR-56 PAR-25 TOOL-13 TOOL-14 TOOL-16"
    " JSON-09 JSON-10 JSON-11 JSON-12 CMP-06 CMP-08 CMP-15 CMP-19 CMP-20"
    " EMB-06 EMB-11 EMB-12 EMB-14 RSP-22 RSP-24 RSP-25 RSP-26 RSP-34 RSP-35"
    " MSG-22 MSG-23 MSG-24 RRK-03 FIL-04 FIL-05 BAT-02 BAT-03"
)
SURVIVALS = "CHAT-14 PAR-65 PAR-68 CMP-07 TOOL-15 ROB-04 ROB-05 ROB-06"
EXTRAS = (
    "PAR-01 PAR-02 PAR-03 PAR-04 PAR-05 PAR-06 PAR-07 PAR-08 PAR-61 PAR-62 PAR-63 PAR-64"
    " PAR-67 PAR-12 PAR-13 PAR-14 PAR-15 PAR-16 PAR-17 PAR-20 PAR-22 SSE-16 SSE-19 SSE-21 SSE-24"
    " CMP-14 CMP-09 CMP-10 CMP-11 EMB-09 RSP-33"
)

# --- one fault each --------------------------------------------------------------------------


def show_stop(outgoing: Outgoing) -> None:
    """Stop strings act one token too late."""
    if outgoing.request.get("stop") and outgoing.events:
        late = {"index": 0, "delta": {"content": "cap"}, "finish_reason": None}
        outgoing.events.insert(-2, outgoing.events[0] | {"choices": [late]})


class BreaksAfterDisconnects:
    """A server that is never the same after three streams."""

    def __init__(self) -> None:
        self._num_streams = 0

    def __call__(self, outgoing: Outgoing) -> None:
        self._num_streams += outgoing.events is not None
        if self._num_streams >= 3 and outgoing.events is None:
            outgoing.status, outgoing.body = 503, {"error": {"message": "wedged"}}


def swap(found: list[Any]) -> list[Any]:
    return found[::-1]


def is_listed(outgoing: Outgoing) -> bool:
    return isinstance(outgoing.request.get("prompt"), list)


def has_ids(outgoing: Outgoing) -> bool:
    return is_listed(outgoing) or isinstance(outgoing.request.get("input"), list)


def noise() -> float:
    return random.uniform(0, 1)


SINGLE: list[tuple[Fault, str]] = [
    # errors
    (put("error", "Bad request"), "ERR-01 ERR-13"),
    (put("error.type", GONE), "ERR-02"),
    (put("error.code", 400), "ERR-03"),
    (put("error.param", ["messages"]), "ERR-04 ERR-05"),
    (header("content-type", "text/html"), "ERR-06 SSE-01"),
    (put("error.message", "Traceback (most recent call last)"), "ERR-07 PAR-24 PAR-25"),
    (put("error", "Unauthorized"), "ERR-19 ERR-10 ERR-15"),
    (header("x-request-id", None), "ERR-17"),
    (header("x-request-id", "the-same"), "ERR-17"),
    (header("x-should-retry", None), "ERR-18"),
    (header("access-control-allow-headers", "*"), "ERR-20"),
    (header("access-control-allow-headers", "authorization"), "ERR-20"),
    # models
    (put("object", "array", "/v1/models"), "MOD-01"),
    (put("data", [], "/v1/models"), "MOD-01"),
    (put("data.0.created", "today", "/v1/models"), "MOD-02"),
    (status(404, lambda o: o.path.startswith("/v1/models/")), "MOD-03 MOD-04"),
    (put("data.0.max_model_len", GONE, "/v1/models"), "MOD-06"),
    # chat
    (put("object", "text", CHAT), "CHAT-01 SSE-07"),
    (put(f"{CHOICE}.message.content", None, CHAT), "CHAT-02"),
    (put(f"{CHOICE}.finish_reason", "eos", CHAT), "CHAT-02"),
    (put("usage.total_tokens", 1), "CHAT-03 CMP-02 SSE-13 CMP-17"),
    (put("usage", GONE), "CHAT-03 CMP-02 EMB-07 RSP-03 MSG-02"),
    (put("id", "one-for-all", CHAT), "CHAT-04"),
    (put("usage.prompt_tokens", 5, CHAT, says('"type": "text"')), "CHAT-05 CHAT-06"),
    (put("usage.prompt_tokens", 5, CHAT, says("system")), "CHAT-07"),
    (status(400, says("developer")), "CHAT-08"),
    (status(400, says("null")), "CHAT-09 TOOL-12"),
    (status(400, says('"content": ""')), "CHAT-10"),
    (status(400, says('"name": "ann"')), "CHAT-11"),
    (status(500, says('"role": "tool"')), "CHAT-15"),
    (status(500, says('"role": "function"')), "CHAT-16"),
    (status(500, says("\\u0000")), "CHAT-18"),
    (put("usage.prompt_tokens_details", GONE), "CHAT-19"),
    (put("usage.prompt_tokens_details.cached_tokens", 0), "CHAT-19"),
    # streaming
    (header("cache-control", None), "SSE-02"),
    (header("x-accel-buffering", None), "SSE-03"),
    (events(lambda found: [b"data: \n\n", *found]), "SSE-04"),
    (events(lambda found: [b"hello\n\n", *found]), "SSE-04"),
    (events(lambda found: [b": \xff\n\n", *found]), "SSE-04"),
    (events(lambda found: found[1:]), "SSE-05"),
    (events(repeat_role), "SSE-06 TOOL-26"),
    (events(new_id_each), "SSE-07"),
    (put(f"{CHOICE}.finish_reason", GONE, CHAT), "SSE-08 CHAT-02"),
    (events(no_finish), "SSE-09 SSE-15 SSE-20 TOOL-25"),
    (events(early_finish), "SSE-08 SSE-09 SSE-10"),
    (events(lambda found: found[:-1]), "SSE-11 ROB-03"),
    (events(lambda found: [*found, "[DONE]"]), "SSE-11"),
    (events(lambda found: [*found[:-1], "[DONE]", found[0]]), "SSE-11"),
    (events(lambda found: [*found[:-1], found[0] | {"choices": []}, "[DONE]"]), "SSE-12 SSE-16"),
    (events(merge_usage), "SSE-13 SSE-15"),
    (events(lambda found: [found[0] | {"usage": {"total_tokens": 1}}, *found[1:]]), "SSE-14"),
    (events(lambda found: [*found[:3], found[2], *found[3:]]), "SSE-17"),
    (events(torn_emoji), "SSE-18"),
    (events(half_pairs), "SSE-18"),
    (show_stop, "SSE-19"),
    (put(f"{CHOICE}.index", 0, CHAT, asks("n")), "SSE-21"),
    (put("choices.*.index", 0, CHAT, asks("n")), "SSE-21 PAR-16"),
    (events(last_word_in_finish), "SSE-22"),
    (events(lambda found: [found[0] | {"system_fingerprint": "x"}, *found[1:]]), "SSE-25"),
    (status(400, asks("stream", None)), "SSE-23"),
    (put(f"{CHOICE}.logprobs", None, CHAT), "SSE-24 PAR-17 PAR-20"),
    (put(f"{CHOICE}.logprobs.content.0.token", "other", CHAT), "SSE-24 PAR-18"),
    # parameters
    (put("usage.completion_tokens", 10, CHAT), "PAR-11 PAR-12"),
    (put(f"{CHOICE}.finish_reason", "stop"), "PAR-11 PAR-12 SSE-20 SSE-08"),
    (put(f"{CHOICE}.message.content", "The capital", CHAT, asks("stop")), "PAR-13"),
    (put(f"{CHOICE}.message.content", "always", CHAT), "PAR-15 PAR-22"),
    (put(f"{CHOICE}.logprobs.content.0.logprob", 0.5), "PAR-17"),
    (put(f"{CHOICE}.logprobs.content.0.top_logprobs", swap), "PAR-19"),
    (put(f"{CHOICE}.logprobs.content.*.top_logprobs", lambda top: top[:1]), "PAR-19"),
    (put(f"{CHOICE}.logprobs.content.*.top_logprobs", [{"logprob": -1}]), "PAR-20"),
    (put(f"{CHOICE}.logprobs", {"content": []}), "PAR-21"),
    (put(f"{CHOICE}.text", "The", COMPLETIONS, asks(BIAS)), "PAR-23"),
    (status(500, asks("max_tokens", 10**12)), "PAR-66"),
    # tools
    (put(CALLS, GONE), "TOOL-01 TOOL-02 TOOL-03 TOOL-04 TOOL-07 TOOL-08 TOOL-11"),
    (put(f"{CALLS}.0.id", ""), "TOOL-02"),
    (put(f"{CALLS}.0.function.name", "other"), "TOOL-02 TOOL-07"),
    (put(f"{CALLS}.0.function.arguments", ""), "TOOL-03 TOOL-04 TOOL-08"),
    (put(f"{CALLS}.0.function.arguments", {"city": "Paris"}), "TOOL-03"),
    (put(f"{CALLS}.0.function.arguments", '{"town": "Paris"}'), "TOOL-04 TOOL-08"),
    (put(f"{CALLS}", lambda calls: calls * 2), "TOOL-11"),
    (put(f"{CHOICE}.finish_reason", "stop", CHAT, asks(TOOLS)), "TOOL-05 TOOL-25"),
    (put(f"{CHOICE}.message.content", [], CHAT, asks(TOOLS)), "TOOL-06 TOOL-09"),
    (put(f"{CHOICE}.finish_reason", "tool_calls", CHAT, asks("tool_choice", "auto")), "TOOL-10"),
    (put(f"{CHOICE}.message.content", None, CHAT, says("tool_call_id")), "TOOL-12"),
    (status(400, says("tool_39")), "TOOL-17"),
    (put(f"{DELTA}.tool_calls.0.index", GONE), "TOOL-21"),
    (put(f"{DELTA}.tool_calls.0.id", None), "TOOL-22"),
    (events(all_name_pieces), "TOOL-23"),
    (put(f"{DELTA}.tool_calls.0.function.arguments", '"'), "TOOL-24"),
    (put(f"{DELTA}.tool_calls", GONE), "TOOL-21 TOOL-22 TOOL-23 TOOL-24 TOOL-25"),
    # structured output
    (put(f"{CHOICE}.message.content", "Grass is green.", CHAT),
     "JSON-01 JSON-02 JSON-03 JSON-04 JSON-05 JSON-06"),
    (put(f"{CHOICE}.message.content", '{"name": "blue", "dark": false}', CHAT), "JSON-02"),
    (put(f"{CHOICE}.message.content", '{"first": 1}', CHAT), "JSON-03 JSON-04 JSON-05 JSON-06"),
    (put(f"{CHOICE}.message.content", "[1, 2, 3]", CHAT), "JSON-01 JSON-06"),
    (put(f"{DELTA}.content", "x", CHAT), "JSON-07"),
    (put(f"{CHOICE}.finish_reason", "length", CHAT), "JSON-08"),
    # completions
    (put("object", "chat.completion", COMPLETIONS), "CMP-01 CMP-16"),
    (put(f"{CHOICE}.text", "", COMPLETIONS), "CMP-01"),
    (put("choices", swap, COMPLETIONS), "CMP-03"),
    (put("choices", lambda found: found[:1], COMPLETIONS), "CMP-03 CMP-05"),
    (status(400, has_ids), "CMP-03 CMP-04 CMP-05 EMB-04 EMB-05"),
    (put("usage.prompt_tokens", 9, COMPLETIONS, is_listed), "CMP-04"),
    (put(f"{CHOICE}.text", "no echo", COMPLETIONS), "CMP-09"),
    (put(f"{CHOICE}.logprobs.token_logprobs", [-0.5] * 6), "CMP-10 CMP-11"),
    (put(f"{CHOICE}.logprobs.text_offset", [0, 0, 0, 0]), "CMP-12"),
    (put(f"{CHOICE}.logprobs.tokens", ["a", "b", "c", "d"]), "CMP-12 CMP-13"),
    (put(f"{CHOICE}.finish_reason", "length", COMPLETIONS, asks("stop")), "CMP-14"),
    (answers(COMPLETIONS, {"usage": {"prompt_tokens": 5}}, asks("suffix")), "CMP-15"),
    (events(lambda found: found[:-1], COMPLETIONS), "CMP-16"),
    (events(lambda found: [*found[:-2], "[DONE]"], COMPLETIONS), "CMP-16 CMP-17"),
    (put("usage.completion_tokens", 99, COMPLETIONS), "CMP-18"),
    # embeddings
    (put("data.0.object", "vector", EMBEDDINGS), "EMB-01"),
    (put("data.0.embedding", [0.5] * 32, EMBEDDINGS, asks("encoding_format", "base64")), "EMB-02"),
    (put("data.0.embedding", "AAAA", EMBEDDINGS), "EMB-01 EMB-02 EMB-03"),
    (put("data", swap, EMBEDDINGS), "EMB-04"),
    (put("data.1.embedding", [0.5] * 32, EMBEDDINGS), "EMB-04"),
    (put("data", lambda found: found[:1], EMBEDDINGS), "EMB-05"),
    (put("usage.prompt_tokens", 0, EMBEDDINGS), "EMB-07"),
    (put("data.0.embedding", [0.5] * 32, EMBEDDINGS), "EMB-09 EMB-10"),
    (put("data.0.embedding", lambda vector: [each + noise() for each in vector]), "EMB-08"),
    (status(500, asks("input", "")), "EMB-13"),
    # reranking
    (put("results", swap, "/v1/rerank"), "RRK-01"),
    (put("results.0.relevance_score", GONE, "/v1/rerank"), "RRK-01"),
    (put("results", lambda found: found * 2, "/v1/rerank"), "RRK-02"),
    # responses
    (put("object", "chat.completion", RESPONSES), "RSP-01"),
    (put("output.0.content", [], RESPONSES), "RSP-02"),
    (put("output.0.role", "user", RESPONSES), "RSP-02"),
    (put("usage.total_tokens", 1, RESPONSES), "RSP-03"),
    (put("status", "completed", RESPONSES), "RSP-04"),
    (put("incomplete_details", None, RESPONSES), "RSP-04"),
    (put("usage.input_tokens", 3, RESPONSES, says("input_text")), "RSP-05"),
    (put("usage.input_tokens", 3, RESPONSES), "RSP-06 RSP-23"),
    (events(lambda found: found[1:], RESPONSES), "RSP-11"),
    (events(lambda found: found[:-1], RESPONSES), "RSP-11 RSP-13"),
    (put("sequence_number", 0, RESPONSES), "RSP-12"),
    (put("delta", "x", RESPONSES), "RSP-13"),
    (events(lambda found: [found[0], *found[4:]], RESPONSES), "RSP-14"),
    (events(lambda found: [found[0], found[2], found[1], *found[3:]], RESPONSES), "RSP-14"),
    (status(404, lambda o: o.path.startswith(RESPONSES + "/")), "RSP-21 RSP-22"),
    (put("output.0.content.0.text", "x", RESPONSES + "/"), "RSP-21"),
    (put("output.0.type", "message", RESPONSES), "RSP-31"),
    (put("output.0.arguments", "{}", RESPONSES), "RSP-31"),
    (put("output.0.content.0.text", '{"name": "blue"}', RESPONSES), "RSP-32"),
    (status(500, asks("reasoning")), "RSP-33"),
    # messages
    (put("type", "chat.completion", MESSAGES), "MSG-01 MSG-11 MSG-22 MSG-24"),
    (put("stop_reason", "stop", MESSAGES), "MSG-01 MSG-03 MSG-04 MSG-31"),
    (put("usage.output_tokens", 0, MESSAGES), "MSG-02"),
    (put("stop_sequence", None, MESSAGES), "MSG-04"),
    (put("usage.input_tokens", 3, MESSAGES), "MSG-05 MSG-21"),
    (put("usage.input_tokens", 3, MESSAGES, says("cache_control")), "MSG-06"),
    (events(lambda found: [*found[:-3], *found[:-4:-1]], MESSAGES), "MSG-11"),
    (events(unnamed, MESSAGES), "MSG-11"),
    (put("delta.text", "x", MESSAGES), "MSG-12"),
    (put("message.usage", GONE, MESSAGES), "MSG-13"),
    (put("delta.stop_reason", None, MESSAGES), "MSG-13"),
    (events(lambda found: [*found, "[DONE]"], MESSAGES), "MSG-14"),
    (status(404, lambda o: "count_tokens" in o.path), "MSG-21"),
    (put("content.0.input", '{"city": "Paris"}', MESSAGES), "MSG-31"),
    (status(400, says("tool_result")), "MSG-32"),
    # single clients
    (status(400, says("web_search")), "CLI-01"),
    (status(400, asks("client_metadata")), "CLI-01"),
    (put("output.0.type", "message", RESPONSES), "CLI-02"),
    (put("usage", GONE, CHAT), "CLI-03"),
    (put("usage.completion_tokens", lambda n: -n, CHAT), "CLI-03"),
    (put("content", lambda found: [b | {"citations": None} for b in found], MESSAGES), "CLI-04"),
    (put("message.usage.input_tokens", 0, MESSAGES), "CLI-05"),
    (put("error.details", GONE, MESSAGES), "CLI-06"),
    (put("eos_token", GONE, "/tokenizer_info"), "CLI-07"),
    (status(404, lambda o: o.path == "/tokenizer_info"), "CLI-07"),
    (put("choices.0.text", "x", COMPLETIONS, asks("echo")), "CLI-08"),
    (answers(RESPONSES, {}, asks("stream")), "CLI-09"),
    (status(400, lambda o: "messages" in o.request and "model" not in o.request), "CLI-10"),
    (put("choices.0.message", {}, "/v1/fim"), "CLI-11"),
    (put("choices.0.delta", {}, "/v1/fim"), "CLI-11"),
    (put("usage.prompt_tokens", 9, COMPLETIONS, asks("parse_special")), "CLI-12"),
    # files and batches
    (put("bytes", 1, "/v1/files"), "FIL-01"),
    (put("data", lambda found: [], "/v1/files"), "FIL-03"),
    (answers("/v1/files/", {}, lambda o: o.path.endswith("content")), "FIL-02 BAT-01"),
    (put("deleted", False, "/v1/files"), "FIL-04"),
    (put("status", "failed", "/v1/batches"), "BAT-01"),
    # robustness
    (status(503, lambda o: o.path == "/health"), "ROB-01"),
    (BreaksAfterDisconnects(), "ROB-02"),
    (events(mixed_up), "ROB-03"),
    (status(500, asks("max_tokens", 1)), "ROB-07"),
    (status(500, asks("max_tokens", 2)), "ROB-09"),
    (header("retry-after", None), "PAR-68 ROB-08"),
]  # fmt: skip

FAULTS: list[tuple[Fault, str]] = [
    (accept_mistakes, REFUSALS),
    (fail_on_mistakes, f"{REFUSALS} {SURVIVALS}"),
    (status(500, has_extras), EXTRAS),
    *SINGLE,
]
PRIMERS = {"PAR-68"}  # runs first, for the 429 that ROB-08 judges


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda n: FAULTS[n][1][:40])
async def test_a_planted_fault_fails_its_rule(number):
    fault, broken = FAULTS[number]
    results = await outcomes(fault, broken.split())
    missed = {id: (r.outcome, r.detail) for id, r in results.items() if r.outcome == "pass"}
    assert not missed.keys() - PRIMERS, missed
    skipped = {id: r.detail for id, r in results.items() if r.outcome == "skipped"}
    assert not skipped


def test_every_conformance_rule_can_fail():
    breakable = {id for _, broken in FAULTS for id in broken.split()}
    assert breakable == set(RULES)
