"""/v1/responses as OpenAI's own client speaks it, over a socket."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import ChatRequest, ReasoningEvent
from tests.support.fakes.fake_backend import MODEL, FakeBackend, call_script
from tests.support.servers.live_server import LiveServer, live_server, wait_until

TEXT = "Hello from a fake model."


class Point(BaseModel):
    x: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(storage={"path": tmp_path_factory.mktemp("storage")}) as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> FakeBackend:
    server.backend.reset()
    return server.backend


@pytest.fixture
def client(server: LiveServer, backend: FakeBackend) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def messages_of(backend: FakeBackend) -> list[str]:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return [message["content"] for message in request.messages]


def test_sdk_creates_reads_continues_and_deletes_a_response(
    client: OpenAI, backend: FakeBackend
) -> None:
    first = client.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    assert first.output_text == TEXT
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 0
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    assert messages_of(backend) == ["hi", TEXT, "more"]
    items = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(second.id)


def test_sdk_stream_events_join_to_the_response(client: OpenAI) -> None:
    with client.responses.create(model=MODEL, input="hi", stream=True) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT


def test_sdk_stream_helper_handles_tools_and_reasoning(
    client: OpenAI, backend: FakeBackend
) -> None:
    tool = openai.pydantic_function_tool(Point)["function"]
    flat = {
        "type": "function",
        "name": tool["name"],
        "parameters": tool["parameters"],
        "strict": True,
    }
    backend.script = [
        ReasoningEvent(0, "Where? "),
        ReasoningEvent(0, "There."),
        *call_script(("Point", '{"x": 7}'), said="Here:"),
    ]
    with client.responses.stream(model=MODEL, input="where?", tools=[flat]) as stream:  # type: ignore[list-item]
        pieces = [e.snapshot for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert pieces[-1] == '{"x": 7}'
    thought, message, call = final.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert thought.content[0].text == "Where? There."
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == ("Point", '{"x": 7}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    backend.script = None
    client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": "where?"}, *final.output, result],  # type: ignore[list-item]
    )
    assert messages_of(backend) == ["where?", "Here:", "done"]


def test_sdk_parsed_output_can_be_sent_back(client: OpenAI, backend: FakeBackend) -> None:
    backend.words = ('{"x"', ": 3}")
    response = client.responses.parse(model=MODEL, input="a point", text_format=Point)
    assert response.output_parsed == Point(x=3)
    with client.responses.stream(model=MODEL, input="a point", text_format=Point) as stream:
        assert stream.get_final_response().output_parsed == Point(x=3)
    echoed = [item.model_dump(warnings=False) for item in response.output]
    client.responses.create(model=MODEL, input=[*echoed, {"role": "user", "content": "again"}])  # type: ignore[list-item]
    assert messages_of(backend) == ['{"x": 3}', "again"]


def test_sdk_raises_for_a_failing_stream(client: OpenAI, backend: FakeBackend) -> None:
    backend.failure, backend.fail_after = InferenceError("Not finite."), 2
    with (
        client.responses.create(model=MODEL, input="hi", stream=True) as stream,
        pytest.raises(openai.APIError, match="Not finite"),
    ):
        list(stream)


def test_a_client_disconnect_stops_the_response(
    client: OpenAI, backend: FakeBackend, server: LiveServer
) -> None:
    backend.words, backend.token_s = ("x",) * 1000, 0.05
    with client.responses.create(model=MODEL, input="hi", stream=True) as stream:
        created = next(iter(stream))
    wait_until(lambda: backend.num_open == 0)
    assert backend.num_cut_short == 1
    assert created.type == "response.created"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)


def test_sdk_counts_input_tokens(client: OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input="one two three")
    assert counted.input_tokens > 0


def test_a_conversation_is_compacted_and_goes_on(client: OpenAI, backend: FakeBackend) -> None:
    first = client.responses.create(model=MODEL, input="hi")
    backend.words = ("They", " said", " hi.")
    compacted = client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", 3)
    asked = backend.requests[-1]
    assert messages_of(backend)[:2] == ["hi", TEXT]
    assert messages_of(backend)[2].startswith("Summarize our conversation")
    assert (asked.context.params.temperature, asked.context.params.max_tokens) == (0, 1024)
    assert isinstance(asked, ChatRequest)
    assert asked.template_options == {"enable_thinking": False}
    (item,) = compacted.output
    assert item.type == "compaction"
    backend.words = ("Yes",)
    more = [*compacted.output, {"role": "user", "content": "and now?"}]
    second = client.responses.create(model=MODEL, input=more, instructions="be kind")  # type: ignore[arg-type]
    summary = "Summary of the conversation so far:\nThey said hi."
    assert messages_of(backend) == [f"be kind\n\n{summary}", "and now?"]
    client.responses.create(model=MODEL, input="go on", previous_response_id=second.id)
    assert messages_of(backend) == [summary, "and now?", "Yes", "go on"]
    listed = client.responses.input_items.list(second.id, order="asc").data
    assert [each.type for each in listed] == ["compaction", "message"]


def test_the_last_question_is_compacted_with_the_rest(client: OpenAI, backend: FakeBackend) -> None:
    client.responses.compact(model=MODEL, input="a question", instructions="be kind")
    (_, last) = messages_of(backend)
    assert last.startswith("a question\n\nSummarize")
    with pytest.raises(openai.BadRequestError, match="input: is needed"):
        client.responses.compact(model=MODEL)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.responses.compact(model=MODEL, input="a", extra_body={"tools": [{}]})
    backend.words = (" ",)
    with pytest.raises(openai.InternalServerError, match="wrote no summary"):
        client.responses.compact(model=MODEL, input="a")
