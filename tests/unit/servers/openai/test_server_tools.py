"""Tools over the chat API: what is sent reaches the backend in one shape, and calls and reasoning
come back as agents read them.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    FinishEvent,
    TextEvent,
    ToolCallEvent,
    ToolChoice,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.schema.messages import parse_messages
from engine.servers.schema.tools import MAX_TOOLS, parse_tool_choice, parse_tools
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script, reasoning_script
from tests.support.servers.live_server import chat, events_of, make_settings

USER = {"role": "user", "content": "weather?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = '{"city": "Rome"}'


def tool(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS} | fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def calls_of(*calls: tuple[str, str, Any]) -> dict[str, Any]:
    """An assistant's turn, of ids, names and arguments."""
    listed = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


BACKEND = FakeBackend()
APP = create_app(make_settings(), BACKEND, Metrics(MODEL))


@pytest.fixture
def backend() -> FakeBackend:
    BACKEND.reset()
    return BACKEND


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The one choice of each chunk."""
    response = await client.post("/v1/chat/completions", json=chat(stream=True, **fields))
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


def last_chat(backend: FakeBackend) -> ChatRequest:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return request


async def test_tool_calls_have_openais_shape(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = call_script(("weather", ARGUMENTS), ("now", ""))
    choice = (await ask(client, tools=[tool(), tool("now")]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "weather", "arguments": ARGUMENTS},
            },
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    backend.script = call_script(("weather", ARGUMENTS), said="One moment.")
    choice = (await ask(client, tools=[tool()]))["choices"][0]
    assert choice["message"]["content"] == "One moment."


async def test_streamed_tool_calls_have_openais_shape(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = call_script(("now", ""), ("weather", ARGUMENTS), ("now", ""))
    first, *middle, last = await stream(client, tools=[tool(), tool("now")])
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] == "tool_calls"
    assert all(each["finish_reason"] is None for each in [first, *middle])
    seen: dict[int, dict[str, str]] = {}
    for each in middle:
        assert list(each["delta"]) == ["tool_calls"]
        (delta,) = each["delta"]["tool_calls"]
        assert delta["index"] >= len(seen) - 1  # never back to a call before
        if delta["index"] not in seen:
            assert delta["type"] == "function"
            seen[delta["index"]] = {
                "id": delta["id"],
                "name": delta["function"]["name"],
                "text": "",
            }
        else:
            assert delta.keys() == {"index", "function"}
            assert delta["function"].keys() == {"arguments"}
        seen[delta["index"]]["text"] += delta["function"]["arguments"]
    assert seen == {
        0: {"id": "call_0", "name": "now", "text": "{}"},
        1: {"id": "call_1", "name": "weather", "text": ARGUMENTS},
        2: {"id": "call_2", "name": "now", "text": "{}"},
    }


@pytest.mark.parametrize(
    ("tool_choice", "reason", "expected"),
    [
        ("auto", "tool_calls", "tool_calls"),
        ("required", "stop", "tool_calls"),
        (named("weather"), "tool_calls", "stop"),
        (named("weather"), "length", "length"),
        ("auto", "length", "length"),
    ],
)
async def test_tool_calls_set_the_finish_reason(
    client: httpx.AsyncClient, backend: FakeBackend, tool_choice: Any, reason: Any, expected: str
) -> None:
    backend.script = [*call_script(("weather", ARGUMENTS))[:-1], FinishEvent(0, reason)]
    asked = {"tools": [tool()], "tool_choice": tool_choice}
    assert (await ask(client, **asked))["choices"][0]["finish_reason"] == expected
    assert (await stream(client, **asked))[-1]["finish_reason"] == expected


async def test_an_answer_without_calls_has_finish_reason_stop(client: httpx.AsyncClient) -> None:
    answer = await ask(client, tools=[tool()])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in answer["choices"][0]["message"]


async def test_calls_of_several_choices_stay_apart(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [
        ToolCallEvent(0, 0, "{}", "a", "weather"),
        ToolCallEvent(1, 0, "", "b", "now"),
        TextEvent(2, "no call", 1),
        *(FinishEvent(choice, "stop") for choice in range(3)),
    ]
    answer = await ask(client, tools=[tool(), tool("now")], n=3)
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert reasons == ["tool_calls", "tool_calls", "stop"]
    chunks = await stream(client, tools=[tool(), tool("now")], n=3)
    arguments = {
        (chunk["index"], delta["function"]["arguments"])
        for chunk in chunks
        for delta in chunk["delta"].get("tool_calls", ())
    }
    assert arguments == {(0, "{}"), (1, ""), (1, "{}")}


async def test_reasoning_is_returned_under_both_names(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = reasoning_script(["Let me", " think."], ["Yes", "."])
    backend.reasoning_tokens = 2
    answer = await ask(client)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Let me think."
    assert message["content"] == "Yes."
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    deltas = [each["delta"] for each in await stream(client)]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me", "reasoning": "Let me"},
        {"reasoning_content": " think.", "reasoning": " think."},
        {"content": "Yes"},
        {"content": "."},
        {},
    ]


async def test_tools_reach_the_backend_in_one_shape(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    described = tool(description="Looks outside.", strict=True)
    bare = {"type": "function", "function": {"name": "now"}}
    await ask(client, tools=[described, bare], parallel_tool_calls=False)
    request = last_chat(backend)
    assert request.tool_choice == ToolChoice("auto")
    assert request.parallel_tool_calls is False
    assert request.tools == (
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "Looks outside.",
                "parameters": PARAMETERS,
                "strict": True,
            },
        },
        {
            "type": "function",
            "function": {
                "name": "now",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    )
    await ask(client, tools=[tool()], parallel_tool_calls=None, tool_choice="none")
    assert last_chat(backend).tool_choice == ToolChoice("none")
    assert last_chat(backend).parallel_tool_calls is True


def test_tool_choice_forms_are_parsed() -> None:
    tools = parse_tools([tool("a"), tool("b"), tool("c")])
    assert parse_tool_choice(None, tools) == (ToolChoice("auto"), tools)
    assert parse_tool_choice(None, ()) == (ToolChoice("none"), ())
    assert parse_tool_choice("auto", ()) == (ToolChoice("none"), ())
    for word in ("required", "any"):
        assert parse_tool_choice(word, tools) == (ToolChoice("required"), tools)
    assert parse_tool_choice(named("b"), tools) == (ToolChoice("named", "b"), tools)
    allowed = {"mode": "required", "tools": [named("c"), named("a")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert parse_tool_choice(choice, tools) == (ToolChoice("required"), (tools[0], tools[2]))


@pytest.mark.parametrize(
    ("tools", "tool_choice", "param"),
    [
        ({}, None, "tools"),
        (["x"], None, "tools[0]"),
        ([{"type": "custom", "custom": {"name": "x"}}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool(name="a b")], None, "tools[0].function.name"),
        ([tool(name="x" * 129)], None, "tools[0].function.name"),
        ([tool(), tool()], None, "tools[1].function.name"),
        ([tool(description=5)], None, "tools[0].function.description"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(mood="good")], None, "tools[0].function.mood"),
        ([tool(f"t{i}") for i in range(MAX_TOOLS + 1)], None, "tools"),
        ([], "required", "tool_choice"),
        ([], named("weather"), "tool_choice.function.name"),
        ([tool()], "sometimes", "tool_choice"),
        ([tool()], 5, "tool_choice"),
        ([tool()], {"type": "custom"}, "tool_choice.type"),
        ([tool()], named("other"), "tool_choice.function.name"),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("x")]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [named("x")]}},
            "tool_choice.allowed_tools.mode",
        ),
    ],
)
async def test_invalid_tools_are_refused_by_path(
    client: httpx.AsyncClient, tools: Any, tool_choice: Any, param: str
) -> None:
    body = chat(tools=tools, tool_choice=tool_choice)
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_messages_with_tool_calls_and_results_are_parsed() -> None:
    messages = parse_messages(
        [
            USER,
            calls_of(("c1", "weather", ARGUMENTS), ("c2", "now", "")),
            {"role": "tool", "tool_call_id": "c2", "content": "noon"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "hot"}]},
            {
                "role": "assistant",
                "content": "Hot.",
                "reasoning": "easy",
                "tool_calls": [],
                "parsed": {"hot": True},
                "provider_specific_fields": {"refusal": None},
            },
        ]
    )
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)},
            },
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    }
    assert messages[2:] == (
        {"role": "tool", "content": "noon", "tool_call_id": "c2", "name": "now"},
        {"role": "tool", "content": "hot", "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": "Hot.", "reasoning_content": "easy"},
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "tool_call_id": "c1", "content": "x"}], "messages[0].tool_call_id"),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        (
            [calls_of(("c1", "f", "{}")), {"role": "tool", "tool_call_id": "c2", "content": "x"}],
            "messages[1].tool_call_id",
        ),
        ([calls_of(("c1", "f", "{bad"))], "messages[0].tool_calls[0].function.arguments"),
        ([calls_of(("c1", "f", "[1]"))], "messages[0].tool_calls[0].function.arguments"),
        ([calls_of(("c1", "f", "[" * 999))], "messages[0].tool_calls[0].function.arguments"),
        ([calls_of(("c1", "f", 5))], "messages[0].tool_calls[0].function.arguments"),
        ([calls_of(("", "f", "{}"))], "messages[0].tool_calls[0].id"),
        ([calls_of(("c1", "", "{}"))], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            "messages[0].tool_calls[0].type",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "reasoning": 5}], "messages[0].reasoning"),
        ([USER | {"reasoning": "mine"}], "messages[0].reasoning"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
    ],
)
def test_invalid_tool_messages_are_refused_by_path(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert param in caught.value.message
