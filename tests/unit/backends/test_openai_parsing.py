"""Other servers' streams to typed events: any cut of the bytes, and every spelling in use."""

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.openai.answer import EventLines
from engine.backends.openai.failures import KeyRefusedError, error_of
from engine.backends.openai.reader import AnswerReader, Expected
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    RateLimitError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from tests.support.fakes.scripted_server import delta, usage

STREAM = (
    ': hello\n\nevent: x\nid: 7\ndata: {"a": 1}\n\ndata:{"b": "ü"}\n\n'
    "data: two\ndata: lines\n\nretry: 3\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', '{"b": "ü"}'.encode(), b"two\nlines", b"[DONE]"]


@given(st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200), max_size=30))
def test_sse_parsing_is_the_same_for_any_split_of_the_bytes(end: str, cuts: list[int]) -> None:
    # With bare CRs the last line is only known to have ended when something follows.
    raw = STREAM.replace("\n", end).encode() + b"\n"
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    lines = EventLines()
    found = [
        event for a, b in zip(places, places[1:], strict=False) for event in lines.push(raw[a:b])
    ]
    assert found == EVENTS


def test_an_endless_sse_line_is_refused() -> None:
    lines = EventLines()
    with pytest.raises(UnavailableError, match="too large"):
        for _ in range(20):
            lines.push(b"data: " + b"x" * 2**20)


def read(
    *chunks: Any, ends: bool = True, expected: Expected | None = None, **params: Any
) -> list[Event]:
    events: list[Event] = []
    asked = expected or Expected(SamplingParams(**params))
    reader = AnswerReader(asked, events.append, 0.0)
    for chunk in chunks:
        reader.push(msgspec.json.encode(chunk))
    return [*events, reader.end()] if ends else events


def test_reasoning_is_read_in_both_spellings_with_usage() -> None:
    *events, last = read(
        delta(role="assistant", content=""),
        delta(reasoning="why"),
        delta(reasoning_content=" not", reasoning=" not"),
        delta(content="Yes"),
        delta(finish="length"),
        usage(5, 9, cached=4, reasoning=6),
    )
    assert events == [
        ReasoningEvent(0, "why"),
        TextEvent(0, "", 1),
        ReasoningEvent(0, " not"),
        TextEvent(0, "", 1),
        TextEvent(0, "Yes", 1),
        FinishEvent(0, "length"),
    ]
    assert isinstance(last, UsageEvent)
    counts = (last.prompt_tokens, last.completion_tokens, last.cached_tokens, last.reasoning_tokens)
    assert counts == (5, 9, 4, 6)


def test_without_usage_the_received_chunks_are_counted() -> None:
    done = delta(content="b", finish="stop")
    asked = Expected(SamplingParams(), num_prompt=7)
    last = read(delta(content="a"), done, expected=asked)[-1]
    assert isinstance(last, UsageEvent)
    assert (last.prompt_tokens, last.completion_tokens) == (7, 2)


def call(**fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[fields])


def calls_of(events: list[Event]) -> dict[int, tuple[str | None, str]]:
    found: dict[int, tuple[str | None, str]] = {}
    for event in events:
        if isinstance(event, ToolCallEvent):
            name, arguments = found.get(event.index, (event.name, ""))
            found[event.index] = (name, arguments + event.arguments)
    return found


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(
            [
                call(index=0, id="a", function={"name": "f", "arguments": ""}),
                call(index=0, function={"arguments": '{"x"'}),
                call(index=0, function={"arguments": ": 1}"}),
                call(index=1, id="b", function={"name": "g", "arguments": '{"y": 2}'}),
            ],
            id="in pieces",
        ),
        pytest.param(
            [
                call(index=0, id="a", function={"name": "f", "arguments": '{"x": 1}'}),
                call(index=0, id="b", function={"name": "g", "arguments": '{"y": 2}'}),
            ],
            id="one index for all",
        ),
        pytest.param(
            [
                delta(
                    tool_calls=[
                        {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
                        {"id": "b", "function": {"name": "g", "arguments": {"y": 2}}},
                    ]
                )
            ],
            id="no index, and arguments as an object",
        ),
        pytest.param(
            [
                call(index=0, id="a", function={"name": "f", "arguments": '{"x"'}),
                call(index=0, id="a", function={"name": "f", "arguments": ": 1}"}),
                call(index=1, id="b", function={"name": "g", "arguments": '{"y": 2}'}),
            ],
            id="id and name repeated",
        ),
    ],
)
def test_tool_calls_are_read_with_or_without_indexes(chunks: list[Any]) -> None:
    events = read(*chunks, delta(finish="stop"))
    found = [(name, json.loads(arguments)) for name, arguments in calls_of(events).values()]
    assert found == [("f", {"x": 1}), ("g", {"y": 2})]
    firsts = [e for e in events if isinstance(e, ToolCallEvent) and e.name]
    assert [e.call_id for e in firsts] == ["a", "b"]
    assert FinishEvent(0, "tool_calls") in events


