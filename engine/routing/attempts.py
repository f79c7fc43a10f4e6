"""The attempts at one request. If a replica fails before its first event, another one is tried.

After an event was sent to the client, the request is not retried. If only the engine of the replica
died, the request may move: another replica with the same fingerprint continues it where it left
off. Otherwise the client gets an error.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol

from msgspec.structs import replace

from engine.backends.base import (
    EventFeed,
    EventSink,
    GeneratedFeed,
    InterruptedRequest,
    close_events,
)
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    EmbedRequest,
    Event,
    TextEvent,
    UsageEvent,
)
from engine.core.observability.tracing import TRACE
from engine.routing.decisions import Decision, Failed
from engine.routing.policies import RoutedRequest
from engine.routing.prefixes import Request
from engine.routing.replica import Member, Replica
from engine.routing.route import Pick, Route

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
# If all replicas are at their request limit, a request waits up to this many seconds for a free
# slot. Then the client gets an error.
MAX_WAIT_S = 5.0
RETRY_AFTER_S = 2.0


class EventTap(Protocol):
    """Receives every event of a request, for shadow traffic. It can't change the events."""

    def primary(self, event: Event) -> None: ...


class ShadowTraffic(Protocol):
    """Copies a share of the requests to a second backend, without delaying the original."""

    def mirror(self, model: str, request: ChatRequest | CompletionRequest) -> EventTap | None: ...

    async def stop(self) -> None: ...

    def report(self) -> dict[str, Any]: ...


class Observer(Protocol):
    """The part of the router to which attempts report how they ended."""

    running: "Running"

    def ended(self, route: Route, replica: Replica, error: EngineError | None) -> None: ...

    def freed(self, replica: Replica) -> None: ...

    def may_eject(self, replica: Replica) -> bool: ...


class Attempts:
    """All attempts at one request. Call `next` until it returns None."""

    def __init__(
        self,
        route: Route,
        request: Request,
        decision: Decision,
        observer: Observer,
        mirror: Callable[[], EventTap | None],
        adapter: str = "",
    ) -> None:
        self.route = route
        self.request = request
        self.asked = RoutedRequest(request, adapter)
        self.decision = decision
        self.observer = observer
        self.is_done = False
        self.last_error: EngineError | None = None
        self._make_mirror = mirror
        self._mirror: EventTap | None = None
        self._failed: list[str] = []
        self._began = time.monotonic()

    async def next(self) -> "Attempt | None":
        """Begin another attempt. The chosen replica counts the request as in flight from now on.
        Returns None if an earlier attempt has succeeded. If no replica is left, raises the error of
        the last attempt. If no attempt was made, the error says why no replica could be used.
        """
        if self.is_done:
            return None
        pick = await self._pick()
        chosen = pick.chosen
        self.decision.candidates = pick.candidates
        if chosen is None:
            self.decision.chosen = None
            self.decision.why = "all are at their limit" if pick.is_full else "none is ready"
            raise self.last_error or self._refusal(pick)
        self.decision.chosen = chosen.member.replica.name
        self.decision.why = chosen.why
        self.decision.attempts += 1
        self._trace_choice()
        self.route.went(self.asked, pick)
        chosen.member.replica.take()
        if self.decision.attempts == 1:
            self._mirror = self._make_mirror()
        return Attempt(self, chosen.member, self._mirror)

    def _trace_choice(self) -> None:
        trace = TRACE.get()
        if trace is not None:
            trace.note(
                "route",
                self._began,
                time.monotonic(),
                backend=self.decision.chosen,
                why=self.decision.why,
                attempt=self.decision.attempts,
            )

    def failed(self, attempt: "Attempt", error: EngineError) -> bool:
        """Record a failed attempt. Returns whether the request may be sent to another replica."""
        self.last_error = error
        name = attempt.replica.name
        self._failed.append(name)
        self.decision.failed += (Failed(name, error.message, attempt.seconds),)
        may_retry = (
            error.retryable and not attempt.has_begun and self.decision.attempts < MAX_ATTEMPTS
        )
        if may_retry:
            log.warning("%s failed before it answered, trying another: %s", name, error)
        return may_retry

    def forget_mirror(self) -> None:
        """Drop the receiver of events for shadow traffic, because no more events will come."""
        self._mirror = None

    def remaining(self) -> Request:
        """The request, with its limits of time shortened by the time that has already passed."""
        request = self.request
        spent = time.monotonic() - self._began
        if self.decision.attempts == 1 and spent < 0.1:
            return request
        holder = request if isinstance(request, EmbedRequest) else request.context
        limits = {"timeout_s": holder.timeout_s, "queue_timeout_s": holder.queue_timeout_s}
        left = replace(
            holder, **{k: max(v - spent, 0.1) for k, v in limits.items() if v is not None}
        )
        return left if isinstance(left, EmbedRequest) else replace(request, context=left)

    async def _pick(self) -> Pick:
        pick = self.route.pick(self.asked, self._failed)
        is_behind = self.route.has_waiting and pick.chosen is not None
        if self._failed or not (pick.is_full or is_behind):
            return pick  # a retry never waits for a free slot
        began = time.monotonic()
        deadline = began + MAX_WAIT_S
        has_turn = True
        while has_turn and (pick.is_full or is_behind):
            is_behind = False
            has_turn = await self.route.wait(deadline - time.monotonic())
            pick = self.route.pick(self.asked, self._failed)
        self.decision.waited_s += time.monotonic() - began
        return pick

    def _refusal(self, pick: Pick) -> EngineError:
        if pick.is_full:
            return RateLimitError(
                f"Every backend of {self.route.id} is at its request limit. Retry later.",
                retry_after=RETRY_AFTER_S,
            )
        return UnavailableError(
            f"No backend of {self.route.id} is ready. Retry later.", retry_after=RETRY_AFTER_S
        )


