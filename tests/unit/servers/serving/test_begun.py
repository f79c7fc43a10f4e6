"""A request is told once when its turn has come. Until then it can be refused with an HTTP status,
although it is streamed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.backends.base import InferenceBackend
from engine.core.errors import RateLimitError
from engine.core.interfaces.backend import CompletionRequest, GenerationContext, ModelCard
from engine.core.interfaces.request import Abort, Deltas, GenerateRequest, SamplingParams
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.fakes.routed_replicas import replica, router
from tests.support.servers.live_server import make_settings
from tests.support.toy_engine.backend import ToyBackend
from tests.support.toy_engine.engine import ToyEngine

LONG = [3] * 40  # several steps of a toy engine's budget


class Toy(ToyBackend):
    """The real engine with a toy model, which has no card of its own."""

    def models(self) -> list[ModelCard]:
        return [CARD]

    async def tokenizer_info(self, *, model: str = "") -> None:
        return None


def begins(engine: ToyEngine) -> list[str]:
    messages = [each for each in engine.channel.outbox if isinstance(each, Deltas)]
    return [delta.request_id for each in messages for delta in each.deltas if delta.begins]


def send(engine: ToyEngine, request_id: str, prompt: list[int], **params: Any) -> None:
    asked = SamplingParams(seed=7, temperature=0.0, max_tokens=4, **params)
    engine.channel.inbox.append(
        GenerateRequest(request_id=request_id, prompt=tuple(prompt), params=asked, tells_begin=True)
    )


def turn_until_begun(engine: ToyEngine) -> None:
    for _ in range(20):
        engine.loop.turn(0.0)
        if begins(engine):
            return
    raise AssertionError("the request did not begin")


def test_the_begin_event_is_sent_once_when_the_first_step_starts() -> None:
    engine = ToyEngine(max_slots=1, budget=8)
    send(engine, "first", [1, 2, 3])
    engine.loop.turn(0.0)
    send(engine, "second", LONG)
    engine.loop.turn(0.0)
    assert begins(engine) == []  # the first one runs, and its first step gave it a token
    engine.channel.inbox.append(Abort("first", None))
    turn_until_begun(engine)
    for _ in range(20):
        engine.loop.turn(0.0)
    assert begins(engine) == ["second"]


def test_a_request_with_several_choices_begins_once() -> None:
    engine = ToyEngine(budget=8, num_blocks=256)
    send(engine, "many", LONG, n=3)
    for _ in range(40):
        engine.loop.turn(0.0)
    assert begins(engine) == ["many"]


def test_a_preempted_request_does_not_begin_again() -> None:
    engine = ToyEngine(budget=8)
    send(engine, "long", LONG)
    turn_until_begun(engine)
    engine.scheduler._preempt(engine.scheduler.table.running[0])
    for _ in range(40):
        engine.loop.turn(0.0)
    assert engine.scheduler.num_preemptions == 1
    assert begins(engine) == ["long"]


@asynccontextmanager
async def served(backend: InferenceBackend, **server: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(server=server), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": [[1, 2], [3, 4]]}])
@pytest.mark.parametrize("is_routed", [False, True])
async def test_a_stream_that_exceeds_its_queue_timeout_is_refused_with_a_status(
    is_routed: bool, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.0)
    backend = Toy()
    await backend.start()
    front: InferenceBackend = router(replica("toy", backend)) if is_routed else backend
    body = {"model": "m" if is_routed else MODEL, "prompt": [1, 2, 3], "stream": True}
    try:
        async with served(front, queue_timeout_s=0.3) as client:
            hogs = [await backend.open(hog(f"hog{number}")) for number in range(8)]
            answer = await client.post("/v1/completions", json=body | fields)
            for each in hogs:
                await each.aclose()
    finally:
        await backend.stop()
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert "could not begin" in answer.text


def hog(request_id: str) -> CompletionRequest:
    """Needs all slots of a toy engine for more than a second."""
    params = SamplingParams(n=8, max_tokens=240, temperature=0.0)
    context = GenerationContext(request_id=request_id, params=params)
    return CompletionRequest(context=context, prompt=(1, 2, 3))


async def test_a_replicas_refusal_of_a_waiting_stream_is_retried_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.0)
    full, free = FakeBackend(), FakeBackend()
    full.turn, full.refusal = asyncio.Event(), RateLimitError("It waited 9 s.", retry_after=9.0)
    routed = router(replica("full", full), replica("free", free))
    async with served(routed) as client:
        for _ in range(2):  # one of them is sent to the full one first
            body = {"model": "m", "prompt": "a b", "stream": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.wait([asking], timeout=0.05)
            full.turn.set()
            answer = await asking
            assert answer.status_code == 200 and "Hello" in answer.text
    assert len(full.requests) == 1 and len(free.requests) == 2