def test_a_tool_call_without_a_name_is_an_error() -> None:
    with pytest.raises(UnavailableError, match="without a name"):
        read(call(index=0, function={"arguments": "{}"}), ends=False)


def test_logprobs_of_chats_and_completions_are_read() -> None:
    content = [
        {
            "token": "é",
            "logprob": -0.5,
            "bytes": [195, 169],
            "top_logprobs": [
                {"token": "b", "logprob": -2.0, "bytes": None},
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            ],
        }
    ]
    chat = delta(content="é", finish="stop")
    chat["choices"][0]["logprobs"] = {"content": content}
    columns = {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -2.0, "é": -0.5}],
        "text_offset": [0],
    }
    legacy = {"choices": [{"text": "é", "logprobs": columns, "finish_reason": "stop"}]}
    for chunk in (chat, legacy):
        (event, *_) = read(chunk, logprobs=1)
        assert isinstance(event, TextEvent) and event.logprobs is not None
        (token,) = event.logprobs
        assert (token.token, token.token_bytes, token.logprob) == ("é", "é".encode(), -0.5)
        assert [each.token for each in token.top] == ["é"]


def test_missing_logprobs_are_reported_as_unsupported() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(delta(content="a"), logprobs=0, ends=False)
    assert caught.value.param == "logprobs"


