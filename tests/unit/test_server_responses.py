"""/v1/responses: how a request becomes a prompt, and an answer a response or its events."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.errors import InferenceError, InvalidRequestError, RateLimitError
from engine.core.interfaces.backend import (
    ChatRequest,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    ToolChoice,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.fake_backend import MODEL, FakeBackend, call_script, reasoning_script
from tests.live_server import make_settings

TEXT = "Hello from a fake model."
TOOL = {
    "type": "function",
    "name": "get_time",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "strict": True,
}
CALLED = [
    {"role": "user", "content": "what time is it?"},
    {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"zone":"utc"}'},
]
CALL_MESSAGE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_time", "arguments": {"zone": "utc"}},
        }
    ],
}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "say hello", "store": False} | fields


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which says its type twice and its number once."""
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def app_over(backend: FakeBackend, tmp_path: Path, **server: Any) -> FastAPI:
    settings = make_settings(storage={"path": tmp_path}, server=server)
    return create_app(settings, backend, Metrics(MODEL))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = app_over(backend, tmp_path)
    async with client_of(app) as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0
    assert backend.num_open == 0


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json=ask(**fields))
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def asked(backend: FakeBackend) -> ChatRequest:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return request


async def test_a_whole_response(client: httpx.AsyncClient) -> None:
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


async def test_an_answer_that_is_cut_off_is_incomplete(client: httpx.AsyncClient) -> None:
    body = await create(client, max_output_tokens=2)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["completed_at"] is None
    assert body["output"][0]["status"] == "incomplete"
    *_, last = await stream(client, max_output_tokens=2)
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_the_events_of_a_text(client: httpx.AsyncClient) -> None:
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


async def test_text_then_calls(client: httpx.AsyncClient, backend: FakeBackend) -> None:
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


async def test_reasoning_is_an_item_of_its_own(
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


async def test_no_text_at_all_is_an_empty_message(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [TextEvent(0, "", 1), FinishEvent(0, "stop")]
    body = await create(client)
    assert body["output"][0]["content"][0]["text"] == ""


async def test_a_call_that_is_cut_off_keeps_what_there_is(
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
async def test_logprobs(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    events = await stream(client, **fields)
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]][:2] == ["Hello", " from"]
    assert len(part["logprobs"][0]["top_logprobs"]) == fields.get("top_logprobs", 0)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


async def test_logprobs_of_reasoning_are_not_the_messages(
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
async def test_a_stream_that_fails(
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


async def test_a_refusal_is_an_http_error(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.refusal = InvalidRequestError("Too long.", code="context_length_exceeded")
    for streamed in (False, True):
        response = await client.post("/v1/responses", json=ask(stream=streamed))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (
            [
                {"role": "developer", "content": "short"},
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "a"}],
                },
                {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "c"},
                        {"type": "input_text", "text": "d"},
                    ],
                },
            ],
            [
                {"role": "system", "content": "short"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "assistant", "content": "no"},
                {"role": "user", "content": "c\nd"},
            ],
        ),
        (
            [*CALLED, {"type": "function_call_output", "call_id": "c1", "output": "noon"}],
            [
                {"role": "user", "content": "what time is it?"},
                CALL_MESSAGE,
                {"role": "tool", "tool_call_id": "c1", "name": "get_time", "content": "noon"},
            ],
        ),
        (  # One turn of the model is one message, whatever it consists of.
            [
                CALLED[0],
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "hm"}],
                    "encrypted_content": None,
                },
                {"role": "assistant", "content": "let me see", "phase": None},
                CALLED[1],
            ],
            [
                {"role": "user", "content": "what time is it?"},
                CALL_MESSAGE | {"content": "let me see", "reasoning_content": "hm"},
            ],
        ),
    ],
)
async def test_items_as_messages(
    client: httpx.AsyncClient, backend: FakeBackend, given: Any, messages: list[dict[str, Any]]
) -> None:
    await create(client, input=given)
    assert list(asked(backend).messages) == messages
    await create(client, input=given, instructions="be kind")
    system = {"role": "system", "content": "be kind"}
    assert list(asked(backend).messages) == [system, *messages]


