"""Keeps what each open request needs to continue in a new engine after its engine died.

A revived request is submitted with the tokens that it has generated so far. The new engine computes
them again, as after a preemption, and samples the next one. All other state of the output, such as
text that may become a stop string, is in the frontend and is not affected.

A request may be the cause of the deaths. It is a suspect if its engine died twice without any new
token of this request in between. Suspects are submitted first, each when the one before has
generated a token. A suspect at whose turn the engine dies again ends with an error.

A request that comes while no engine runs waits for the next one, at most for its queue timeout.
A request may also move to the engine of another replica, without waiting for a restart. A suspect
moves only if its engine is not restarted here, and is on trial there as well.
"""

import asyncio
import logging
import math
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec.structs import replace

from engine.core.errors import EngineError, InferenceError, RequestTimeoutError, UnavailableError
from engine.core.interfaces.request import GenerateRequest, RequestNotes, Resumed, TokenDelta

log = logging.getLogger(__name__)

# A request that has waited this many seconds for a new engine ends with an error. The time is
# longer than the pause after too many deaths.
MAX_WAIT_S = 120.0
SUSPECT_STRIKES = 2
MAX_LEFT = 64

Send = Callable[[GenerateRequest], None]


class Engine(Protocol):
    """The methods of `EngineLink` that the receiver of a request calls."""

    def forget(self, request_id: str, choice: int | None) -> None:
        """Abort one choice of a request, or the whole request if `choice` is None."""
        ...

    def leave(self, request_id: str, notes: RequestNotes) -> None:
        """Add the timelines of an aborted request to `notes` when they arrive."""
        ...

    def num_revivals(self, request_id: str) -> int:
        """How often the request continued in another engine."""
        ...

    def done(self, request_id: str) -> None:
        """Called when the request has ended, so that its receiver is dropped."""
        ...


class Receiver(Protocol):
    """Receives the deltas of a request, or the error that ends it."""

    engine: Engine  # where the request runs; changes when the request moves to another replica

    def deliver(self, *items: TokenDelta | EngineError) -> None: ...


