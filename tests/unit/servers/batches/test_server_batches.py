"""/v1/batches as the official client uses it: JSONL in, every line answered once, JSONL out."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from engine.core.errors import InferenceError, RateLimitError, UnavailableError
from engine.servers.batches import lines, run, runner, store
from engine.servers.serving.generation import OFFLINE_PRIORITY
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.fakes.stopping_backend import StoppingBackend, stopping_after
from tests.support.servers.live_server import LiveServer, chat, live_server, wait_until

TEXT = "Hello from a fake model."
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60)  # one for all: a client is slow to make
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(run, "READY_CHECK_S", 0.01)
    monkeypatch.setattr(run, "CHECK_S", 0.05)
    monkeypatch.setattr(runner, "POLL_S", 0.05)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def shared(storage: Path) -> Iterator[LiveServer]:
    limits = {"body_limit_mb": 1}
    with live_server(StoppingBackend(), storage={"path": storage}, server=limits) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    shared.backend.reset()
    yield shared
    assert shared.services.lifecycle.num_admitted == 0


@pytest.fixture
def backend(server: LiveServer) -> StoppingBackend:
    assert isinstance(server.backend, StoppingBackend)
    return server.backend


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


def client_of(server: LiveServer) -> openai.OpenAI:
    base = f"{server.url}/v1"
    return openai.OpenAI(base_url=base, api_key="unused", max_retries=0, http_client=HTTP)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = chat(**body) if url == CHAT else {"model": MODEL} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def create(
    client: openai.OpenAI, requests: Sequence[Any], endpoint: Any = CHAT, **more: Any
) -> Batch:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in requests)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, seconds=60)
    return client.batches.retrieve(batch.id)


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    given = batch.request_counts
    return given.total, given.completed, given.failed


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def custom_ids(client: openai.OpenAI, batch: Batch) -> list[str]:
    files = (batch.output_file_id, batch.error_file_id)
    return [each["custom_id"] for file_id in files for each in read(client, file_id)]


def test_every_line_is_answered_in_order(client: openai.OpenAI, backend: FakeBackend) -> None:
    requests = [line(f"é{n}", max_tokens=None if n % 2 else 2) for n in range(40)]
    requests[7]["body"]["temperature"] = 99
    batch = ended(client, create(client, requests, metadata={"job": "nightly"}))
    assert batch.status == "completed" and batch.errors is None
    assert batch.metadata == {"job": "nightly"} and batch.model == MODEL
    assert counts(batch) == (40, 39, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.expires_at == batch.created_at + 86400
    good = read(client, batch.output_file_id)
    assert [each["custom_id"] for each in good] == [f"é{n}" for n in range(40) if n != 7]
    assert set(good[0]) == {"id", "custom_id", "response", "error"} and good[0]["error"] is None
    assert set(good[0]["response"]) == {"status_code", "request_id", "body"}
    assert good[1]["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    assert good[0]["response"]["body"]["usage"]["completion_tokens"] == 2
    (bad,) = read(client, batch.error_file_id)
    assert bad["custom_id"] == "é7" and bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert len({each["id"] for each in good}) == 39
    spent = [each["response"]["body"]["usage"] for each in good]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in spent)
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in spent)
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    assert {each.context.priority for each in backend.requests} == {OFFLINE_PRIORITY}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "say hello", "priority": -5}),
        ("/v1/embeddings", {"input": "say hello"}),
        ("/v1/responses", {"input": "say hello"}),
    ],
)
def test_batches_work_for_completions_embeddings_and_responses(
    client: openai.OpenAI, backend: FakeBackend, endpoint: str, body: dict[str, Any]
) -> None:
    batch = ended(client, create(client, [line("a", endpoint, **body)], endpoint))
    assert counts(batch) == (1, 1, 0), read(client, batch.error_file_id)
    (answer,) = read(client, batch.output_file_id)
    assert answer["response"]["body"]["usage"]["total_tokens"] > 0
    asked = [each.context.priority for each in backend.requests]
    asked += [each.priority for each in backend.embed_requests]
    assert asked == [body.get("priority", OFFLINE_PRIORITY)]


@pytest.mark.parametrize(
    ("requests", "code", "number"),
    [
        (["{nope"], "invalid_json_line", 1),
        ([line("a"), '{"custom_id": NaN}'], "invalid_json_line", 2),
        (["[" * 100_000], "invalid_json_line", 1),
        (["[]"], "invalid_json_line", 1),
        ([line("a"), "", line("a")], "duplicate_custom_id", 3),
        ([line("")], "invalid_custom_id", 1),
        ([line("a") | {"custom_id": 7}], "invalid_custom_id", 1),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([line("a", "/v1/completions")], "invalid_url", 1),
        ([line("a") | {"url": "http://elsewhere" + CHAT}], "invalid_url", 1),
        ([line("a") | {"headers": {}}], "unknown_parameter", 1),
        ([line("a") | {"body": []}], "invalid_request", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a", model="other")], "model_not_found", 1),
        ([line("a"), line("b", model="other")], "mismatched_model", 2),
        ([line("a", model=None)], "missing_required_parameter", 1),
        (['{"custom_id": "a"}'], "missing_required_parameter", 1),
        (["\n\n"], "empty_file", None),
        ([line("a", stop="x" * (2 << 20))], "line_too_long", 1),
    ],
)
def test_an_invalid_line_fails_the_batch_before_any_request(
    client: openai.OpenAI,
    backend: FakeBackend,
    requests: list[Any],
    code: str,
    number: int | None,
) -> None:
    batch = ended(client, create(client, requests))
    assert batch.status == "failed" and batch.failed_at is not None
    assert batch.errors is not None and batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, number)]
    assert batch.output_file_id is None and batch.error_file_id is None
    assert backend.requests == []
    client.files.delete(batch.input_file_id)  # nothing holds it any longer


def test_reported_errors_and_line_lengths_are_bounded(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = ended(client, create(client, ["{"] * 1_000))
    assert batch.errors is not None and len(batch.errors.data or ()) == lines.MAX_ERRORS
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    batch = ended(client, create(client, [line(f"{n}") for n in range(3)]))
    assert batch.errors is not None and batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("too_many_lines", 3)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, None),
        ({"extra_body": {"priority": 1}}, "priority"),
    ],
)
def test_unsupported_batch_fields_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None
) -> None:
    asked = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"} | fields
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**asked)
    assert caught.value.param == (param or "output_expires_after.seconds")


def test_an_output_file_cannot_be_a_batch_input(client: openai.OpenAI) -> None:
    batch = ended(client, create(client, [line("a")], output_expires_after=life(7200)))
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.expires_at == output.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        client.batches.create(input_file_id=output.id, endpoint=CHAT, completion_window="24h")


def life(seconds: int) -> Any:
    return {"anchor": "created_at", "seconds": seconds}


def test_batches_are_listed_in_pages_and_unknown_ones_are_404(client: openai.OpenAI) -> None:
    ids = [ended(client, create(client, [line("a")])).id for _ in range(3)]
    pages = client.batches.list(limit=2)
    assert len(pages.data) == 2
    assert [each.id for each in islice(pages, 3)] == ids[::-1]  # the client turns the pages
    assert [each.id for each in client.batches.list(after=ids[1]).data[:1]] == ids[:1]
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_unknown")
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=101)


def test_a_cancelled_batch_keeps_its_finished_lines(
    client: openai.OpenAI, backend: StoppingBackend
) -> None:
    answered = backend.num_answers = 10
    batch = create(client, [line(f"{n}") for n in range(100)])
    wait_until(lambda: counts(client.batches.retrieve(batch.id))[1] == answered)
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    assert counts(batch) == (100, answered, 0)
    assert len(read(client, batch.output_file_id)) == answered
    unanswered = read(client, batch.error_file_id)
    assert len(unanswered) == 100 - answered
    assert {each["error"]["code"] for each in unanswered} == {"batch_cancelled"}
    assert all(each["response"] is None for each in unanswered)
    assert sorted(custom_ids(client, batch)) == sorted(f"{n}" for n in range(100))
    assert backend.num_held == 0  # what ran was let go of
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_an_overdue_batch_expires(
    client: openai.OpenAI, backend: StoppingBackend, storage: Path
) -> None:
    backend.num_answers = 0
    batch = create(client, [line("a"), line("b")])
    wait_until(lambda: backend.num_held == 2)
    with sqlite3.connect(storage / "batches.db") as connection:
        connection.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (batch.id,))
    batch = ended(client, batch)
    assert batch.status == "expired" and batch.expired_at is not None
    assert [each["error"]["code"] for each in read(client, batch.error_file_id)] == [
        "batch_expired",
        "batch_expired",
    ]
    assert backend.num_held == 0


@pytest.mark.parametrize(
    "refusal", [RateLimitError("full", retry_after=0.01), UnavailableError("restarting")]
)
def test_a_batch_line_refused_with_429_or_503_is_retried(
    client: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, refusal: Any
) -> None:
    monkeypatch.setattr(run.random, "uniform", lambda *_: 0.01)  # of what was asked for
    answer = backend.chat

    def refuse_at_first(request: Any) -> Any:
        backend.refusal = refusal if len(backend.requests) < 4 else None
        return answer(request)

    monkeypatch.setattr(backend, "chat", refuse_at_first)
    batch = ended(client, create(client, [line(f"{n}") for n in range(3)]))
    assert counts(batch) == (3, 3, 0), read(client, batch.error_file_id)
    assert len(backend.requests) > 3


def test_a_line_that_keeps_killing_the_engine_is_given_up(
    client: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.random, "uniform", lambda *_: 0.01)
    backend.failure = UnavailableError("The engine stopped unexpectedly.")
    batch = ended(client, create(client, [line("a")]))
    assert counts(batch) == (1, 0, 1) and len(backend.requests) == run.MAX_LOST
    (bad,) = read(client, batch.error_file_id)
    assert bad["response"]["status_code"] == 503


def test_a_failed_line_does_not_fail_the_batch(client: openai.OpenAI, backend: FakeBackend) -> None:
    backend.failure, backend.fail_after = InferenceError("non-finite logits"), 3
    batch = create(client, [line("long"), line("short", max_tokens=2)])
    batch = ended(client, batch)
    assert batch.status == "completed" and counts(batch) == (2, 1, 1)
    assert len(backend.requests) == 2  # not retried
    assert custom_ids(client, batch) == ["short", "long"]


def test_batch_slots_are_shared_and_bounded(tmp_path: Path) -> None:
    backend = stopping_after(0)
    limits = {"max_concurrent_requests": 6}
    with live_server(backend, storage={"path": tmp_path}, server=limits) as server:
        client = client_of(server)
        batches = [create(client, [line(f"{n}") for n in range(9)]) for _ in range(2)]
        wait_until(lambda: {each.status for each in client.batches.list()} == {"in_progress"})
        wait_until(lambda: backend.num_held == 3)
        assert len(backend.requests) == 3  # half of what the server takes
        for batch in batches:
            client.batches.cancel(batch.id)
        assert [ended(client, each).status for each in batches] == ["cancelled"] * 2


def test_results_beyond_the_storage_limit_fail_the_batch_and_keep_the_rest(tmp_path: Path) -> None:
    backend = FakeBackend(["x" * 100_000])
    storage = {"path": tmp_path, "max_size_mb": 1}
    with live_server(backend, storage=storage) as server:
        client = client_of(server)
        batch = ended(client, create(client, [line(f"{n}") for n in range(20)]))
        assert batch.status == "failed" and batch.errors is not None
        assert [each.code for each in batch.errors.data or ()] == ["storage_full"]
        num_done = len(read(client, batch.output_file_id))
        assert 5 < num_done < 11
        assert sorted(custom_ids(client, batch)) == sorted(f"{n}" for n in range(20))


def test_the_number_of_open_batches_is_limited(
    client: openai.OpenAI, backend: StoppingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OPEN_BATCHES", 1)
    backend.num_answers = 0
    batch = create(client, [line("a")])
    with pytest.raises(openai.RateLimitError):
        create(client, [line("a")])
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_lines_are_logged_and_counted_like_requests(
    client: openai.OpenAI, server: LiveServer
) -> None:
    before = server.services.lifecycle.total_requests
    ended(client, create(client, [line("a"), line("b")]))
    assert server.services.lifecycle.total_requests == before + 2


def test_batch_answers_are_parsed_off_the_event_loop(
    client: openai.OpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of thousands of vectors is many megabytes of JSON."""
    on_loop: list[bool] = []
    answered_line = run.answered_line

    def noted(endpoint: str, custom_id: str, answer: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)
        return answered_line(endpoint, custom_id, answer)

    monkeypatch.setattr(run, "answered_line", noted)
    ended(client, create(client, [line("a")]))
    assert on_loop == [False]
