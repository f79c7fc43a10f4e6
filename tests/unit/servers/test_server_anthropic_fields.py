"""Every field of `/v1/messages`: what it becomes, what is warned about, and what is refused."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.observability.metrics import Metrics
from engine.servers.anthropic.schema import (
    KEEP_ALL_THINKING,
    NO_EFFECT,
    AnthropicPrompt,
    MessagesBody,
    PromptBody,
    parse,
)
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hello"}],
}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}],
}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def prompt_of(**fields: Any) -> AnthropicPrompt:
    return parse(MessagesBody, ASK | fields)[1]


def texts_of(**fields: Any) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in prompt_of(**fields).messages]


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | fields


def result(**fields: Any) -> list[dict[str, Any]]:
    return [CALL, *user({"type": "tool_result", "tool_use_id": "t1"} | fields)]


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [TOOL | fields]}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def client_of(backend: FakeBackend, **server: Any) -> httpx.AsyncClient:
    app = create_app(make_settings(server=server), backend, Metrics(MODEL))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


def test_text_blocks_of_one_message_are_joined() -> None:
    assert texts_of(messages=user(text("a"), text(""), text("b", cache_control=None))) == [
        ("user", "a\nb")
    ]
    assert texts_of(messages=user()) == [("user", "")]


def test_consecutive_messages_of_one_role_are_merged() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
        CALL,
        *user({"type": "tool_result", "tool_use_id": "t1"}),
        {"role": "user", "content": "d"},
    ]
    assert texts_of(messages=turns) == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("tool", ""),
        ("user", "d"),
    ]
    assert len(prompt_of(messages=turns).messages[1]["tool_calls"]) == 1
    again = CALL | {"content": [CALL["content"][0] | {"id": "t2"}]}
    results = user(*({"type": "tool_result", "tool_use_id": each} for each in ("t1", "t2")))
    calls = prompt_of(messages=[*turns[:1], CALL, again, *results]).messages[1]["tool_calls"]
    assert [call["id"] for call in calls] == ["t1", "t2"]


def test_system_messages_are_moved_to_the_front() -> None:
    asked = ("user", "hello")
    assert texts_of(system=[text("a"), text("b")]) == [("system", "a\nb"), asked]
    inner = [{"role": "system", "content": [text("b")]}, *ASK["messages"]]
    assert texts_of(system="a", messages=inner) == [("system", "a\nb"), asked]
    assert texts_of(system="") == texts_of(system=[]) == [asked]


@pytest.mark.parametrize("number", ["1", "2"])
def test_billing_headers_do_not_change_the_cached_prefix(number: str) -> None:
    note = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
    expected = ("system", "You help.")
    assert texts_of(system=[text(note), text("You help.")])[0] == expected
    assert texts_of(system=note + "\nYou help.")[0] == expected


def test_failed_tool_results_are_prefixed_with_error_once() -> None:
    def content(value: str, is_error: bool) -> str:
        return prompt_of(messages=result(content=value, is_error=is_error)).messages[-1]["content"]

    assert content("it broke", True) == "Error: it broke"
    assert content("Error: it broke", True) == "Error: it broke"
    assert content("it broke", False) == "it broke"


def test_thinking_blocks_sent_back_become_reasoning() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "abc"},
        {"type": "redacted_thinking", "data": "xyz"},
        text("yes"),
    ]
    turns = [*ASK["messages"], {"role": "assistant", "content": blocks}, *user(text("go on"))]
    prompt = prompt_of(messages=turns)
    assert prompt.messages[1] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "hm",
    }
    assert list(prompt.warnings) == ["redacted_thinking"]


HARMLESS = [
    *({name: None} for name in MessagesBody.model_fields if name not in ASK),
    *({name: None} for name in NO_EFFECT),
    {"mcp_servers": []},
    {"context_management": KEEP_ALL_THINKING},
    {"context_management": {"edits": []}},
    {"service_tier": "standard_only"},
    {"speed": "standard"},
    {"cache_control": {"type": "ephemeral"}},
    {"metadata": {"user_id": "u"}},
    {"tools": [], "tool_choice": {"type": "auto"}},
    {"output_config": {"effort": "high", "format": None}},
    {"output_format": SCHEMA, "tool_choice": {"type": "none"}, "tools": [TOOL]},
    {"messages": user(text("a", cache_control={"type": "ephemeral", "ttl": "5m"}))},
    tool(type="custom", strict=True, cache_control={"type": "ephemeral"}, defer_loading=False),
    tool(allowed_callers=["direct"], eager_input_streaming=True, input_examples=[]),
]


async def test_fields_without_effect_are_accepted_silently(client: httpx.AsyncClient) -> None:
    for fields in HARMLESS:
        response = await client.post("/v1/messages", json=ASK | fields)
        assert response.status_code == 200, (fields, response.text)
        assert "x-engine-warnings" not in response.headers, fields


FORMAT = {"output_config": {"format": SCHEMA}}
REFUSED = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
    ("messages[0]", {"messages": ["hello"]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "n"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
    ("messages[0].content[0].source.type", {"messages": user({"type": "image", "source": {}})}),
    ("messages[0].content[0].type", {"messages": user({"type": "document"})}),
    ("messages[0].content[0].type", {"messages": user(CALL["content"][0])}),
    ("messages[0].content[0].text", {"messages": user({"type": "text", "text": 1})}),
    ("messages[0].content[0].citations", {"messages": user(text("a", citations=[{}]))}),
    ("messages[0].content[0].extra", {"messages": user(text("a", extra=1))}),
    ("messages[0].content[0].tool_use_id", {"messages": result()[1:]}),
    ("messages[1].content[0].is_error", {"messages": result(is_error="yes")}),
    ("messages[1].content[0].content[0].type", {"messages": result(content=[{"type": "image"}])}),
    ("messages", {"messages": [*ASK["messages"], CALL]}),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].type", {"tools": [{"type": "text_editor_20250728", "name": "edit"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
    ("tools[0].input_schema.type", tool(input_schema={"type": "array"})),
    ("tools[0].strict", tool(strict=1)),
    ("tools[0].name", tool(name="a b")),
    ("tools[0].defer_loading", tool(defer_loading=True)),
    ("tools[0].allowed_callers", tool(allowed_callers=["code_execution_20250825"])),
    ("tools[1].name", {"tools": [TOOL, TOOL]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.name", tool() | {"tool_choice": {"type": "tool", "name": "g"}}),
    ("tool_choice.name", tool() | {"tool_choice": {"type": "any", "name": "f"}}),
    ("thinking.type", {"thinking": {"type": "between_tools"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "adaptive", "budget_tokens": 2000}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ("output_format", {"output_format": SCHEMA, "output_config": {"format": SCHEMA}}),
    ("cache_control", {"cache_control": {"type": "forever"}}),
    ("speed", {"speed": "fast"}),
    ("service_tier", {"service_tier": "priority"}),
    ("context_management", {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}),
    ("container", {"container": "c1"}),
    ("mcp_servers", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "n"}]}),
    ("inference_geo", {"inference_geo": "us"}),
    ("diagnostics", {"diagnostics": {"previous_message_id": "msg_1"}}),
    ("stop_sequences.0", {"stop_sequences": [""]}),
    ("metadata.name", {"metadata": {"name": "n"}}),
    ("temperature", {"temperature": 1.5}),
    ("seed", {"seed": 1}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED, ids=str)
def test_invalid_fields_are_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(MessagesBody, ASK | fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_an_output_format_can_be_combined_with_optional_tools() -> None:
    prompt = prompt_of(**tool(), **FORMAT)
    assert prompt.grammar is not None and prompt.grammar.param == "output_config.format"
    assert prompt.tool_choice.mode == "auto"


def test_a_strict_tool_stays_strict_in_the_messages_api() -> None:
    """Only then is a schema refused that can't be enforced."""
    assert prompt_of(**tool(strict=True)).tools[0]["function"]["strict"] is True
    for strict in (None, False):
        assert "strict" not in prompt_of(**tool(strict=strict)).tools[0]["function"]