def test_echoed_prompt_logprobs_come_before_the_continuation() -> None:
    columns = {
        "tokens": ["a", " b", " c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {" b": -1.0}, {" c": -2.0}],
        "text_offset": [0, 1, 3],
    }
    body = {
        "choices": [{"text": "a b c", "logprobs": columns, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
    }
    params = SamplingParams(logprobs=1, score_prompt=True)
    prompt, text, *_ = read(body, expected=Expected(params, scores_prompt=True))
    assert isinstance(prompt, TextEvent) and isinstance(text, TextEvent)
    assert (prompt.text, prompt.num_tokens, text.text, text.num_tokens) == ("a b", 0, " c", 1)
    assert prompt.logprobs is not None and text.logprobs is not None
    assert math.isnan(prompt.logprobs[0].logprob) and prompt.logprobs[1].logprob == -1.0
    assert [token.logprob for token in text.logprobs] == [-2.0]


@pytest.mark.parametrize(
    "fields, stop_reason",
    [
        ({"stop_reason": "\n"}, "\n"),
        ({"matched_stop": 7}, 7),
        ({"stop_reason": 2}, None),  # an end of text that nobody named
        ({"stop_reason": "other"}, None),
    ],
)
def test_stop_reasons_are_reported_only_if_the_client_named_them(
    fields: Any, stop_reason: Any
) -> None:
    chunk = delta(finish="stop")
    chunk["choices"][0] |= fields
    events = read(chunk, stop=("\n",), stop_token_ids=(7,))
    assert FinishEvent(0, "stop", stop_reason) in events


def test_llama_servers_stopping_word_becomes_the_stop_reason() -> None:
    told = delta(finish="stop") | {"__verbose": {"stopping_word": "x", "content": "..."}}
    assert FinishEvent(0, "stop", "x") in read(told, stop=("x",))


def test_stop_strings_beyond_the_servers_limit_are_matched_locally() -> None:
    params = SamplingParams(stop=("1", "2", "END"), n=2)
    events: list[Event] = []
    reader = AnswerReader(Expected(params, own_stops=("END",)), events.append, 0.0)
    for text in ("so E", "N", "D more"):
        reader.push(msgspec.json.encode(delta(content=text)))
    reader.push(msgspec.json.encode(delta(content="ignored")))
    assert not reader.was_cut
    reader.push(msgspec.json.encode(delta(1, content="EN", finish="stop")))
    assert reader.was_cut
    texts = ["", ""]
    for event in events:
        if isinstance(event, TextEvent):
            texts[event.choice] += event.text
    assert texts == ["so ", "EN"]
    assert [e for e in events if isinstance(e, FinishEvent)] == [
        FinishEvent(0, "stop", "END"),
        FinishEvent(1, "stop"),
    ]


@pytest.mark.parametrize(
    "chunk, kind, words",
    [
        ({"error": {"message": "no", "type": "invalid_request_error"}}, InvalidRequestError, "no"),
        ({"error": {"message": "no", "code": 400}}, InvalidRequestError, "no"),
        ({"error": {"message": "no", "type": "rate_limit_error"}}, RateLimitError, "no"),
        ({"error": "out of memory", "error_type": "generation"}, UnavailableError, "failed"),
        ({"object": "error", "message": "dead", "code": 500}, UnavailableError, "failed"),
        (delta(finish="abort"), UnavailableError, "broke off"),
        ({"choices": "what"}, UnavailableError, "understood"),
    ],
)
def test_errors_within_a_stream_are_raised(chunk: Any, kind: type[EngineError], words: str) -> None:
    with pytest.raises(kind, match=words):
        read(delta(content="a"), chunk, ends=False)


def test_a_stream_without_a_finish_reason_is_incomplete() -> None:
    with pytest.raises(UnavailableError, match="broke off"):
        read(delta(0, content="a", finish="stop"), delta(1, content="b"), n=2)


def test_choices_with_unexpected_indexes_are_ignored() -> None:
    stray = [delta(content="x") for _ in range(2)]
    for chunk, index in zip(stray, (1, -1), strict=True):
        chunk["choices"][0]["index"] = index
    events = read(*stray, delta(content="a"), delta(finish="stop"))
    assert events[:-1] == [TextEvent(0, "a", 1), FinishEvent(0, "stop")]


def test_token_ids_are_reported_only_if_every_token_has_one() -> None:
    tokens: list[dict[str, Any]] = [
        {"token": "a", "logprob": -1.0, "id": 5},
        {"token": "b", "logprob": -1.0},
    ]
    for content, ids, number in ((tokens, (), 2), (tokens[:1], (5,), 1)):
        chunk = delta(content="ab")
        chunk["choices"][0]["logprobs"] = {"content": content}
        (event,) = read(chunk, ends=False, logprobs=0)
        assert isinstance(event, TextEvent)
        assert (event.token_ids, event.num_tokens) == (ids, number)


@pytest.mark.parametrize("status", [401, 403])
def test_an_upstream_401_does_not_leak_the_key(status: int) -> None:
    error = error_of(status, {}, b'{"error": {"message": "sk-secret is wrong"}}')
    assert isinstance(error, KeyRefusedError)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({b"retry-after": b"7"}, 7.0),
        ({b"retry-after-ms": b"250", b"retry-after": b"7"}, 0.25),
        ({b"retry-after": b"-1"}, None),
        ({b"retry-after": b"9999999"}, None),
        ({b"retry-after": b"inf"}, None),
        ({b"retry-after": b"Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
def test_retry_after_headers_are_read(headers: dict[bytes, bytes], seconds: float | None) -> None:
    assert error_of(429, headers, b"{}").retry_after == seconds


def test_upstream_grammar_errors_name_the_clients_parameter() -> None:
    body = b'{"error": {"message": "structured_outputs.regex: is wrong", "param": "%s"}}'
    error = error_of(400, {}, body % b"structured_outputs.regex", "guided_regex")
    assert (error.param, error.message) == ("guided_regex", "guided_regex: is wrong")
    assert error_of(400, {}, body % b"temperature", "guided_regex").param == "temperature"
