"""/v1/responses: how a request becomes a prompt, and what is refused or warned about."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.interfaces.backend import (
    ReasoningEvent,
    ToolChoice,
)
from tests.support.fakes.fake_backend import FakeBackend, call_script
from tests.support.servers.responses_api import (
    CALL_MESSAGE,
    CALLED,
    TOOL,
    app_over,
    ask,
    asked,
    client_of,
    create,
    serving,
)

WEB_SEARCH = {"type": "web_search", "external_web_access": False}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL]}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(backend, tmp_path) as client:
        yield client


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
async def test_input_items_become_chat_messages(
    client: httpx.AsyncClient, backend: FakeBackend, given: Any, messages: list[dict[str, Any]]
) -> None:
    await create(client, input=given)
    assert list(asked(backend).messages) == messages
    await create(client, input=given, instructions="be kind")
    system = {"role": "system", "content": "be kind"}
    assert list(asked(backend).messages) == [system, *messages]


async def test_output_items_can_be_sent_back_as_input(
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


async def test_response_tools_and_tool_choice_are_parsed(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
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


async def test_text_format_becomes_a_grammar(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
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


async def test_prompt_cache_key_does_not_separate_prefixes(
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
        ({"client_metadata": {"session_id": "s"}}, ["client_metadata"]),
        ({"tools": [WEB_SEARCH, NAMESPACE, TOOL]}, ["tools", "web_search, namespace"]),
        ({"reasoning": None, "text": None, "tools": None, "metadata": None, "include": []}, []),
        ({"truncation": "disabled", "service_tier": "auto", "background": False, "n": 1}, []),
        ({"max_tool_calls": 3, "user": "u", "safety_identifier": "s"}, []),
    ],
)
async def test_unsupported_response_fields_are_warned_about_and_refused_if_strict(
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


async def test_unsupported_tool_types_are_dropped(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = await create(client, tools=[WEB_SEARCH, TOOL, NAMESPACE])
    assert [tool["name"] for tool in body["tools"]] == ["get_time"]
    assert [tool["function"]["name"] for tool in asked(backend).tools] == ["get_time"]
    await create(client, tools=[WEB_SEARCH])
    assert asked(backend).tools == () and asked(backend).tool_choice == ToolChoice("none")


async def test_reasoning_effort_none_turns_thinking_off(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await create(client, reasoning={"effort": "none"})
    assert asked(backend).template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
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
        ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, TOOL, TOOL]}, "tools[2].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"client_metadata": "x"}, "client_metadata"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": 1}}}, "text.format.schema"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
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
async def test_unsupported_response_fields_are_refused_by_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/responses", json=ask(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


async def test_response_features_that_the_model_lacks_are_refused(
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


async def test_input_tokens_are_counted(client: httpx.AsyncClient, backend: FakeBackend) -> None:
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