async def test_an_answers_items_can_be_sent_back(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [
        ReasoningEvent(0, "hm"),
        *call_script(("get_time", '{"zone":"utc"}'), said="Let me see"),
    ]
    output = (await create(client, tools=[TOOL]))["output"]
    result = {"type": "function_call_output", "call_id": "call_0", "output": "noon"}
    await create(client, input=[CALLED[0], *output, result], tools=[TOOL])
    assert [message["role"] for message in asked(backend).messages] == ["user", "assistant", "tool"]
    assert asked(backend).messages[1]["reasoning_content"] == "hm"


async def test_tools_and_choices(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    other = TOOL | {"name": "other"}
    cases: list[tuple[Any, ToolChoice, int]] = [
        (None, ToolChoice("auto"), 2),
        ("required", ToolChoice("required"), 2),
        ({"type": "function", "name": "other"}, ToolChoice("named", "other"), 2),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "other"}],
            },
            ToolChoice("required"),
            1,
        ),
    ]
    for given, choice, num_tools in cases:
        body = await create(client, tools=[TOOL, other], tool_choice=given)
        request = asked(backend)
        assert (request.tool_choice, len(request.tools)) == (choice, num_tools)
        assert body["tools"] == [TOOL, other]
        assert body["tool_choice"] == (given or "auto")
    assert asked(backend).tools[0]["function"]["name"] == "other"
    await create(client, tools=[TOOL], parallel_tool_calls=False)
    assert not asked(backend).parallel_tool_calls


async def test_text_format(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    flat = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    body = await create(client, text={"format": flat})
    grammar = asked(backend).context.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)
    assert grammar.param == "text.format"
    assert body["text"]["format"] == flat
    await create(client, text={"format": {"type": "json_object"}})
    grammar = asked(backend).context.grammar
    assert grammar is not None and grammar.kind == "json_object"
    await create(client, text={"format": {"type": "text"}})
    assert asked(backend).context.grammar is None


async def test_a_cache_key_does_not_keep_prefixes_apart(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    """It is a hint for more cached tokens; conversations that begin alike still share."""
    salts = []
    for key in (None, "a", "b"):
        await create(client, prompt_cache_key=key)
        salts.append(asked(backend).context.salt)
    assert len(set(salts)) == 1
    await create(client, cache_salt="a")
    assert asked(backend).context.salt not in salts


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"reasoning": {"effort": "high"}}, ["reasoning.effort"]),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.summary", "effort"]),
        ({"reasoning": {"effort": "none"}}, []),
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"include": ["reasoning.encrypted_content"]}, ["include"]),
        ({"prompt_cache_key": "k"}, ["prompt_cache_key"]),
        ({"reasoning": None, "text": None, "tools": None, "metadata": None, "include": []}, []),
        ({"truncation": "disabled", "service_tier": "auto", "background": False, "n": 1}, []),
        ({"max_tool_calls": 3, "user": "u", "safety_identifier": "s"}, []),
    ],
)
async def test_what_cannot_be_followed_is_warned_of_and_refused_when_strict(
    backend: FakeBackend, tmp_path: Path, fields: dict[str, Any], warned: list[str]
) -> None:
    async with client_of(app_over(backend, tmp_path)) as client:
        response = await client.post("/v1/responses", json=ask(**fields))
        assert response.status_code == 200, response.text
        header = response.headers.get("x-engine-warnings", "")
        assert bool(header) == bool(warned)
        assert all(name in header for name in warned)
    async with client_of(app_over(backend, tmp_path, strict=True)) as client:
        response = await client.post("/v1/responses", json=ask(**fields))
        assert response.status_code == (400 if warned else 200), response.text


async def test_no_effort_turns_thinking_off(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await create(client, reasoning={"effort": "none"})
    assert asked(backend).template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"include": ["everything"]}, "include.0"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": 1}}}, "text.format.schema"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "text.format",
        ),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "xyz"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [CALLED[1] | {"arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [CALLED[1] | {"arguments": "{" * 100}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]},
            "input[0].call_id",
        ),
    ],
)
async def test_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/responses", json=ask(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


async def test_what_the_model_cannot_do_is_refused(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.set_card(capabilities=("chat",))
    for fields in ({"tools": [TOOL]}, {"text": {"format": {"type": "json_object"}}}):
        response = await client.post("/v1/responses", json=ask(**fields))
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_parameter"
    backend.set_card(emulated=("tools",))
    response = await client.post("/v1/responses", json=ask(tools=[TOOL]))
    assert "emulated" in response.headers["x-engine-warnings"]


async def test_counting_tokens(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    fields = {"input": "one two three", "instructions": "be kind", "tools": [TOOL]}
    response = await client.post("/v1/responses/input_tokens", json=fields)
    assert response.status_code == 200, response.text
    few = response.json()
    assert few["object"] == "response.input_tokens"
    fields["input"] = "one two three four"
    more = (await client.post("/v1/responses/input_tokens", json=fields)).json()
    assert more["input_tokens"] > few["input_tokens"] > len("one two three")
    assert backend.requests == []
    response = await client.post("/v1/responses/input_tokens", json=fields | {"temperature": 1})
    assert response.status_code == 400
