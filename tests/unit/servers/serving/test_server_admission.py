"""Who is let in, and that everything is given back: admission, draining, probes, submissions."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from engine.core.errors import EngineError, NotFoundError, UnavailableError
from engine.core.interfaces.backend import (
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.observability.metrics import Metrics
from engine.servers import generate
from engine.servers.app import create_app
from engine.servers.serving.admission import Lifecycle
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.sse import coalesce
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, events_of, make_settings

KEY = "k" * 32


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(backend: FakeBackend) -> FastAPI:
    settings = make_settings(server={"max_concurrent_requests": 2})
    return create_app(settings, backend, Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0


def lifecycle_of(app: FastAPI) -> Lifecycle:
    lifecycle = app.state.services.lifecycle
    assert isinstance(lifecycle, Lifecycle)
    return lifecycle


async def test_requests_over_the_admission_limit_are_429_before_the_body_is_read(
    app: FastAPI, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.prefill_s = 30
    running = [
        asyncio.create_task(client.post("/v1/chat/completions", json=chat(stream=stream)))
        for stream in (True, False)
    ]
    while backend.num_open < 2:
        await asyncio.sleep(0.001)
    refused = await client.post("/v1/chat/completions", content=b"not even JSON")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "x-should-retry" not in refused.headers
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert backend.num_open == 0


async def test_each_prompt_of_a_list_takes_an_admission_slot(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"]}
    backend.prefill_s = 30
    running = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
    while backend.num_open < 1:
        await asyncio.sleep(0.001)
    assert (await client.post("/v1/completions", json=body)).status_code == 429
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    backend.prefill_s = 0
    assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_more_prompts_than_the_limit_are_refused_without_retry(
    client: httpx.AsyncClient,
) -> None:
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    refused = await client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert refused.headers["x-should-retry"] == "false"


async def test_a_failed_request_releases_its_admission_slot(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    for body in (chat(n=0), chat(model="other"), {}):
        for _ in range(3):
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code in (400, 404)
    assert lifecycle_of(app).num_admitted == 0


async def test_draining_refuses_new_requests_and_ends_open_ones(
    app: FastAPI, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.prefill_s = 30
    running = asyncio.create_task(client.post("/v1/chat/completions", json=chat(stream=True)))
    while backend.num_open < 1:
        await asyncio.sleep(0.001)
    drain = asyncio.create_task(lifecycle_of(app).drain(0.05))
    await asyncio.sleep(0)
    ready = await client.get("/readyz")
    assert ready.status_code == 503
    assert ready.json() == {"status": "draining"}
    refused = await client.post("/v1/chat/completions", json=chat())
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert (await client.get("/livez")).status_code == 200
    await drain
    ended = await running
    assert ended.status_code == 503
    assert ended.json()["error"]["code"] == "service_unavailable"


async def test_a_pause_can_end_and_a_shutdown_cannot() -> None:
    lifecycle = Lifecycle(2, 1.0)
    lifecycle.pause()
    with pytest.raises(UnavailableError):
        lifecycle.reserve(1)
    assert lifecycle.resume()
    lifecycle.reserve(1)
    lifecycle.fail_all()
    assert not lifecycle.resume()
    with pytest.raises(UnavailableError):
        lifecycle.reserve(1)


async def test_the_first_failure_of_an_event_pump_is_raised(backend: FakeBackend) -> None:
    async def endless() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    pump = EventPump(1, choices_per_source=1, timeout_s=None, on_tokens=lambda *_: None)
    pump.read([endless()])
    first, second = EngineError("first"), EngineError("second")
    pump.fail(first)
    pump.fail(second)
    with pytest.raises(EngineError, match="first"):
        await pump.take()
    await pump.close()


async def test_a_server_that_is_not_ready_answers_503(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.ready = False
    for path in ("/readyz", "/health"):
        response = await client.get(path)
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert (await client.head(path)).status_code == 503
    assert (await client.get("/health")).json()["status"] == "unhealthy"
    assert (await client.get("/livez")).status_code == 200
    assert (await client.head("/livez")).status_code == 200
    refused = await client.post("/v1/chat/completions", json=chat())
    assert refused.status_code == 503
    assert "loading weights" in refused.json()["error"]["message"]


async def test_health_details_need_the_key(backend: FakeBackend) -> None:
    settings = make_settings(server={"api_key": KEY})
    app = create_app(settings, backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/health")).json() == {"status": "healthy"}
        wrong = await client.get("/health", headers={"x-api-key": "wrong"})
        assert wrong.json() == {"status": "healthy"}
        with_key = {"authorization": f"Bearer {KEY}"}
        await client.post("/v1/chat/completions", json=chat(), headers=with_key)
        body = (await client.get("/health", headers=with_key)).json()
    assert body["status"] == "healthy"
    assert body["total_requests"] == 1
    assert body["cache_hit_rate"] == 0.25
    assert body["memory_usage_mb"] == 3.0
    assert body["step_age_seconds"] == 0.5
    assert body["uptime_seconds"] >= 0


async def test_metrics_follow_finished_requests(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.stats_now = EngineStats(num_steps=3, generated_tokens=42)
    await client.post("/v1/chat/completions", json=chat(n=2))
    page = (await client.get("/metrics")).text
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    assert f"vllm:generation_tokens_total{labels} 42.0" in page
    assert f"vllm:request_generation_tokens_sum{labels} 12.0" in page
    assert f"vllm:inter_token_latency_seconds_count{labels} 10.0" in page
    await client.post("/v1/chat/completions", json=chat(max_tokens=1))
    page = (await client.get("/metrics")).text
    ended = re.findall(r'vllm:request_success_total{.*finished_reason="(\w+)".*} (\S+)', page)
    assert {reason: float(count) for reason, count in ended if float(count)} == {
        "stop": 2,
        "length": 1,
    }
    assert f"engine_requests_in_flight{labels} 0.0" in page
    assert 'route="/v1/chat/completions"' in page


async def outcomes(client: httpx.AsyncClient) -> dict[str, float]:
    """How the requests ended, without the outcomes that none had."""
    page = (await client.get("/metrics")).text
    found = re.findall(r'engine_requests_total{.*outcome="(\w+)"} (\S+)', page)
    return {outcome: float(count) for outcome, count in found if float(count)}


async def until_ended(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    while True:
        body = (await client.get(f"/generate/{request_id}")).json()
        if body["status"] != "running":
            return body
        await asyncio.sleep(0.001)


async def test_events_of_a_generate_request_can_be_read_again(
    client: httpx.AsyncClient,
) -> None:
    submitted = await client.post("/generate", json={"prompt": "a b", "n": 2})
    assert list(submitted.json()) == ["request_id"]
    request_id = submitted.json()["request_id"]
    first = events_of((await client.get(f"/generate/{request_id}/stream")).text)
    assert first[-1] == "[DONE]"
    assert first[-2]["usage"]["completion_tokens"] == 12
    assert {event["request_id"] for event in first[:-1]} == {request_id}
    for index in (0, 1):
        own = [event for event in first[:-2] if event["index"] == index]
        assert "".join(event["text"] for event in own) == "Hello from a fake model."
        assert own[-1]["finish_reason"] == "stop"
    result = await until_ended(client, request_id)
    assert result["status"] == "finished"
    assert result["choices"][1]["text"] == "Hello from a fake model."
    assert result["choices"][1]["finish_reason"] == "stop"
    again = events_of((await client.get(f"/generate/{request_id}/stream")).text)
    assert "".join(e["text"] for e in again[:-2] if e["index"] == 1) == "Hello from a fake model."


async def test_a_generate_request_can_be_streamed_in_the_call_that_submits_it(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    response = await client.post("/generate", json={"prompt": [1, 2, 3], "stream": True})
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    assert "".join(event["text"] for event in events[:-2]) == "Hello from a fake model."
    assert backend.requests[0].prompt == (1, 2, 3)


async def test_deleting_a_submission_cancels_its_request(
    app: FastAPI, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.token_s = 30
    request_id = (await client.post("/generate", json={"prompt": "a"})).json()["request_id"]
    assert lifecycle_of(app).num_admitted == 1
    deleted = (await client.delete(f"/generate/{request_id}")).json()
    assert deleted["status"] == "cancelled"
    assert backend.num_open == 0
    assert lifecycle_of(app).num_admitted == 0
    stream = await client.get(f"/generate/{request_id}/stream")
    assert "CANCELLED" in stream.text
    assert "[DONE]" not in stream.text
    assert await outcomes(client) == {"abort": 1}


async def test_a_refused_submission_is_an_http_error(
    app: FastAPI, client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    response = await client.post("/generate", json={"prompt": "word " * 5000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert await outcomes(client) == {"refused": 1}
    assert (await client.get("/generate/unknown")).status_code == 404
    assert lifecycle_of(app).num_admitted == 0


async def test_old_submissions_are_evicted(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "MAX_SUBMISSIONS", 2)
    ids = []
    for _ in range(3):
        ids.append((await client.post("/generate", json={"prompt": "a"})).json()["request_id"])
        await until_ended(client, ids[-1])
    statuses = [(await client.get(f"/generate/{each}")).status_code for each in ids]
    assert statuses == [404, 200, 200]
    monkeypatch.setattr(generate, "KEEP_S", -1.0)
    last = (await client.post("/generate", json={"prompt": "a"})).json()["request_id"]
    assert (await client.get(f"/generate/{ids[1]}")).status_code == 404
    await until_ended(client, last)


@dataclass
class Kept:
    request_id: str = "gen-1"
    owner: str = "alice"
    ended_at: float | None = None


def test_submissions_of_one_tenant_never_evict_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "MAX_SUBMISSIONS", 4)
    submissions = generate.Submissions()
    submissions.add(cast(generate.Submission, Kept("of alice", "alice", time.monotonic())))
    for number in range(9):
        submissions.make_room("bob")
        kept = Kept(f"of bob {number}", "bob", time.monotonic())
        submissions.add(cast(generate.Submission, kept))
    assert submissions.find("of alice", "alice")
    assert submissions.find("of bob 7", "bob")
    with pytest.raises(NotFoundError):
        submissions.find("of bob 6", "bob")


def test_a_submission_belongs_to_its_key() -> None:
    submissions = generate.Submissions()
    submissions.add(cast(generate.Submission, Kept()))
    assert submissions.find("gen-1", "alice").owner == "alice"
    with pytest.raises(NotFoundError):
        submissions.find("gen-1", "bob")


def test_coalesce_joins_only_adjacent_events_of_one_choice() -> None:
    token = TokenText("x", b"x", -1.0)
    events = [
        TextEvent(0, "a", 1, (token,)),
        TextEvent(0, "b", 2, (token,)),
        TextEvent(1, "c", 1),
        TextEvent(0, "d", 1, None, (4,)),
        TextEvent(0, "e", 1, None, (5, 6)),
        FinishEvent(0, "stop"),
        FinishEvent(2, "stop"),
        TextEvent(1, "f", 1),
    ]
    assert coalesce(events) == [
        TextEvent(0, "ab", 3, (token, token)),
        TextEvent(1, "c", 1),
        TextEvent(0, "de", 2, None, (4, 5, 6)),
        FinishEvent(0, "stop"),
        FinishEvent(2, "stop"),
        TextEvent(1, "f", 1),
    ]


def test_coalesce_joins_reasoning_and_the_pieces_of_one_call() -> None:
    events = [
        ReasoningEvent(0, "so"),
        TextEvent(0, "", 1),  # the tokens of the reasoning
        ReasoningEvent(0, " what"),
        ToolCallEvent(0, 0, "", "call_1", "look"),
        TextEvent(0, "", 2),
        ToolCallEvent(0, 0, '{"a"'),
        ToolCallEvent(0, 0, ": 1}"),
        ToolCallEvent(0, 1, "{", "call_2", "look"),
        ToolCallEvent(0, 1, "}"),
    ]
    assert coalesce(events) == [
        ReasoningEvent(0, "so what"),
        ToolCallEvent(0, 0, '{"a": 1}', "call_1", "look"),
        ToolCallEvent(0, 1, "{}", "call_2", "look"),
    ]
