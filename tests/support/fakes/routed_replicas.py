"""Routers over fake backends, and requests to them."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.backends.base import EventFeed, EventSink
from engine.core.errors import (
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    Event,
    GenerationContext,
    TextEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing.attempts import ShadowTraffic
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router
from tests.support.fakes.fake_backend import FakeBackend

GONE = UnavailableError("it is gone", retry_after=3.0)


class Fed(FakeBackend):
    """A backend that pushes its events."""

    def chat(self, request: ChatRequest) -> "Feed":
        return Feed(super().chat(request))


class Feed(EventFeed):
    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self.was_read = False

    async def feed(self, sink: EventSink) -> None:
        async for event in self._events:
            sink(event)

    async def __anext__(self) -> Event:
        self.was_read = True
        return await anext(self._events)

    async def aclose(self) -> None:
        pass  # what it reads holds nothing


def replica(name: str, backend: FakeBackend | None = None, **options: Any) -> Replica:
    made = Replica(name, "fake", backend or FakeBackend(), **options)
    made.has_started = True
    return made


def router(
    *replicas: Replica,
    policy: str = "round_robin",
    shadow: ShadowTraffic | None = None,
    registry: CollectorRegistry | None = None,
    **options: Any,
) -> Router:
    route = Route(
        "m", [Member(each, 1.0) for each in replicas], policy, make_policy(policy), **options
    )
    metrics = RouterMetrics(registry or CollectorRegistry())
    metrics.watch(replicas)
    return Router(replicas, [route], metrics, shadow)


def asking(name: str = "id", **context: Any) -> ChatRequest:
    fields = {"request_id": name, "params": SamplingParams(max_tokens=50), "model": "m"} | context
    messages = ({"role": "user", "content": "hello"},)
    return ChatRequest(context=GenerationContext(**fields), messages=messages)


async def answer(made: Router, request: ChatRequest | None = None) -> list[Event]:
    return [event async for event in made.chat(request or asking())]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


def fake(each: Replica) -> FakeBackend:
    assert isinstance(each.backend, FakeBackend)
    return each.backend


async def _fed(made: Router, asked: ChatRequest) -> list[Event]:
    events: list[Event] = []
    stream = made.chat(asked)
    assert isinstance(stream, EventFeed)
    await stream.feed(events.append)
    return events


# Runs a test with pulled and with pushed events.
both_ways = pytest.mark.parametrize("take", [answer, _fed])
