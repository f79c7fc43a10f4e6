"""Reads the backend's events for one HTTP request. Streams of several prompts are merged into one.

`open` submits the requests to the backend. `read` starts one task per prompt, which reads the
backend's events even if the client reads slowly. Events are buffered until the client takes them.
The buffer has at most about as many events as the request asked for tokens. If a request ends early
(client disconnect, drain timeout, deadline or backend failure), `fail` is called and cancels the
tasks. Closing the backend's iterators releases what the request held in the backend.
"""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
from starlette.types import Receive

from engine.backends.base import InferenceBackend, close_events, push_events
from engine.core.errors import EngineError, InvalidRequestError, RequestTimeoutError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    PromptProgress,
    ReasoningEvent,
    TextEvent,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.observability.tracing import RequestTrace
from engine.servers.http.errors import ClientDisconnectedError, opaque_error

logger = logging.getLogger(__name__)

# The backend enforces a request's deadline. If it does not, the server ends the request this many
# seconds after the deadline.
DEADLINE_MARGIN_S = 5.0


class Opener(Protocol):
    """A backend, or what takes requests in its place."""

    async def open(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[Event]: ...


class LastTokens(FinishEvent, frozen=True, kw_only=True):
    """The end of a choice and its last tokens, for streams that send both in one chunk."""

    text: TextEvent


OutputEvent = TextEvent | ReasoningEvent | ToolCallEvent | FinishEvent
# Called when tokens arrive, with the seconds since the previous tokens of the same choice and the
# number of new tokens.
OnTokens = Callable[[float, int], None]


class EventPump:
    """Reads and buffers the events of one HTTP request. Call `take` until it returns an empty list,
    then read `usage`. Always call `close`.
    """

    def __init__(
        self,
        num_sources: int,
        *,
        choices_per_source: int,
        timeout_s: float | None,
        on_tokens: OnTokens,
        on_usage: Callable[[UsageEvent], None] = lambda _: None,
        on_end: Callable[[], None] = lambda: None,
        trace: RequestTrace | None = None,
    ) -> None:
        num_choices = num_sources * choices_per_source
        self.choice_tokens = [0] * num_choices
        self.finish_reasons: list[Literal["stop", "length"] | None] = [None] * num_choices
        # All times are by time.monotonic().
        self.submitted_at: float | None = None  # when the first prompt was sent to its engine
        self.first_token_at: float | None = None
        self.ended_at: float | None = None  # when the answers to all prompts were complete
        self.usage = UsageEvent(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        self.failure: EngineError | None = None
        # If set, it gets each event first, unless earlier ones are buffered. Returns whether it has
        # written the event; otherwise the event is buffered. Unlike `take`, it wakes no task.
        self.write_at_once: Callable[[OutputEvent], bool] | None = None
        self.joins_ends = False  # whether a choice's last tokens and its end become one event
        # The token ids of each prompt. None until the backend tells them.
        self.prompts: list[tuple[int, ...] | None] = [None] * num_sources
        self.reports_progress = False  # whether events tell how much of the prompts is computed
        # The prompts that wait for their turn in an engine, and whether it came for any of them
        self._queued: set[int] = set()
        self._has_begun = False
        self._num_unchecked = 0  # submitted prompts that the backend has not checked yet
        self._requests: Sequence[ChatRequest | CompletionRequest] = ()
        self._last_token_at = [0.0] * num_choices
        self._on_tokens = on_tokens
        self._on_usage = on_usage
        self._on_end = on_end  # called before the end can be written
        self.trace = trace
        self._tap: Callable[[Event], None] | None = None  # sees all events, for the trace
        self._pending: list[OutputEvent] = []
        self._open = num_sources
        self._choices_per_source = choices_per_source
        self._loop = asyncio.get_running_loop()
        # The future that `take` or `accepted` waits for; None if neither waits.
        self._reader: asyncio.Future[None] | None = None
        self._nudged = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._sources: list[AsyncIterator[Event]] = []  # sources that `close` must close
        self._deadline: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            due_s = timeout_s + DEADLINE_MARGIN_S
            self._deadline = self._loop.call_later(due_s, self._expire, timeout_s)

    @property
    def is_complete(self) -> bool:
        """Whether the stream of every prompt ended without error. Only then is `usage` complete."""
        return self._open == 0

    @property
    def first_request(self) -> ChatRequest | CompletionRequest | None:
        return self._requests[0] if self._requests else None

    @property
    def max_tokens(self) -> int | None:
        """Max number of tokens of each choice. None if there is no limit, or no text is written."""
        return self._requests[0].context.params.max_tokens if self._requests else None

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def watch(self, receive: Receive) -> None:
        """Abort the request when the client disconnects. Call this only after the request body has
        been read, because it receives all further messages of the client.
        """
        self._tasks.append(asyncio.create_task(self._watch(receive)))

    async def open(
        self, backend: Opener, requests: Sequence[ChatRequest | CompletionRequest]
    ) -> list[AsyncIterator[Event]]:
        """Submit all requests to the backend and return their streams of events. Raises if the
        backend refuses one of them, or if the work was aborted meanwhile.
        """
        self._requests = requests
        self._num_unchecked = len(requests)
        if self.trace is not None:
            self._tap = self.trace.tap(requests[0])
        openings = [
            asyncio.create_task(self._accepted(backend, self._listening(each, index)))
            for index, each in enumerate(requests)
        ]
        self._tasks += openings
        try:
            if len(openings) == 1:
                return [await openings[0]]
            return list(await asyncio.gather(*openings))
        except EngineError as error:
            self.fail(error)
            raise
        except asyncio.CancelledError:
            if self.failure is None:
                raise
            raise self.failure from None
        except Exception:
            logger.exception("A backend refused a request without an EngineError.")
            opaque = opaque_error()
            self.fail(opaque)
            raise opaque from None

    def _listening(
        self, request: ChatRequest | CompletionRequest, index: int
    ) -> ChatRequest | CompletionRequest:
        """The request, with a callback that takes the tokens of its prompt."""

        def checked(token_ids: tuple[int, ...] | None) -> None:
            if self.submitted_at is None:
                self.submitted_at = time.monotonic()
            self.prompts[index] = token_ids
            self._num_unchecked -= 1
            self._queued.discard(index)  # a router may have sent it to another engine before
            self._wake()

        def waits(is_queued: bool) -> None:
            if is_queued:
                self._queued.add(index)
            else:
                self._has_begun = True
            self._wake()

        context = msgspec.structs.replace(request.context, on_prompt=checked, on_wait=waits)
        if self.reports_progress:
            report = functools.partial(self._report, index * self._choices_per_source)
            context = msgspec.structs.replace(context, on_progress=report)
        return msgspec.structs.replace(request, context=context)

    def _report(self, choice: int, progress: PromptProgress) -> None:
        self._pending.append(TextEvent(choice, "", 0, progress=progress))
        self._wake()

    async def _accepted(
        self, backend: Opener, request: ChatRequest | CompletionRequest
    ) -> AsyncIterator[Event]:
        source = await backend.open(request)
        self._sources.append(source)
        return source

    def read(self, sources: Sequence[AsyncIterator[Event]]) -> None:
        """Start a task for each source, which reads the source's events until its end."""
        for position, source in enumerate(sources):
            pumping = self._pump(source, position * self._choices_per_source)
            self._tasks.append(asyncio.create_task(pumping))

    async def accepted(self, check_s: float, patience_s: float) -> None:
        """Wait up to `check_s` seconds until the backend has checked the prompts, and then up to
        `patience_s` seconds for the first event. Raises if the backend has refused the request by
        then.
        """
        await self._wait_up_to(check_s, lambda: self._num_unchecked <= 0)
        await self._wait_up_to(patience_s)
        self._raise_refusal()

    async def begun(self, check_s: float, patience_s: float) -> None:
        """Like `accepted`, but if the prompts wait in a queue of our own engine, wait until the
        turn of one has come. A request whose turn never comes is refused, which raises.
        """
        await self._wait_up_to(check_s, lambda: self._num_unchecked <= 0)
        is_patient = True
        while is_patient and self._is_waiting and not self._has_begun:
            if self._queued:
                await self._wait(lambda: self._has_begun or not self._queued)
            else:
                is_patient = await self._wait_up_to(patience_s, lambda: bool(self._queued))
        self._raise_refusal()

    def _raise_refusal(self) -> None:
        if self.failure is not None and not self._pending:
            raise self.failure

    async def prompt_lengths(self, backend: InferenceBackend) -> list[int]:
        """The number of tokens of each prompt, for a stream that tells it before the answer. If the
        backend did not tell the number, its tokenizer counts them. The number is 0 if it has none.
        """
        return [
            await _count(backend, request) if told is None else len(told)
            for request, told in zip(self._requests, self.prompts, strict=True)
        ]

    async def take(self) -> list[OutputEvent] | None:
        """Wait for events and return all that have arrived, in order. Returns an empty list at the
        end of the stream. Returns None if `nudge` was called while there were no events.

        If the stream failed, raises the error after all earlier events have been taken.
        """
        if not self._pending and not await self._wait():
            return None
        if self._pending:
            batch, self._pending = self._pending, []
            return batch
        if self.failure is not None:
            raise self.failure
        return []

    async def wait_whole(self, add: Callable[[list[OutputEvent]], None] | None = None) -> None:
        """Wait for the end of the stream and pass all events to `add`, as they arrive. Raises if
        the stream failed.
        """
        while events := await self.take():
            if add is not None:
                add(events)

    def nudge(self) -> None:
        """Wake up a waiting `take`, which then returns None."""
        self._nudged = True
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Abort all streams with `error`. Only the first error is kept."""
        if self.failure is None and self._open:
            self.failure = error
            self.ended_at = time.monotonic()
            self._on_end()
            for task in self._tasks:
                task.cancel()
            self._wake()

    async def close(self) -> None:
        """End all tasks and close the backend's iterators."""
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self._sources:
            await close_events(source)

    def _expire(self, timeout_s: float) -> None:
        self.fail(RequestTimeoutError(f"The request took longer than {timeout_s:g} seconds."))

    @property
    def _is_waiting(self) -> bool:
        return not self._pending and self.failure is None and self._open > 0

    async def _wait(self, is_enough: Callable[[], bool] = lambda: False) -> bool:
        """Wait for events, for the end of the stream, or until `is_enough` returns true. Returns
        False if `nudge` was called before.
        """
        self._nudged = False
        while self._is_waiting and not is_enough():
            if self._nudged:
                return False
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return True

    async def _wait_up_to(
        self, seconds: float, is_enough: Callable[[], bool] = lambda: False
    ) -> bool:
        """Like `_wait`, for at most `seconds`. Returns False if the time is over."""
        timer = self._loop.call_later(seconds, self.nudge)
        try:
            return await self._wait(is_enough)
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _pump(self, source: AsyncIterator[Event], first_choice: int) -> None:
        try:
            await push_events(source, functools.partial(self._accept, first_choice))
        except EngineError as error:
            self.fail(error)
        except Exception:
            logger.exception("A backend's stream failed without an EngineError.")
            self.fail(opaque_error())
        else:
            self._open -= 1
            self.ended_at = time.monotonic()
            if self._open == 0:
                self._on_end()
            self._wake()

    def _accept(self, first_choice: int, event: Event) -> None:
        if isinstance(event, UsageEvent):
            self._on_usage(event)
            self.usage = add_usage(self.usage, event)
            self.ended_at = time.monotonic()
            return
        if self.failure is not None:
            return  # events still arrive until this task is cancelled
        if first_choice:
            event = msgspec.structs.replace(event, choice=event.choice + first_choice)
        if self._tap is not None:
            self._tap(event)
        if isinstance(event, TextEvent):
            if event.num_tokens:
                self._time_tokens(event.choice, event.num_tokens)
        elif isinstance(event, FinishEvent):
            self.finish_reasons[event.choice] = "length" if event.reason == "length" else "stop"
            if self.joins_ends:
                event = self._joined(event)
        if self._pending or self.write_at_once is None or not self.write_at_once(event):
            self._pending.append(event)
            self._wake()

    def _joined(self, finish: FinishEvent) -> FinishEvent:
        """Remove the text that arrived with the end of its choice, and join the two."""
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, TextEvent) or last.choice != finish.choice:
            return finish
        self._pending.pop()
        return LastTokens(finish.choice, finish.reason, finish.stop_reason, text=last)

    def _time_tokens(self, choice: int, num_tokens: int) -> None:
        now = time.monotonic()
        if self.choice_tokens[choice]:
            self._on_tokens(now - self._last_token_at[choice], num_tokens)
        elif self.first_token_at is None:
            self.first_token_at = now
        self._last_token_at[choice] = now
        self.choice_tokens[choice] += num_tokens

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientDisconnectedError("The client left before its answer was complete."))


async def _count(backend: InferenceBackend, request: ChatRequest | CompletionRequest) -> int:
    content = request if isinstance(request, ChatRequest) else request.prompt
    if isinstance(content, tuple):
        return len(content)
    try:
        return len(await backend.tokenize(content, model=request.context.model))
    except InvalidRequestError:
        return 0


def add_usage(total: UsageEvent, part: UsageEvent) -> UsageEvent:
    """Add up the token counts of several prompts. Prompts run in parallel, so each time is the
    longest of all prompts.
    """
    return UsageEvent(
        prompt_tokens=total.prompt_tokens + part.prompt_tokens,
        completion_tokens=total.completion_tokens + part.completion_tokens,
        cached_tokens=total.cached_tokens + part.cached_tokens,
        queue_s=max(total.queue_s, part.queue_s),
        prefill_s=max(total.prefill_s, part.prefill_s),
        decode_s=max(total.decode_s, part.decode_s),
        reasoning_tokens=total.reasoning_tokens + part.reasoning_tokens,
        num_revivals=max(total.num_revivals, part.num_revivals),
        num_drafted=total.num_drafted + part.num_drafted,
        num_accepted=total.num_accepted + part.num_accepted,
        has_prediction=total.has_prediction or part.has_prediction,
    )
