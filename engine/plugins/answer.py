"""Runs one request through all plugins: first the request hooks, then the backend, then the text
filters and response hooks.

If no plugin filters or rewrites the answer, the backend's events are passed on directly. Otherwise
they pass through the plugins' threads. Events that arrive while a plugin works are merged.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from engine.backends.base import EventFeed, EventSink, GeneratedFeed, InferenceBackend
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.interfaces.plugin import PluginRequest, PluginResponse
from engine.plugins.channel import PlacedToken, TokenPlacer
from engine.plugins.filtering import FilterStage, shown
from engine.plugins.host import PluginFailedError, PluginHost
from engine.plugins.views import (
    Request,
    ResponseBuilder,
    applied,
    copied,
    mistake_in,
    view_of,
)


class Inbox:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """Tell the reader that no more events will come."""
        self._is_closed = True
        self._wake.set()

    async def take(self) -> list[Event]:
        """Wait for events and return all that have arrived. Returns an empty list after `close`."""
        while not self._events and not self._is_closed:
            self._wake.clear()
            await self._wake.wait()
        taken, self._events = self._events, []
        return taken


TextRequest = ChatRequest | CompletionRequest


async def prepared(hosts: Sequence[PluginHost], view: PluginRequest) -> PluginRequest:
    """The request with the changes of all plugins. Raises an error if a plugin refuses it."""
    for host in hosts:
        if host.blocks:
            raise host.refusal()
        if not (host.prepares and host.is_active):
            continue
        try:
            changed = await host.call(
                "pre_inference", _prepare, host, view, mistake_in=partial(mistake_in, before=view)
            )
            view = view if changed is None else copied(changed)
        except PluginFailedError:
            if host.on_failure == "refuse":
                raise
    return view


async def _prepare(host: PluginHost, view: PluginRequest) -> PluginRequest | None:
    """Copy the request and call the plugin. Copying a long conversation takes time, so it is done
    in the plugin's thread.
    """
    return await host.plugin.pre_inference(copied(view))


class PluggedAnswer(GeneratedFeed):
    """The events of a request, with the changes of all plugins."""

    def __init__(
        self, backend: InferenceBackend, hosts: Sequence[PluginHost], request: TextRequest
    ) -> None:
        super().__init__()
        self._backend = backend
        self._hosts = hosts
        self._request = request
        self._view = view_of(request)

    async def feed(self, sink: EventSink) -> None:
        num_choices = self._request.context.params.n
        observers = [host for host in self._hosts if host.observes]
        builder = ResponseBuilder(num_choices) if observers else None
        failure: BaseException | None = None
        try:
            self._view = await prepared(self._hosts, self._view)
            await self._answer(sink if builder is None else _both(builder.add, sink))
        except BaseException as error:
            failure = error
            raise
        finally:
            for host in observers:
                assert builder is not None
                self._show(host, builder, failure)

    async def _read(self) -> AsyncGenerator[Event, None]:
        async with _reading(self.feed) as inbox:
            while events := await inbox.take():
                for event in events:
                    yield event

    def _show(
        self, host: PluginHost, builder: ResponseBuilder, failure: BaseException | None
    ) -> None:
        view = self._view
        host.observe(lambda: builder.response(view, failure))

    async def _answer(self, sink: EventSink) -> None:
        source = self._ask(applied(self._request, self._view))
        filters = [host for host in self._hosts if host.filters and host.is_active]
        rewriters = [host for host in self._hosts if host.rewrites and host.is_active]
        if not filters and not rewriters:
            await _pump(source, sink)
            return
        stages = [FilterStage(host, copied(self._view)) for host in filters]
        async with _reading(lambda put: _pump(source, put)) as inbox:
            if rewriters:
                held = Held(self._request.context.params.n)
                await _filter(stages, inbox, held.add)
                await self._rewrite(rewriters, held, sink)
            else:
                await _filter(stages, inbox, sink)

    def _ask(self, request: Request) -> AsyncIterator[Event]:
        if isinstance(request, ChatRequest):
            return self._backend.chat(request)
        assert isinstance(request, CompletionRequest)
        return self._backend.complete(request)

    async def _rewrite(self, hosts: Sequence[PluginHost], held: "Held", sink: EventSink) -> None:
        response = original = held.builder.response(self._view)
        for host in hosts:
            try:
                changed = await host.call(
                    "post_inference",
                    host.plugin.post_inference,
                    response,
                    mistake_in=partial(_mistake_in_response, before=response),
                )
                response = response if changed is None else changed
            except PluginFailedError:
                if host.on_failure == "refuse":
                    raise
        for event in held.events(original, response):
            sink(event)


class Held:
    """A complete answer, held back for plugins that may change it."""

    def __init__(self, num_choices: int) -> None:
        self.builder = ResponseBuilder(num_choices)
        self._tokens: list[list[TextEvent]] = [[] for _ in range(num_choices)]
        self._usage: UsageEvent | None = None

    def add(self, event: Event) -> None:
        self.builder.add(event)
        if isinstance(event, TextEvent):
            self._tokens[event.choice].append(event)
        elif isinstance(event, UsageEvent):
            self._usage = event

    def events(self, original: PluginResponse, changed: PluginResponse) -> list[Event]:
        made: list[Event] = []
        for index, choice in enumerate(changed.choices):
            if choice.reasoning:
                made.append(ReasoningEvent(index, choice.reasoning))
            if choice.text == original.choices[index].text:
                made += self._tokens[index]
            else:  # a plugin has changed the text, so its tokens are dropped
                count = sum(each.num_tokens for each in self._tokens[index])
                made.append(TextEvent(index, choice.text, count))
            for number, call in enumerate(choice.tool_calls):
                made.append(
                    ToolCallEvent(index, number, call["arguments"], call["id"], call["name"])
                )
            ended = self.builder.finish(index)
            if ended.reason != "length":
                has_calls = bool(choice.tool_calls)
                ended = FinishEvent(index, "tool_calls" if has_calls else "stop", ended.stop_reason)
            made.append(ended)
        assert self._usage is not None
        return [*made, self._usage]


def _mistake_in_response(changed: Any, before: PluginResponse) -> str | None:
    if changed is None:
        return None
    if not isinstance(changed, PluginResponse) or len(changed.choices) != len(before.choices):
        return "post_inference must return None or a PluginResponse with as many choices"
    try:
        msgspec.convert(msgspec.to_builtins(changed), PluginResponse)
    except (msgspec.ValidationError, TypeError):
        return "the changed response has values of the wrong type"
    calls = [call for choice in changed.choices for call in choice.tool_calls]
    if any(call.keys() != {"id", "name", "arguments"} for call in calls):
        return "each tool call needs id, name and arguments"
    return None


async def _filter(stages: Sequence[FilterStage], inbox: Inbox, sink: EventSink) -> None:
    placers: dict[int, TokenPlacer] = {}
    while events := await inbox.take():
        for event in _joined(events):
            tokens: list[PlacedToken] = []
            if isinstance(event, TextEvent) and event.logprobs is not None:
                placer = placers.setdefault(event.choice, TokenPlacer())
                tokens = placer.place(event.logprobs, event.text)
            pieces = [(event, tokens)]
            for stage in stages:
                pieces = [made for each in pieces for made in await stage.push(*each)]
            for each, its_tokens in pieces:
                sink(shown(each, its_tokens))


def _joined(events: Sequence[Event]) -> list[Event]:
    """Merge consecutive text events of one choice, so that the plugins are called less often."""
    made: list[Event] = []
    for event in events:
        last = made[-1] if made else None
        if (
            isinstance(last, TextEvent)
            and isinstance(event, TextEvent)
            and last.choice == event.choice
            and (last.logprobs is None) == (event.logprobs is None)
        ):
            logprobs = None if last.logprobs is None else (*last.logprobs, *(event.logprobs or ()))
            made[-1] = TextEvent(
                last.choice, last.text + event.text, last.num_tokens + event.num_tokens, logprobs
            )
        else:
            made.append(event)
    return made


def _both(first: EventSink, second: EventSink) -> EventSink:
    def sink(event: Event) -> None:
        first(event)
        second(event)

    return sink


async def _pump(source: AsyncIterator[Event], sink: EventSink) -> None:
    if isinstance(source, EventFeed):
        await source.feed(sink)
        return
    try:
        async for event in source:
            sink(event)
    finally:
        close = getattr(source, "aclose", None)  # not every AsyncIterator has it
        if close is not None:
            await close()


@contextlib.asynccontextmanager
async def _reading(
    read: Callable[[EventSink], Coroutine[Any, Any, None]],
) -> AsyncGenerator[Inbox, None]:
    """A context manager whose `Inbox` is filled by another task, which runs `read`. Leaving the
    context early cancels the task. If the task fails, leaving the context raises its error.
    """
    inbox = Inbox()
    task = asyncio.create_task(_fill(read, inbox))
    try:
        yield inbox
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _fill(read: Callable[[EventSink], Coroutine[Any, Any, None]], inbox: Inbox) -> None:
    try:
        await read(inbox.put)
    finally:
        inbox.close()
