"""Requests and a started backend, for tests of remote OpenAI-compatible servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.backends.openai import OpenAIBackend, OpenAIConfig
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    GenerationContext,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams


def a_context(**fields: Any) -> GenerationContext:
    params = SamplingParams(**fields.pop("params", {}))
    return GenerationContext(request_id="request-1", params=params, **fields)


def a_chat(**fields: Any) -> ChatRequest:
    message = {"role": "user", "content": "hi"}
    return ChatRequest(context=a_context(**fields), messages=(message,))


def a_completion(prompt: str | tuple[int, ...] = "a b", **fields: Any) -> CompletionRequest:
    own = {name: fields.pop(name) for name in ("echo", "suffix") if name in fields}
    return CompletionRequest(context=a_context(**fields), prompt=prompt, **own)


@asynccontextmanager
async def started(url: str, **fields: Any) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend(OpenAIConfig(**({"base_url": url, "dialect": "openai"} | fields)))
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


async def events_of(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TextEvent) and e.choice == choice)


def usage_of(events: list[Event]) -> UsageEvent:
    assert isinstance(events[-1], UsageEvent)
    return events[-1]


def finishes_of(events: list[Event]) -> list[FinishEvent]:
    return [event for event in events if isinstance(event, FinishEvent)]
