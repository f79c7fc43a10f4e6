"""The official `anthropic` client against `/v1/messages`: answers, streams, tools, thinking."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import (
    ChatRequest,
    FinishEvent,
    GrammarSpec,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    ToolChoice,
)
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script, reasoning_script
from tests.support.servers.live_server import LiveServer, live_server, wait_until

ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "say hello now"}],
}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL_SCRIPT = call_script(("get_weather", '{"city": "Oslo"}'), ("get_weather", "{}"), said="Wait.")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> FakeBackend:
    server.backend.reset()
    return server.backend


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client


def asked(backend: FakeBackend) -> ChatRequest:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return request


def ask_twice(
    client: anthropic.Anthropic, **fields: Any
) -> tuple[anthropic.types.Message, anthropic.types.Message]:
    """The message as a whole, and as the SDK puts it together from a stream."""
    whole = client.messages.create(**ASK | fields)
    with client.messages.stream(**ASK | fields) as stream:
        return whole, stream.get_final_message()


def test_a_message_has_anthropics_shape(client: anthropic.Anthropic, backend: FakeBackend) -> None:
    message = client.messages.create(**ASK, system="Be brief, please.")
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hello from a fake model.")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id is not None and message._request_id.startswith("req-")
    assert asked(backend).messages == (
        {"role": "system", "content": "Be brief, please."},
        {"role": "user", "content": "say hello now"},
    )


def test_usage_parts_add_up_to_the_prompt(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.reasoning_tokens = 2
    for message in ask_twice(client):  # a prompt of 3 tokens, of which the backend has 1 cached
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (2, 1)
        assert usage.cache_creation_input_tokens == 0
        assert usage.output_tokens == 6
        assert usage.output_tokens_details is not None
        assert usage.output_tokens_details.thinking_tokens == 2


def test_stream_events_have_anthropics_order(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.words = ("Hi", "", " ä😀")
    events = list(client.messages.create(**ASK, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    first = events[0].message
    assert (first.content, first.stop_reason) == ([], None)
    assert [event.delta.text for event in events[2:4]] == ["Hi", " ä😀"]
    assert events[-2].delta.stop_reason == "end_turn"


def test_stream_bytes_have_event_and_data_lines(server: LiveServer, backend: FakeBackend) -> None:
    backend.words = ('say "hi"\n',)
    response = httpx.post(server.url + "/v1/messages", json=ASK | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert json.loads(blocks[2].split("data: ")[1]) == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": 'say "hi"\n'},
    }


def test_tool_calls_become_tool_use_blocks(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.script = CALL_SCRIPT
    for message in ask_twice(client, tools=[WEATHER]):
        text, first, second = message.content
        assert text.text == "Wait."
        assert (first.type, first.id, first.name) == ("tool_use", "call_0", "get_weather")
        assert (first.input, second.id, second.input) == ({"city": "Oslo"}, "call_1", {})
        assert message.stop_reason == "tool_use"
    schema = WEATHER["input_schema"]
    function = {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": schema,
    }
    assert asked(backend).tools == ({"type": "function", "function": function},)
    assert asked(backend).tool_choice == ToolChoice("auto")


def test_tool_results_are_sent_back_with_the_answer(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.script = [ReasoningEvent(0, "Where?"), *CALL_SCRIPT]
    answer = client.messages.create(**ASK, tools=[WEATHER], thinking={"type": "adaptive"})
    results = [
        {"type": "tool_result", "tool_use_id": "call_0", "content": "rain"},
        {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "is_error": True,
            "content": [{"type": "text", "text": "no city"}],
        },
        {"type": "text", "text": "Go on."},
    ]
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},
    ]
    client.messages.create(**ASK | {"messages": turns}, tools=[WEATHER])
    call, *rest = asked(backend).messages[1:]
    assert (call["role"], call["content"]) == ("assistant", "Wait.")
    assert call["reasoning_content"] == "Where?"
    assert [each["function"]["arguments"] for each in call["tool_calls"]] == [{"city": "Oslo"}, {}]
    named = {"role": "tool", "name": "get_weather"}
    assert rest == [
        named | {"tool_call_id": "call_0", "content": "rain"},
        named | {"tool_call_id": "call_1", "content": "Error: no city"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "get_weather"}, ToolChoice("named", "get_weather"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
    ],
)
def test_tool_choice_is_translated(
    client: anthropic.Anthropic,
    backend: FakeBackend,
    given: Any,
    choice: ToolChoice,
    parallel: bool,
) -> None:
    extra = {} if given is None else {"tool_choice": given}
    client.messages.create(**ASK, tools=[WEATHER], **extra)
    assert asked(backend).tool_choice == choice
    assert asked(backend).parallel_tool_calls is parallel


def test_thinking_is_a_separate_content_block(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.script = reasoning_script(["Let me", " see."], ["It", " is."])
    budget: Any = {"type": "enabled", "budget_tokens": 1024}
    for message in ask_twice(client, thinking=budget, max_tokens=2000):
        thought, text = message.content
        assert (thought.type, thought.thinking, thought.signature) == (
            "thinking",
            "Let me see.",
            "",
        )
        assert text.text == "It is."
    for message in ask_twice(client, thinking={"type": "adaptive", "display": "omitted"}):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "", "It is.")


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_passed_as_a_template_option(
    client: anthropic.Anthropic, backend: FakeBackend, thinking: Any, enabled: bool
) -> None:
    extra = {} if thinking is None else {"thinking": thinking}
    client.messages.create(**ASK, **extra)
    assert asked(backend).template_options == {"enable_thinking": enabled}


@pytest.mark.parametrize(
    ("events", "stop_reason", "stop_sequence"),
    [
        ([FinishEvent(0, "stop")], "end_turn", None),
        ([FinishEvent(0, "stop", 2)], "end_turn", None),
        ([FinishEvent(0, "stop", "END")], "stop_sequence", "END"),
        ([FinishEvent(0, "length")], "max_tokens", None),
        ([ToolCallEvent(0, 0, "{}", "call_0", "f"), FinishEvent(0, "stop")], "tool_use", None),
        (
            [
                ToolCallEvent(0, 0, "{}", "call_0", "f"),
                TextEvent(0, "said behind it", 1),
                FinishEvent(0, "stop"),
            ],
            "tool_use",
            None,
        ),
        (
            [ToolCallEvent(0, 0, '{"a": "unfini', "call_0", "f"), FinishEvent(0, "length")],
            "max_tokens",
            None,
        ),
        ([TextEvent(0, "x", 1), FinishEvent(0, "tool_calls")], "tool_use", None),
    ],
)
def test_stop_reasons_are_translated(
    client: anthropic.Anthropic,
    backend: FakeBackend,
    events: Any,
    stop_reason: str,
    stop_sequence: str | None,
) -> None:
    backend.script = events
    for message in ask_twice(client, stop_sequences=["END"]):
        assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)


def test_sampling_parameters_reach_the_backend(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    client.messages.create(**ASK, stop_sequences=["a", "b"], extra_body=numbers)
    params = asked(backend).context.params
    assert (params.max_tokens, params.stop) == (64, ("a", "b"))
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 7)
    client.messages.create(**ASK)
    assert asked(backend).context.params.temperature == 1.0


def test_a_prefilled_assistant_message_is_continued(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "The answer is ("}]
    client.messages.create(**ASK | {"messages": turns})
    assert asked(backend).continue_final_message
    assert not asked(backend).add_generation_prompt
    turns[-1]["content"] = []
    client.messages.create(**ASK | {"messages": turns})
    assert asked(backend).add_generation_prompt
    assert [turn["role"] for turn in asked(backend).messages] == ["user"]


class City(BaseModel):
    name: str


def test_an_output_schema_becomes_a_grammar(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.words = ('{"name": ', '"Oslo"}')
    parsed = client.messages.parse(**ASK, output_format=City)
    assert parsed.parsed_output == City(name="Oslo")
    grammar = asked(backend).context.grammar
    assert isinstance(grammar, GrammarSpec)
    assert (grammar.kind, grammar.param) == ("json_schema", "output_config.format")
    assert json.loads(grammar.source)["properties"] == {"name": {"type": "string", "title": "Name"}}


def test_count_tokens_counts_system_and_messages(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    counted = client.messages.count_tokens(
        model=MODEL, messages=ASK["messages"], system="Be brief.", tools=[WEATHER]
    )
    expected = len("Be brief. say hello now") + 1  # the fake's tokens: bytes, and one at the start
    assert counted.input_tokens == expected
    assert counted._request_id is not None


def test_a_failure_in_mid_stream_is_anthropics_error_event(
    client: anthropic.Anthropic, backend: FakeBackend
) -> None:
    backend.failure, backend.fail_after = InferenceError("logits were not finite"), 2
    seen = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        for event in client.messages.create(**ASK, stream=True):
            seen.append(event.type)
    assert seen.count("content_block_delta") == 2
    assert "message_stop" not in seen
    body: Any = caught.value.body
    assert body["error"] == {"type": "api_error", "message": "logits were not finite"}
    assert body["request_id"].startswith("req-")


def test_keep_alive_comments_are_sent_during_a_slow_prefill(
    server: LiveServer,
    client: anthropic.Anthropic,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.01)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    backend.prefill_s = 0.2
    request = ASK | {"stream": True}
    raw = httpx.post(server.url + "/v1/messages", json=request).text
    assert raw.index("message_start") < raw.index(": keep-alive") < raw.index("content_block")
    with client.messages.stream(**ASK) as stream:
        assert stream.get_final_text() == "Hello from a fake model."


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_disconnect_aborts_a_message(
    server: LiveServer, backend: FakeBackend, stream: bool
) -> None:
    backend.token_s = 60
    with server.connect() as connection:
        server.post_raw(connection, "/v1/messages", ASK | {"stream": stream})
        wait_until(lambda: backend.num_open == 1)
    wait_until(lambda: backend.num_open == 0)
    assert backend.num_cut_short == 1


async def test_the_asynchronous_anthropic_client_streams(
    server: LiveServer, backend: FakeBackend
) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any") as client:
        async with client.messages.stream(**ASK) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        beta = await client.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
    assert text == "Hello from a fake model."
    assert beta.content[0].text == text