class Attempt:
    """A context manager for one attempt at one replica. On exit it reports the result to the
    router. If the request may be retried, it suppresses the error of the attempt.
    """

    def __init__(self, attempts: Attempts, member: Member, mirror: EventTap | None) -> None:
        self.replica = member.replica
        self.has_begun = False
        self._attempts = attempts
        self._mirror = mirror
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def source(self) -> AsyncIterator[Event]:
        request = self._attempts.remaining()
        assert not isinstance(request, EmbedRequest)
        backend = self.replica.backend
        return (
            backend.chat(request) if isinstance(request, ChatRequest) else backend.complete(request)
        )

    def begin(self) -> None:
        """Call when the first event, or the whole answer, has arrived."""
        self.has_begun = True
        self._attempts.decision.has_answered = True
        self.replica.first_tokens_s.append(self.seconds)

    def note(self, event: Event) -> None:
        if not self.has_begun:
            self.begin()
        if isinstance(event, TextEvent):
            self.replica.generated_tokens += event.num_tokens
        elif isinstance(event, UsageEvent):
            self.replica.add_usage(event)
        if self._mirror is not None:
            self._show(event)

    def tap(self, sink: EventSink) -> EventSink:
        note = self.note

        def noted(event: Event) -> None:
            note(event)
            sink(event)

        return noted

    def move(self, interrupted: InterruptedRequest) -> bool:
        """Continue the request on the least loaded replica that can, because the engine of this one
        died. Returns False if none can.
        """
        route, decision = self._attempts.route, self._attempts.decision
        for other in sorted(route.members, key=lambda each: each.load):
            replica = other.replica
            is_usable = replica.state(replica.health()) == "ready" and not replica.is_full
            if (
                replica is self.replica
                or not is_usable
                or not replica.backend.take_over(interrupted)
            ):
                continue
            log.info("a request of %s continues on %s", self.replica.name, replica.name)
            decision.failed += (Failed(self.replica.name, "Its engine died."),)
            decision.chosen, decision.why = replica.name, "it continued the request"
            self._leave()
            self.replica = replica
            replica.take()
            return True
        return False

    def _leave(self) -> None:
        """The replica no longer works on the request, for no fault of the request."""
        self.replica.release()
        self.replica.outlier.abandon()
        self._attempts.observer.freed(self.replica)

    def __enter__(self) -> "Attempt":
        self._attempts.observer.running[self._attempts.decision.request_id] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        attempts, replica = self._attempts, self.replica
        attempts.observer.running.pop(attempts.decision.request_id, None)
        replica.release()
        retries = False
        if error is None:
            attempts.is_done = True
            replica.outlier.succeed()
            attempts.observer.ended(attempts.route, replica, None)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            replica.outlier.abandon()
        else:
            failure = error if isinstance(error, EngineError) else EngineError("internal error")
            self._judge(failure)
            retries = attempts.failed(self, failure)
            attempts.observer.ended(attempts.route, replica, failure)
        if not retries:
            attempts.forget_mirror()
            self._mirror = None
        attempts.observer.freed(replica)
        return retries

    def _judge(self, error: EngineError) -> None:
        """Count a failure against the replica, unless the request caused it. A failure does not
        count towards ejection if the replica reports that it is not ready: such a replica gets no
        requests anyway.
        """
        replica = self.replica
        is_late = isinstance(error, RequestTimeoutError) and self.has_begun
        if isinstance(error, InvalidRequestError | RateLimitError) or is_late:
            replica.outlier.abandon()
            return
        replica.num_failures += 1
        if not replica.health().ready:
            replica.outlier.abandon()
        elif replica.outlier.fail(self._attempts.observer.may_eject(replica)):
            seconds = replica.outlier.seconds_left
            log.warning("%s fails too often; ejected for %.0f s", replica.name, seconds)

    def _show(self, event: Event) -> None:
        assert self._mirror is not None
        try:
            self._mirror.primary(event)
        except Exception:
            log.exception("the shadow of a request failed; it gets no more of its events")
            self._mirror = None


class Running(dict[str, Attempt]):
    """The attempts that run now, by request id."""

    def rehome(self, interrupted: InterruptedRequest) -> bool:
        """Continue a request on another replica of its model, because its engine died."""
        attempt = self.get(interrupted.request_id)
        return attempt is not None and attempt.move(interrupted)


class Routed(GeneratedFeed):
    """The events of a request, from the replica that answers it."""

    def __init__(self, attempts: Attempts) -> None:
        super().__init__()
        self._attempts = attempts

    async def feed(self, sink: EventSink) -> None:
        while (attempt := await self._attempts.next()) is not None:
            with attempt:
                source = attempt.source()
                if isinstance(source, EventFeed):
                    await source.feed(attempt.tap(sink))
                    continue
                async with _closing(source):
                    async for event in source:
                        attempt.note(event)
                        sink(event)

    async def _read(self) -> AsyncGenerator[Event, None]:
        while (attempt := await self._attempts.next()) is not None:
            with attempt:
                source = attempt.source()
                async with _closing(source):
                    async for event in source:
                        attempt.note(event)
                        yield event


@contextlib.asynccontextmanager
async def _closing(source: AsyncIterator[Event]) -> AsyncGenerator[None, None]:
    """A context manager that closes `source`, also if not all events were read. Closing releases
    what the request holds in the backend.
    """
    try:
        yield
    finally:
        await close_events(source)
