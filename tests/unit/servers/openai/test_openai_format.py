"""Events as OpenAI's JSON, for what a model without odd tokens never shows: text that is not
ASCII, tokens that are half a character, several choices, calls in any order.
"""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.interfaces.backend import (
    FinishEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    UsageEvent,
)
from engine.servers.batches.caller import LineAnswer
from engine.servers.batches.results import answered_line
from engine.servers.batches.schema import LineUsage
from engine.servers.http.listing import list_body
from engine.servers.openai.format import (
    ChatStream,
    Collected,
    CompletionStream,
    chat_body,
    completion_body,
    new_envelope,
    usage_body,
)
from engine.servers.openai.logprobs import legacy_logprobs
from engine.servers.openai.reports import timings
from engine.servers.openai.token_fields import TokenFields
from engine.servers.responses.format import usage_body as responses_usage
from engine.servers.serving.event_pump import OutputEvent
from tests.support.fakes.fake_backend import CARD

ENVELOPE = new_envelope("id-1", CARD)
USAGE = UsageEvent(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2)
# "é" is two bytes, of which each may be a token.
HALVES = (TokenText("\ufffd", b"\xc3", -0.25), TokenText("\ufffd", b"\xa9", -0.5))


def whole(events: Sequence[OutputEvent], num_choices: int = 1) -> dict[str, Any]:
    collected = Collected(num_choices)
    collected.add(events)
    body = json.loads(chat_body(ENVELOPE, collected, USAGE, tokens=TokenFields(has_logprobs=True)))
    assert isinstance(body, dict)
    return body


def chunks(text: bytes) -> list[Any]:
    return [json.loads(each.removeprefix("data: ")) for each in text.decode().split("\n\n") if each]


def test_logprob_bytes_are_those_of_each_token() -> None:
    event = TextEvent(0, "é", 2, HALVES)
    entries = whole([event])["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in entries] == [[0xC3], [0xA9]]
    (chunk,) = chunks(ChatStream(ENVELOPE, 1, False).chunk(event))
    assert chunk["choices"][0]["logprobs"]["content"] == entries


def test_usage_reports_accepted_and_rejected_prediction_tokens() -> None:
    assert usage_body(USAGE)["completion_tokens_details"] == {"reasoning_tokens": 2}
    predicted = msgspec.structs.replace(USAGE, num_drafted=9, num_accepted=6, has_prediction=True)
    details = usage_body(predicted)["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 6
    assert details["rejected_prediction_tokens"] == 3
    assert timings(predicted)["draft_n"] == 9 and timings(predicted)["draft_n_accepted"] == 6
    assert "draft_n" not in timings(USAGE)


def test_text_offsets_count_characters_per_choice() -> None:
    tokens = tuple(TokenText(text, text.encode(), -1.0) for text in ("é", "—x", "y"))
    assert legacy_logprobs(tokens, 4)["text_offset"] == [4, 5, 7]
    stream = CompletionStream(ENVELOPE, 2, False)
    offsets = []
    for choice, token in ((0, tokens[1]), (1, tokens[0]), (0, tokens[2]), (1, tokens[2])):
        (chunk,) = chunks(stream.chunk(TextEvent(choice, token.token, 1, (token,))))
        given = chunk["choices"][0]
        offsets.append((given["index"], given["logprobs"]["text_offset"]))
    assert offsets == [(0, [0]), (1, [0]), (0, [2]), (1, [1])]


def test_text_offsets_of_empty_and_partial_character_tokens() -> None:
    texts = [b"<s>", b"a", *(bytes([byte]) for byte in "—".encode()), b"b"]
    tokens = [TokenText(each.decode(errors="replace"), each, -1.0) for each in texts]
    tokens[0] = TokenText("<s>", b"<s>", -1.0, in_text=False)
    tokens.append(TokenText("remote", b"", -1.0))
    tokens.append(tokens[1])
    assert legacy_logprobs(tokens, 0)["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 9]


def test_stop_reason_is_the_matched_string_or_token() -> None:
    events = [FinishEvent(0, "stop", "END"), FinishEvent(1, "stop", 17), FinishEvent(2, "length")]
    expected = [("stop", "END"), ("stop", 17), ("length", None)]
    collected = Collected(3)
    collected.add(events)
    completion = json.loads(completion_body(ENVELOPE, collected.choices, USAGE))
    for body in (whole(events, 3), completion):
        told = [(each["finish_reason"], each["stop_reason"]) for each in body["choices"]]
        assert told == expected
        assert [each["matched_stop"] for each in body["choices"]] == ["END", 17, None]
    for stream in (ChatStream(ENVELOPE, 3, False), CompletionStream(ENVELOPE, 3, False)):
        told = [
            (each["finish_reason"], each["stop_reason"])
            for event in events
            for chunk in chunks(stream.chunk(event))
            for each in chunk["choices"]
        ]
        assert told == expected


def test_tool_calls_are_ordered_by_index() -> None:
    events = [
        ToolCallEvent(0, 1, "{}", "b", "second"),
        ToolCallEvent(0, 0, "{}", "a", "first"),
        FinishEvent(0, "tool_calls"),
    ]
    message = whole(events)["choices"][0]["message"]
    assert [each["id"] for each in message["tool_calls"]] == ["a", "b"]


def test_has_more_is_false_on_the_last_page() -> None:
    items = [{"id": each} for each in "abc"]
    for limit, has_more, last in ((2, True, "b"), (3, False, "c"), (4, False, "c")):
        body = list_body(items, limit)
        assert (body["has_more"], body["first_id"], body["last_id"]) == (has_more, "a", last)
    assert list_body([], 2)["last_id"] is None


def test_the_usage_of_a_batch_line_is_read_in_either_apis_names() -> None:
    expected = LineUsage(input_tokens=7, cached_tokens=3, output_tokens=5, reasoning_tokens=2)
    for usage in (usage_body(USAGE), responses_usage(USAGE)):
        body = msgspec.json.encode({"usage": usage})
        _, cost = answered_line("/v1/responses", "x", LineAnswer(200, {"x-request-id": "r"}, body))
        assert cost == expected
    _, cost = answered_line(
        "/v1/responses", "x", LineAnswer(400, {"x-request-id": "r"}, b'{"error": {}}')
    )
    assert cost == LineUsage()