class OpenRequest:
    """A request that has not ended, and the tokens that it has generated."""

    def __init__(
        self, request: GenerateRequest, receiver: Receiver, is_in_engine: bool = True
    ) -> None:
        self.request = request
        self.receiver = receiver
        # The tokens of each choice that has not ended
        self.choices = {choice: array("i") for choice in range(request.params.n)}
        self._surprise_limits: dict[int, float] = {}
        self._submitted_at = time.monotonic()
        self._busy_s = 0.0  # since then, without waiting for its turn
        self.is_elsewhere = False  # whether a prefill node has its prompt
        self.is_in_engine = is_in_engine
        self.has_begun = is_in_engine  # whether any engine ever had it
        self.has_progress = False  # whether it generated a token since it was submitted last
        self.num_strikes = 0  # deaths of its engine since its last token
        self.num_revivals = 0
        self.expiry: asyncio.TimerHandle | None = None  # set while the request waits for an engine

    def record(self, delta: TokenDelta) -> None:
        if delta.finish_reason is not None:
            self.has_progress = True
            self.choices.pop(delta.choice, None)
        elif delta.token_ids and (tokens := self.choices.get(delta.choice)) is not None:
            self.has_progress = True
            tokens.extend(delta.token_ids)
            if delta.surprise_limit is not None:
                self._surprise_limits[delta.choice] = delta.surprise_limit

    def num_left(self, choice: int) -> int | None:
        """How many tokens a choice may still get. None: up to the end of the context."""
        most, tokens = self.request.params.max_tokens, self.choices.get(choice)
        return None if most is None or tokens is None else max(1, most) - len(tokens)

    def interrupt(self) -> None:
        """The engine that computed this request died."""
        self.is_in_engine = False
        self.num_strikes = 1 if self.has_progress else self.num_strikes + 1
        self.num_revivals += 1
        self.has_progress = False

    @property
    def seconds_left(self) -> float | None:
        return self._left_of(self.request.timeout_s)

    @property
    def seconds_to_wait(self) -> float:
        """How long the request may wait for an engine."""
        if self.is_elsewhere:
            return math.inf if self.seconds_left is None else self.seconds_left
        own = None if self.has_begun else self._turn_left
        return min(each for each in (MAX_WAIT_S, own, self.seconds_left) if each is not None)

    def come_back(self, queue_s: float) -> None:
        """The request is back from a prefill node, where it has waited `queue_s` for its turn. All
        other time there does not count as waiting.
        """
        self.is_elsewhere = False
        self._busy_s = max(0.0, time.monotonic() - self._submitted_at - queue_s)

    @property
    def _turn_left(self) -> float | None:
        limit = self.request.queue_timeout_s
        return self._left_of(None if limit is None else limit + self._busy_s)

    def _left_of(self, limit: float | None) -> float | None:
        return None if limit is None else max(0.0, limit - time.monotonic() + self._submitted_at)

    def resumed(self) -> GenerateRequest:
        """The request as the new engine gets it."""
        if not self.has_begun:
            left = self._turn_left
            return replace(self.request, timeout_s=self.seconds_left, queue_timeout_s=left)
        choices = tuple(
            Resumed(choice, tuple(tokens), self._surprise_limits.get(choice))
            for choice, tokens in self.choices.items()
        )
        return replace(
            self.request, resumed=choices, timeout_s=self.seconds_left, queue_timeout_s=None
        )

    def stop_waiting(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class OpenRequests:
    """The open requests of an engine. `max_revivals` bounds how often each of them is submitted
    again. With 0, all of them end with an error when the engine dies. `move` tries to continue a
    request on another replica, and returns whether that worked.
    """

    def __init__(
        self, max_revivals: int, move: Callable[[OpenRequest], bool] = lambda opened: False
    ) -> None:
        self._max_revivals = max_revivals
        self._move = move
        self._requests: dict[str, OpenRequest] = {}
        self._send: Send | None = None  # None while no engine runs
        self._on_trial: OpenRequest | None = None
        self._held: deque[OpenRequest] = deque()  # requests that wait for the end of the trials
        self.num_revived = 0
        # The notes of requests whose clients left lately. Their last deltas are still to come.
        self._left: OrderedDict[str, RequestNotes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, request: GenerateRequest, receiver: Receiver, send: Send | None) -> None:
        """Send a request to the engine. If no engine runs (`send` is None), the request waits for
        the next one.
        """
        assert request.request_id not in self._requests, "two requests have one id"
        request = self._with_seed(request)
        try:
            if send is not None:
                send(request)
                self._requests[request.request_id] = OpenRequest(request, receiver)
                return
        except UnavailableError:  # the engine is gone, and its death will be reported
            if not self._max_revivals:
                raise
        self._rehome(OpenRequest(request, receiver, is_in_engine=False))

    def _with_seed(self, request: GenerateRequest) -> GenerateRequest:
        """A revived request must continue with the same random numbers."""
        if not self._max_revivals or request.params.seed is not None:
            return request
        return replace(request, params=replace(request.params, seed=secrets.randbits(62)))

    def hold(self, request: GenerateRequest, receiver: Receiver) -> None:
        """Keep a request whose prompt a prefill node computes, until `release`."""
        opened = OpenRequest(self._with_seed(request), receiver, is_in_engine=False)
        opened.is_elsewhere = True
        self._requests[request.request_id] = opened
        self._await_engine(opened)

    def take_over(self, opened: OpenRequest, send: Send | None) -> None:
        """Continue a request of another engine here."""
        self._requests[opened.request.request_id] = opened
        opened.stop_waiting()
        if not opened.choices:
            return  # its client has not read the whole answer yet
        opened.is_in_engine = False
        if send is not None and _is_suspect(opened):
            self._send = send
            self._held.append(opened)
            if self._on_trial is None:
                self._next_trial()
            return
        if send is not None:
            try:
                self._resubmit(opened, send)
                return
            except UnavailableError:
                pass  # the engine is gone, and its death will be reported
            except EngineError as error:
                self._end(opened, error)
                return
        self._await_engine(opened)

    def release(self, request_id: str) -> OpenRequest | None:
        """Give up a request, so that an engine can take it over. None if it is not here."""
        opened = self._requests.pop(request_id, None)
        if opened is not None:
            opened.stop_waiting()
        return opened

    def release_all(self) -> list[OpenRequest]:
        """Give up all requests, so that another engine can continue them."""
        released = list(self._requests.values())
        for opened in released:
            opened.stop_waiting()
        self._requests.clear()
        self._held.clear()
        self._on_trial = None
        return released

    def deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """Pass deltas on to their receivers. A receiver gets all its deltas in one call, so that it
        can merge those of several steps.
        """
        arrived: dict[str, list[TokenDelta]] = {}
        for delta in deltas:
            arrived.setdefault(delta.request_id, []).append(delta)
        for request_id, own in arrived.items():
            # Deltas that arrive after their request has ended have no receiver.
            opened = self._requests.get(request_id)
            if opened is None:
                self._note_end(own)
                continue
            if self._max_revivals:
                for delta in own:
                    opened.record(delta)
            opened.receiver.deliver(*own)
            if opened is self._on_trial and opened.has_progress:
                self._next_trial()

    def _note_end(self, deltas: Iterable[TokenDelta]) -> None:
        """Keep the timelines of a request whose client left."""
        for delta in deltas:
            notes = self._left.get(delta.request_id)
            if notes is not None and delta.timeline is not None:
                notes.add_timeline(delta.timeline)

    def drop(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it. Unknown ids are ignored."""
        opened = self._requests.get(request_id)
        if opened is None:
            return
        if choice is not None:
            opened.choices.pop(choice, None)
            return
        del self._requests[request_id]
        opened.stop_waiting()
        if opened is self._on_trial:
            self._next_trial()

    def leave(self, request_id: str, notes: RequestNotes) -> None:
        """The client of a request left. Its timelines are still added to `notes`."""
        self._left[request_id] = notes
        while len(self._left) > MAX_LEFT:
            self._left.popitem(last=False)

    def num_left(self, request_id: str, choice: int) -> int | None:
        """How many tokens a choice may still get. None if that is not known."""
        opened = self._requests.get(request_id)
        return None if opened is None else opened.num_left(choice)

    def num_revivals(self, request_id: str) -> int:
        opened = self._requests.get(request_id)
        return 0 if opened is None else opened.num_revivals

    def fail(self, error: EngineError) -> None:
        """End every request with an error."""
        for opened in list(self._requests.values()):
            self._end(opened, error)

    def interrupt(self, error: EngineError) -> None:
        """The engine died. Requests that can't be revived end: with `error`, or with one that says
        that the request caused the deaths.
        """
        self._send = None
        accused, self._on_trial = self._on_trial, None
        self._held.clear()
        # A request without open choices has its whole answer, which its client has not read yet.
        open_here = [opened for opened in self._requests.values() if opened.choices]
        inside = [opened for opened in open_here if opened.is_in_engine]
        if len(inside) == 1:
            accused = inside[0]
        for opened in inside:
            opened.interrupt()
            if opened is accused and opened.num_strikes >= SUSPECT_STRIKES:
                log.error("request %s ends, because its engine died", opened.request.request_id)
                self._end(opened, InferenceError("The engine died each time it ran this request."))
            elif opened.num_revivals > self._max_revivals:
                self._end(opened, error)
            elif _is_suspect(opened):
                self._await_engine(opened)
            else:
                self._rehome(opened)

    def revive(self, send: Send) -> None:
        """A new engine is ready. Submit the requests of the old one again."""
        self._send = send
        waiting = [opened for opened in self._requests.values() if not opened.is_in_engine]
        if not waiting:
            return
        log.warning("%d requests continue in the new engine", len(waiting))
        self._held.extend(sorted(waiting, key=_is_suspect, reverse=True))
        self._next_trial()

    def _next_trial(self) -> None:
        """Submit the next suspect. If there is none, submit all other requests that wait."""
        self._on_trial = None
        while self._held and self._send is not None:
            opened = self._held.popleft()
            if opened.request.request_id not in self._requests or not opened.choices:
                continue
            try:
                self._resubmit(opened, self._send)
            except UnavailableError:  # this engine is gone, too, so its death will be reported
                return
            except EngineError as error:  # such as one with too many tokens by now for a message
                self._end(opened, error)
                continue
            if _is_suspect(opened):
                self._on_trial = opened
                return

    def _resubmit(self, opened: OpenRequest, send: Send) -> None:
        send(opened.resumed())
        opened.stop_waiting()
        self.num_revived += opened.has_begun
        opened.is_in_engine = opened.has_begun = True

    def _rehome(self, opened: OpenRequest) -> None:
        """Continue a request on another replica, or else in the next engine here."""
        if self._move(opened):
            self._requests.pop(opened.request.request_id, None)
        else:
            self._requests[opened.request.request_id] = opened
            self._await_engine(opened)

    def _await_engine(self, opened: OpenRequest) -> None:
        if math.isfinite(seconds := opened.seconds_to_wait):
            loop = asyncio.get_running_loop()
            opened.expiry = loop.call_later(seconds, self._expire, opened)

    def _expire(self, opened: OpenRequest) -> None:
        if opened.seconds_left == 0.0:
            limit = "The request's time limit passed before it was done."
            self._end(opened, RequestTimeoutError(limit))
        else:
            self._end(opened, UnavailableError("The engine could not be restarted in time."))

    def _end(self, opened: OpenRequest, error: EngineError) -> None:
        self._requests.pop(opened.request.request_id, None)
        opened.stop_waiting()
        opened.receiver.deliver(error)


def _is_suspect(opened: OpenRequest) -> bool:
    return opened.num_strikes >= SUSPECT_STRIKES
