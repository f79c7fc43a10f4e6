"""/v1/responses: how an answer becomes a response, or its events."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.errors import InferenceError, InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
)
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script, reasoning_script
from tests.support.servers.responses_api import (
    TEXT,
    TOOL,
    ask,
    asked,
    create,
    serving,
    stream,
)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(backend, tmp_path) as client:
        yield client


async def test_a_response_body_has_openais_shape(client: httpx.AsyncClient) -> None:
    body = await create(
        client, instructions="be kind", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50
    )
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    assert body["completed_at"] >= body["created_at"]
    (message,) = body["output"]
    assert message["id"].startswith("msg_")
    del message["id"]
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    echoed = {
        "instructions": "be kind",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "max_output_tokens": 50,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "store": False,
        "error": None,
    }
    assert {name: body[name] for name in echoed} == echoed


async def test_a_truncated_response_is_incomplete(client: httpx.AsyncClient) -> None:
    body = await create(client, max_output_tokens=2)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    assert body["output"][0]["status"] == "incomplete"
    *_, last = await stream(client, max_output_tokens=2)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_max_tokens_names_of_other_servers_are_refused_with_max_output_tokens(
    client: httpx.AsyncClient,
) -> None:
    """-1 means no limit to llama.cpp and Ollama, which is a number that bodies can't have."""
    for fields in ({"n_predict": -1}, {"num_predict": -1}, {"n_predict": 5}):
        response = await client.post("/v1/responses", json=ask(**fields))
        assert response.status_code == 400, response.text
        assert "max_output_tokens" in response.json()["error"]["message"]


async def test_a_text_response_streams_its_events_in_order(client: httpx.AsyncClient) -> None:
    events = await stream(client)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 6,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == TEXT == events[-4]["text"]
    final = events[-1]["response"]
    assert events[-2]["item"] == final["output"][0]
    assert events[-3]["part"] == final["output"][0]["content"][0]
    assert {event["item_id"] for event in deltas} == {final["output"][0]["id"]}
    assert final["usage"]["output_tokens"] == 6


async def test_a_response_has_text_before_function_calls(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = call_script(("get_time", '{"zone":"utc"}'), ("get_time", ""), said="Well")
    events = await stream(client, tools=[TOOL])
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    assert [(item["name"], item["arguments"], item["call_id"]) for item in output[1:]] == [
        ("get_time", '{"zone":"utc"}', "call_0"),
        ("get_time", "{}", "call_1"),
    ]
    assert events[-1]["response"]["status"] == "completed"
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["id"] == item["id"]
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1] == own[-1] | {"type": "response.output_item.done", "item": item}
        if index:
            assert own[-2]["type"] == "response.function_call_arguments.done"
            assert own[-2]["arguments"] == item["arguments"]
            pieces = [event["delta"] for event in own if "delta" in event]
            assert "".join(pieces) == item["arguments"]
    whole = await create(client, tools=[TOOL])
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in output]


async def test_reasoning_is_a_separate_output_item(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = reasoning_script(["Hm", ", yes"], ["It", " is."])
    backend.reasoning_tokens = 2
    events = await stream(client)
    thought, message = events[-1]["response"]["output"]
    assert thought["id"].startswith("rs_")
    assert thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, yes"}]
    assert message["content"][0]["text"] == "It is."
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": 2}
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]


async def test_a_response_without_text_has_an_empty_message(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [TextEvent(0, "", 1), FinishEvent(0, "stop")]
    body = await create(client)
    assert body["output"][0]["content"][0]["text"] == ""


async def test_a_truncated_function_call_is_incomplete_and_keeps_its_arguments(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [
        ToolCallEvent(0, 0, "", "c", "get_time"),
        ToolCallEvent(0, 0, '{"zo'),
        FinishEvent(0, "length"),
    ]
    (item,) = (await create(client, tools=[TOOL]))["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"zo')
    # It can be sent back, and is nothing that the model could have an answer to.
    await create(client, input=[{"role": "user", "content": "x"}, item], tools=[TOOL])
    assert [message["role"] for message in asked(backend).messages] == ["user"]


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}]
)
async def test_response_logprobs_are_returned_if_requested(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    events = await stream(client, **fields)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]][:2] == ["Hello", " from"]
    assert len(part["logprobs"][0]["top_logprobs"]) == fields.get("top_logprobs", 0)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


async def test_logprobs_of_reasoning_are_not_in_the_message(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    def token(text: str, shown: str = "") -> TextEvent:
        return TextEvent(0, shown, 1, (TokenText(text, text.encode(), -0.5),))

    backend.script = [
        token("<think>"),
        ReasoningEvent(0, "Hm"),
        token("Hm"),
        token("Yes", "Yes"),
        token("half"),
        token("é", "é"),
        FinishEvent(0, "stop"),
    ]
    body = await create(client, top_logprobs=1)
    tokens = [entry["token"] for entry in body["output"][1]["content"][0]["logprobs"]]
    assert tokens == ["Yes", "half", "é"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InferenceError("Not finite."), "server_error"),
        (RateLimitError("Too much."), "rate_limit_exceeded"),
        (ValueError("a secret"), "server_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error_event(
    client: httpx.AsyncClient, backend: FakeBackend, error: Exception, code: str
) -> None:
    backend.failure, backend.fail_after = error, 3
    *_, raised, failed = await stream(client)
    assert raised["type"] == "error"
    assert raised["error"]["message"] == raised["message"] == failed["response"]["error"]["message"]
    assert "secret" not in raised["message"]
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == code


async def test_a_refused_response_is_an_http_error(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.refusal = InvalidRequestError("Too long.", code="context_length_exceeded")
    for streamed in (False, True):
        response = await client.post("/v1/responses", json=ask(stream=streamed))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
