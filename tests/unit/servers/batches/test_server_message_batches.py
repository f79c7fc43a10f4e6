"""/v1/messages/batches as Anthropic's own client speaks it, over a socket."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.messages import MessageBatch

from engine.servers.batches import run, runner
from engine.servers.serving.generation import OFFLINE_PRIORITY
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.stopping_backend import StoppingBackend
from tests.support.servers.live_server import LiveServer, live_server, wait_until

TEXT = "Hello from a fake model."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CHECK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)


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
def client(server: LiveServer, backend: StoppingBackend) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client
        for batch in client.messages.batches.list(limit=1000):
            client.messages.batches.delete(batch.id)
    assert server.services.lifecycle.num_admitted == 0


def client_of(server: LiveServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)


def request(custom_id: str, **params: Any) -> Any:
    message = {"role": "user", "content": f"say {custom_id}"}
    given = {"model": MODEL, "max_tokens": 9, "messages": [message]} | params
    return {"custom_id": custom_id, "params": given}


def ended(client: anthropic.Anthropic, batch: MessageBatch) -> MessageBatch:
    def has_ended() -> bool:
        return client.messages.batches.retrieve(batch.id).processing_status == "ended"

    wait_until(has_ended)
    return client.messages.batches.retrieve(batch.id)


def test_a_message_batch_is_created_polled_and_deleted(
    client: anthropic.Anthropic, backend: StoppingBackend, server: LiveServer, storage: Path
) -> None:
    batches = client.messages.batches
    asked = [request("a"), request("b", model="absent"), request("c", max_tokens=2)]
    made = batches.create(requests=asked)
    assert made.type == "message_batch"
    assert made.request_counts.processing == 3
    assert (made.expires_at - made.created_at).total_seconds() == 86_400
    batch = ended(client, made)
    counts = batch.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0)
    assert batch.ended_at is not None and batch.results_url is not None
    results = {each.custom_id: each.result for each in batches.results(batch.id)}
    assert list(results) == ["a", "b", "c"]
    first, refused, short = results.values()
    assert first.type == short.type == "succeeded"
    assert first.message.content[0].type == "text"
    assert first.message.content[0].text == TEXT
    assert short.message.stop_reason == "max_tokens"
    assert refused.type == "errored"
    assert refused.error.error.type == "not_found_error"
    assert {each.context.priority for each in backend.requests} == {OFFLINE_PRIORITY}
    assert batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)
    # The input is hidden from its owner, and its file is deleted with the next sweep.
    assert len(list((storage / "files").iterdir())) == 1


def test_the_input_of_a_message_batch_is_not_listed_as_a_file(
    client: anthropic.Anthropic, server: LiveServer
) -> None:
    ended(client, client.messages.batches.create(requests=[request("a")]))
    listed = httpx.get(f"{server.url}/v1/files").json()["data"]
    assert [each["purpose"] for each in listed] == ["batch_output"]
    assert httpx.get(f"{server.url}/v1/batches").json()["data"] == []


def test_message_batches_are_listed_in_pages_both_ways(client: anthropic.Anthropic) -> None:
    batches = client.messages.batches
    made = [batches.create(requests=[request("a")]).id for _ in range(5)][::-1]
    assert [each.id for each in batches.list(limit=2)] == made
    page = batches.list(limit=2, before_id=made[4])
    assert ([each.id for each in page.data], page.has_more) == (made[2:4], True)
    page = batches.list(limit=2, before_id=made[2])
    assert ([each.id for each in page.data], page.has_more) == (made[:2], False)
    for batch_id in made:
        ended(client, batches.retrieve(batch_id))


def test_a_cancelled_message_batch_lists_its_unanswered_requests(
    client: anthropic.Anthropic, backend: StoppingBackend
) -> None:
    batches = client.messages.batches
    backend.num_answers = 1
    batch = batches.create(requests=[request(str(each)) for each in range(40)])
    wait_until(lambda: backend.num_ended == 1)
    with pytest.raises(anthropic.ConflictError, match="Cancel it first"):
        batches.delete(batch.id)
    with pytest.raises(anthropic.AnthropicError, match="No `results_url`"):
        batches.results(batch.id)
    cancelled = batches.cancel(batch.id)
    assert cancelled.processing_status == "canceling"
    assert cancelled.cancel_initiated_at is not None
    counts = ended(client, batch).request_counts
    assert counts.canceled >= 39 and counts.succeeded + counts.canceled == 40
    kinds = [each.result.type for each in batches.results(batch.id)]
    assert (kinds.count("succeeded"), kinds.count("canceled")) == (
        counts.succeeded,
        counts.canceled,
    )


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "requests"),
        ([request("a"), request("a")], r"requests\[1\].custom_id: is used"),
        ([request("a b")], "custom_id"),
        ([request("a", stream=True)], "nowhere to stream"),
        ([{"custom_id": "a"}], "params"),
    ],
)
def test_an_invalid_message_batch_is_refused_at_creation(
    client: anthropic.Anthropic, requests: list[Any], said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said) as raised:
        client.messages.batches.create(requests=requests)
    assert raised.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert client.messages.batches.list().data == []


def test_a_message_batch_continues_after_a_restart(tmp_path: Path) -> None:
    backend = StoppingBackend()
    backend.num_answers = 2
    with live_server(backend, storage={"path": tmp_path}) as server, client_of(server) as client:
        asked = [request(str(each)) for each in range(5)]
        batch = client.messages.batches.create(requests=asked)
        wait_until(lambda: backend.num_ended == 2)
    with live_server(storage={"path": tmp_path}) as server, client_of(server) as client:
        assert ended(client, batch).request_counts.succeeded == 5
        results = [each.custom_id for each in client.messages.batches.results(batch.id)]
        assert results == [str(each) for each in range(5)]
