"""The checker of answers distinguishes whole answers, well-formed failures and broken ones."""

import json
from typing import Any

import pytest

from tests.scoreboard.served_engine import percentile, read_samples
from tests.scoreboard.streams import MalformedError, Reply, judge

ERROR = {"error": {"message": "no", "type": "server_error", "param": None, "code": "X"}}


def chunk(text: str, finish: str | None = None, index: int = 0, **changes: Any) -> str:
    choice = {"index": index, "text": text, "finish_reason": finish}
    fields = {"id": "a", "created": 1, "model": "m", "object": "o", "choices": [choice]}
    return json.dumps(fields | changes)


def streamed(*payloads: str) -> Reply:
    body = "".join(f"data: {payload}\n\n" for payload in payloads)
    headers = {"content-type": "text/event-stream"}
    return Reply(status=200, headers=headers, body=body.encode())


def plain(status: int, body: Any) -> Reply:
    headers = {"content-type": "application/json"}
    return Reply(status=status, headers=headers, body=json.dumps(body).encode())


def test_a_whole_stream_is_joined_per_choice() -> None:
    reply = streamed(
        *(chunk("a"), chunk("x", index=1), chunk("b")),
        *(chunk("", "stop"), chunk("", "length", index=1), "[DONE]"),
    )
    judge(reply)
    assert reply.is_whole and reply.texts == {0: "ab", 1: "x"}


@pytest.mark.parametrize(
    "reply", [streamed(chunk("a"), json.dumps(ERROR)), plain(503, ERROR), plain(400, ERROR)]
)
def test_a_well_formed_error_reply_is_not_a_whole_answer(reply: Reply) -> None:
    judge(reply)
    assert reply.error == ERROR["error"] and reply.is_well_formed and not reply.is_whole


@pytest.mark.parametrize(
    "reply",
    [
        streamed(chunk("a")),  # ends without any ending
        streamed(chunk("a"), "[DONE]"),  # without a finish reason
        streamed(chunk("a", "stop"), chunk("b"), "[DONE]"),  # continues after its end
        streamed(chunk("a", "stop"), chunk("", "stop"), "[DONE]"),  # two endings
        streamed(chunk("a", "stop"), "[DONE]", "[DONE]"),
        streamed(chunk("a", "stop"), "[DONE]", json.dumps(ERROR)),
        streamed(json.dumps(ERROR), "[DONE]"),  # both endings
        streamed(chunk("a"), chunk("b", "stop", id="another"), "[DONE]"),
        streamed(chunk("a", "stop"), chunk("b", index=1), "[DONE]"),  # one choice never ended
        plain(500, {"detail": "no"}),
        plain(503, {"error": {"message": "no"}}),
        plain(302, {}),
        plain(200, {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}),
    ],
)
def test_a_malformed_reply_is_reported(reply: Reply) -> None:
    with pytest.raises(MalformedError):
        judge(reply)


def test_bytes_that_are_not_sse_events_are_reported() -> None:
    reply = streamed(chunk("a", "stop"), "[DONE]")
    reply.body = b"nonsense\n" + reply.body
    with pytest.raises(MalformedError):
        judge(reply)


def test_metric_samples_are_summed_over_labels_except_block_states() -> None:
    page = '# HELP x\nx{a="1"} 1.0\nx{a="2"} 2.0\nengine_kv_blocks{state="used"} 3.0\n'
    assert read_samples(page) == {"x": 3.0, "used_blocks": 3.0}


def test_percentile_of_many_one_and_no_values() -> None:
    assert percentile([float(n) for n in range(100)], 0.99) == 98
    assert percentile([1.0], 0.5) == 1
    assert not percentile([], 0.5) <= 1e9, "of nothing no limit holds"