def test_count_tokens_refuses_generation_only_fields() -> None:
    generating = MessagesBody.model_fields.keys() - PromptBody.model_fields.keys()
    assert {"max_tokens", "stream", "temperature"} <= generating
    prompt = {name: value for name, value in ASK.items() if name != "max_tokens"}
    parse(PromptBody, prompt)
    for name in generating:
        with pytest.raises(InvalidRequestError) as caught:
            parse(PromptBody, prompt | {name: 1})
        assert caught.value.param == name


PLAIN_CARD = {"capabilities": ("completions", "chat", "tools"), "template_options": ()}
WARNED = [
    ("cache_control", {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, {}),
    ("input_examples", tool(input_examples=[{}]), {}),
    ("tools", tool(), {"emulated": ("tools",)}),
    ("thinking", {"thinking": {"type": "adaptive"}}, PLAIN_CARD),
    ("thinking", {"thinking": {"type": "disabled"}}, {"template_options": ()}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {}),
    ("output_config.effort", {"output_config": {"effort": "low"}}, {}),
    ("tools", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, {}),
    ("tools", {"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}, {}),
    (
        "output_config.effort",
        {"output_config": {"effort": "max"}},
        {"template_options": ("reasoning_effort",)},
    ),
]


@pytest.mark.parametrize(("param", "fields", "card"), WARNED, ids=str)
async def test_fields_without_support_are_warned_about_and_refused_if_strict(
    backend: FakeBackend, param: str, fields: dict[str, Any], card: dict[str, Any]
) -> None:
    backend.set_card(**card)
    async with client_of(backend) as client:
        response = await client.post("/v1/messages", json=ASK | fields)
    assert response.status_code == 200, response.text
    assert response.headers["x-engine-warnings"].startswith(f"{param}: ")
    async with client_of(backend, strict=True) as client:
        response = await client.post("/v1/messages", json=ASK | fields)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("options", "fields", "expected"),
    [
        (("thinking",), {"thinking": {"type": "adaptive"}}, {"thinking": True}),
        (("reasoning_effort",), {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (("reasoning_effort",), {"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ((), {"thinking": {"type": "disabled"}}, {}),
    ],
)
async def test_options_reach_the_template(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    options: tuple[str, ...],
    fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    backend.set_card(template_options=options)
    await client.post("/v1/messages", json=ASK | fields)
    assert backend.requests[-1].template_options == expected


async def test_an_unknown_anthropic_version_is_warned_about(client: httpx.AsyncClient) -> None:
    async def warning(headers: dict[str, str]) -> str | None:
        response = await client.post("/v1/messages", json=ASK, headers=headers)
        assert response.status_code == 200
        return response.headers.get("x-engine-warnings")

    assert await warning({"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}) is None
    assert await warning({"anthropic-version": "2030-01-01"}) == (
        "anthropic-version: answered as 2023-06-01"
    )


@pytest.mark.parametrize(
    ("capabilities", "fields", "param"),
    [
        (("completions",), {}, "messages"),
        (("completions", "chat"), tool(), "tools"),
        (("completions", "chat"), {"output_format": SCHEMA}, "output_format"),
        (("embeddings",), {}, "messages"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_features_that_the_model_lacks_are_refused(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    capabilities: tuple[str, ...],
    fields: dict[str, Any],
    param: str,
    path: str,
) -> None:
    backend.set_card(capabilities=capabilities)
    body = ASK | fields
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    response = await client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{param} can't be used here")


async def test_the_end_user_id_is_only_hashed(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.request")
    await client.post("/v1/messages", json=ASK | {"metadata": {"user_id": "alice@example.com"}})
    (record,) = caplog.records
    assert len(vars(record)["user_hash"]) == 16
    assert "alice" not in str(vars(record))
