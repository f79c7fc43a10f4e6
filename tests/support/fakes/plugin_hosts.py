"""Plugins around a fake backend, for tests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from engine.backends.base import EventFeed
from engine.core.config_tables import PluginTable
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    GenerationContext,
)
from engine.core.interfaces.plugin import InferencePlugin
from engine.core.interfaces.request import SamplingParams
from engine.plugins.backend import PluggedBackend
from engine.plugins.host import PluginHost
from engine.plugins.metrics import PluginMetrics
from tests.support.fakes.fake_backend import MODEL, FakeBackend


def plugged(
    plugins: Sequence[InferencePlugin],
    backend: FakeBackend | None = None,
    registry: CollectorRegistry | None = None,
    **table: Any,
) -> PluggedBackend:
    metrics = PluginMetrics(registry or CollectorRegistry())
    hosts = [PluginHost(each.name, each, PluginTable(**table), metrics) for each in plugins]
    return PluggedBackend(backend or FakeBackend(), hosts)


@asynccontextmanager
async def running(
    plugins: Sequence[InferencePlugin], backend: FakeBackend | None = None, **table: Any
) -> AsyncIterator[PluggedBackend]:
    made = plugged(plugins, backend, **table)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def a_chat(content: str = "say hello", tenant: str = "", **params: Any) -> ChatRequest:
    context = GenerationContext(
        request_id="chat-1",
        params=SamplingParams(**{"max_tokens": 64} | params),
        model=MODEL,
        salt="salt-of-the-key",
        tenant=tenant,
    )
    return ChatRequest(context=context, messages=({"role": "user", "content": content},))


def a_completion(prompt: str | tuple[int, ...], **params: Any) -> CompletionRequest:
    return CompletionRequest(context=a_chat(**params).context, prompt=prompt)


async def fed(backend: PluggedBackend, request: ChatRequest | CompletionRequest) -> list[Event]:
    """The pushed events; without active plugins, the events as they are read."""
    source = (
        backend.chat(request) if isinstance(request, ChatRequest) else backend.complete(request)
    )
    if not isinstance(source, EventFeed):
        return [event async for event in source]
    events: list[Event] = []
    await source.feed(events.append)
    return events
