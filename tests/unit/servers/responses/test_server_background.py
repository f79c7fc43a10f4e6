"""Responses in the background as OpenAI's own client polls, follows and cancels them."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import Event, TextEvent
from engine.core.key_file import add_key
from engine.servers.http.request_log import RequestRecord
from engine.servers.responses.background import NOTHING_USED
from engine.servers.responses.format import ResponseStream
from engine.servers.serving import followers
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.sse import EventStream
from engine.servers.storage.job_queue import FileLock
from engine.servers.storage.objects import FILE_NAME
from tests.support.fakes.fake_backend import MODEL, call_script
from tests.support.fakes.stopping_backend import StoppingBackend, stopping_after
from tests.support.servers.live_server import LiveServer, live_server, wait_until

TEXT = "Hello from a fake model."


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def server(storage: Path) -> Iterator[LiveServer]:
    with live_server(StoppingBackend(), storage={"path": storage}) as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> StoppingBackend:
    assert isinstance(server.backend, StoppingBackend)
    server.backend.reset()
    return server.backend


@pytest.fixture
def client(server: LiveServer, backend: StoppingBackend) -> Iterator[OpenAI]:
    yield client_of(server)
    wait_until(lambda: server.services.lifecycle.num_admitted == 0)
    assert backend.num_open == backend.num_held == 0


def client_of(server: LiveServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": "hi", "background": True} | fields)


def ended(client: OpenAI, response_id: str) -> Any:
    def is_over() -> bool:
        return client.responses.retrieve(response_id).status not in ("queued", "in_progress")

    wait_until(is_over)
    return client.responses.retrieve(response_id)


def numbers(events: Any) -> list[int]:
    return [event.sequence_number for event in events]


def text_of(events: Any) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_background_response_is_polled_and_continued(
    client: OpenAI, backend: StoppingBackend
) -> None:
    backend.prefill_s = 600
    made = ask(client, metadata={"a": "b"})
    assert (made.status, made.background, made.output) == ("queued", True, [])
    assert client.responses.retrieve(made.id) == made
    client.responses.cancel(made.id)
    backend.prefill_s, backend.token_s = 0, 600
    made = ask(client)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    with pytest.raises(openai.ConflictError, match="when it has ended"):
        client.responses.create(model=MODEL, input="more", previous_response_id=made.id)
    client.responses.cancel(made.id)
    backend.token_s = 0
    response = ended(client, ask(client, metadata={"a": "b"}).id)
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert response.usage is not None and response.metadata == {"a": "b"}
    client.responses.create(model=MODEL, input="more", previous_response_id=response.id)
    messages = backend.requests[-1].messages  # type: ignore[union-attr]
    assert [each["content"] for each in messages] == ["hi", TEXT, "more"]
    items = client.responses.input_items.list(response.id).data
    assert [each.type for each in items] == ["message"]
    # No client waits for its first token.
    assert backend.requests[0].context.queue_timeout_s is None
    assert backend.requests[-1].context.queue_timeout_s is not None


def test_a_background_stream_resumes_after_a_sequence_number(
    client: OpenAI, backend: StoppingBackend
) -> None:
    backend.token_s = 0.05
    seen = []
    with ask(client, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if text_of(seen):
                break  # and disconnect
    assert [event.type for event in seen[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response_id = seen[0].response.id
    with client.responses.retrieve(
        response_id, stream=True, starting_after=seen[-1].sequence_number
    ) as stream:
        rest = list(stream)
    assert rest[-1].type == "response.completed"
    assert numbers(seen + rest) == list(range(len(seen + rest)))
    assert text_of(seen + rest) == TEXT
    # Its events are stored, and are the same for everyone who reads them again.
    with client.responses.retrieve(response_id, stream=True) as stream:
        assert list(stream) == seen + rest
    with client.responses.retrieve(response_id, stream=True, starting_after=4) as stream:
        assert numbers(stream) == list(range(5, len(seen + rest)))
    assert ended(client, response_id).output_text == TEXT
    assert backend.num_cut_short == 0


async def test_a_slow_reader_gets_every_event_separately() -> None:
    """Events that arrive while a write blocks are sent one by one."""
    sent: list[bytes] = []
    has_all = asyncio.Event()

    async def source() -> AsyncIterator[Event]:
        for _ in range(5):
            yield TextEvent(0, "x", 1)
            await asyncio.sleep(0)
        yield NOTHING_USED
        has_all.set()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"delta" in sent[-1]:
            await has_all.wait()

    reader = EventPump(1, choices_per_source=1, timeout_s=None, on_tokens=lambda *_: None)
    reader.read([source()])
    response = {"id": "resp_1", "status": "completed"}
    stream = EventStream(reader, ResponseStream(response, lambda: response), merges=False)
    await stream({"state": {"record": RequestRecord("1", 0.0)}}, None, send)  # type: ignore[arg-type]
    assert b"".join(sent).count(b"event: response.output_text.delta") == 5


def test_cancelling_a_response_twice_cancels_it_once(
    client: OpenAI, backend: StoppingBackend
) -> None:
    backend.num_answers = 0
    made = ask(client)
    wait_until(lambda: backend.num_held == 1)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert backend.num_held == 0
    assert client.responses.cancel(made.id) == client.responses.retrieve(made.id) == cancelled
    backend.num_answers = None
    finished = ended(client, ask(client).id)
    assert client.responses.cancel(finished.id).status == "completed"
    plain = client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError, match="asked for with background"):
        client.responses.cancel(plain.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_absent")


def test_the_followers_of_a_tenants_responses_are_bounded(
    client: OpenAI, backend: StoppingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.token_s = 0.05
    monkeypatch.setattr(followers, "MAX_FOLLOWERS", 0)
    with ask(client, stream=True) as stream:
        response = next(stream).response
        with pytest.raises(openai.RateLimitError, match="Close a stream"):
            client.responses.retrieve(response.id, stream=True)
        assert list(stream)[-1].type == "response.completed"


def test_a_streaming_follower_sees_the_cancellation(
    client: OpenAI, backend: StoppingBackend, server: LiveServer
) -> None:
    backend.num_answers = 0
    with ask(client, stream=True) as stream:
        first = next(stream)
        wait_until(lambda: backend.num_held == 1)
        client_of(server).responses.cancel(first.response.id)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def test_a_deleted_response_stays_deleted(client: OpenAI, backend: StoppingBackend) -> None:
    backend.num_answers = 0
    made = ask(client)
    client.responses.delete(made.id)
    assert backend.num_held == 0
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_an_engine_failure_becomes_the_responses_error(
    client: OpenAI, backend: StoppingBackend
) -> None:
    backend.failure, backend.fail_after = InferenceError("Not finite."), 2
    response = ended(client, ask(client).id)
    assert response.status == "failed"
    assert (response.error.code, response.error.message) == ("server_error", "Not finite.")
    with pytest.raises(openai.APIError, match="Not finite"):
        list(ask(client, stream=True))


def test_a_background_response_uses_conversation_and_tools(
    client: OpenAI, backend: StoppingBackend
) -> None:
    conversation = client.conversations.create()
    backend.script = call_script(("get", "{}"))
    tool = {"type": "function", "name": "get", "parameters": {}, "strict": False}
    made = ask(client, conversation=conversation.id, tools=[tool])
    assert ended(client, made.id).output[0].type == "function_call"
    kinds = [each.type for each in client.conversations.items.list(conversation.id)]
    assert kinds == ["function_call", "message"]


def test_invalid_background_requests_are_refused(client: OpenAI, backend: StoppingBackend) -> None:
    for fields, match in (
        ({"store": False}, "background: needs the stored response"),
        ({"input": "x " * 5000}, "maximum context length"),  # before it is queued
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            ask(client, **fields)
    plain = client.responses.create(model=MODEL, input="hi")
    polled = ended(client, ask(client).id)
    for response in (plain, polled):
        with pytest.raises(openai.BadRequestError, match="background and stream"):
            client.responses.retrieve(response.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(polled.id, extra_query={"starting_after": 3})


def test_background_responses_count_towards_admission(tmp_path: Path) -> None:
    backend, limits = stopping_after(0), {"max_concurrent_requests": 2}
    with live_server(backend, storage={"path": tmp_path}, server=limits) as server:
        client = client_of(server)
        made = [ask(client) for _ in range(2)]
        with pytest.raises(openai.RateLimitError):
            ask(client)
        client.responses.cancel(made[0].id)
        ask(client)


def test_a_background_response_is_visible_only_to_its_owner(tmp_path: Path) -> None:
    first, second = (add_key(tmp_path / "keys.json", tenant)[0] for tenant in ("alice", "bob"))
    settings = {"keys_file": tmp_path / "keys.json"}
    with live_server(stopping_after(0), storage={"path": tmp_path}, server=settings) as server:
        made = ask(client_of(server, first))
        other = client_of(server, second).responses
        for call in (other.retrieve, other.cancel, other.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.NotFoundError):
            other.retrieve(made.id, stream=True)
        assert client_of(server, first).responses.cancel(made.id).status == "cancelled"


def test_unfinished_background_responses_fail_when_the_server_stops(tmp_path: Path) -> None:
    storage = {"path": tmp_path}
    with live_server(stopping_after(1), storage=storage) as server:
        with ask(client_of(server), stream=True) as stream:
            done = list(stream)[-1].response
        made = ask(client_of(server))
    with live_server(storage=storage) as server:
        client = client_of(server)
        lost = client.responses.retrieve(made.id)
        assert lost.status == "failed"
        assert lost.error is not None
        with client.responses.retrieve(done.id, stream=True) as stream:
            assert text_of(stream) == TEXT


def test_a_background_response_of_a_killed_server_has_failed(tmp_path: Path) -> None:
    """The lock of a server tells other servers whether it still runs."""
    storage = {"path": tmp_path}
    with live_server(storage=storage) as server:
        client = client_of(server)
        response_id = ended(client, ask(client).id).id
        lock = FileLock(tmp_path / "responses-another.lock")
        assert lock.acquire()
        with sqlite3.connect(tmp_path / FILE_NAME) as database:
            database.execute("UPDATE background SET server = 'another'")
            database.execute(
                "UPDATE responses SET body = CAST(json_set(body, '$.status', 'queued') AS BLOB)"
            )
        assert client.responses.retrieve(response_id).status == "queued"
        with pytest.raises(openai.ConflictError, match="Another server"):
            client.responses.cancel(response_id)
        lock.release()
        for _ in range(2):
            lost = client.responses.retrieve(response_id)
            assert lost.status == "failed"
            assert lost.error is not None and "stopped before" in lost.error.message
        assert not (tmp_path / "responses-another.lock").exists()


def test_a_broken_storage_refuses_background_responses(tmp_path: Path) -> None:
    broken = tmp_path / "file"
    broken.write_text("not a directory")
    with live_server(storage={"path": broken}) as server:
        body = {"model": MODEL, "input": "hi", "background": True}
        assert httpx.post(f"{server.url}/v1/responses", json=body).status_code == 503
        assert server.backend.requests == []
