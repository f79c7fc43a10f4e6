"""Keeps what each open request needs to continue in a new engine after its engine died.

A revived request is submitted with the tokens that it has generated so far. The new engine computes
them again, as after a preemption, and samples the next one. All other state of the output, such as
text that may become a stop string, is in the frontend and is not affected.

A request may be the cause of the deaths. It is a suspect if its engine died twice without any new
token of this request in between. Suspects are submitted first, each when the one before has
generated a token. A suspect at whose turn the engine dies again ends with an error.
"""

import asyncio
import logging
import secrets
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec.structs import replace

from engine.core.errors import EngineError, InferenceError, RequestTimeoutError, UnavailableError
from engine.core.interfaces.request import GenerateRequest, Resumed, TokenDelta
from engine.core.interfaces.timeline import RequestNotes

log = logging.getLogger(__name__)

# A request that has waited this many seconds for a new engine ends with an error. The time is
# longer than the pause after too many deaths.
MAX_WAIT_S = 120.0
SUSPECT_STRIKES = 2
MAX_LEFT = 64

Send = Callable[[GenerateRequest], None]


class Receiver(Protocol):
    """Receives the deltas of a request, or the error that ends it."""

    def deliver(self, *items: TokenDelta | EngineError) -> None: ...


class OpenRequest:
    """A request that has not ended, and the tokens that it has generated."""

    def __init__(self, request: GenerateRequest, receiver: Receiver) -> None:
        self.request = request
        self.receiver = receiver
        # The tokens of each choice that has not ended
        self.choices = {choice: array("i") for choice in range(request.params.n)}
        self._surprise_limits: dict[int, float] = {}
        self._submitted_at = time.monotonic()
        self.is_in_engine = True
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

    def interrupt(self) -> None:
        """The engine that computed this request died."""
        self.is_in_engine = False
        self.num_strikes = 1 if self.has_progress else self.num_strikes + 1
        self.num_revivals += 1
        self.has_progress = False

    @property
    def seconds_left(self) -> float | None:
        limit = self.request.timeout_s
        return None if limit is None else max(0.0, limit - time.monotonic() + self._submitted_at)

    def resumed(self) -> GenerateRequest:
        """The request as the new engine gets it."""
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
    again. With 0, all of them end with an error when the engine dies.
    """

    def __init__(self, max_revivals: int) -> None:
        self._max_revivals = max_revivals
        self._requests: dict[str, OpenRequest] = {}
        self._send: Send | None = None  # None while no engine runs
        self._on_trial: OpenRequest | None = None
        self._held: deque[OpenRequest] = deque()  # requests that wait for the end of the trials
        self.num_revived = 0
        # The notes of requests whose clients left lately. Their last deltas are still to come.
        self._left: OrderedDict[str, RequestNotes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, request: GenerateRequest, receiver: Receiver, send: Send) -> None:
        assert request.request_id not in self._requests, "two requests have one id"
        if self._max_revivals and request.params.seed is None:
            # A revived request must continue with the same random numbers.
            params = replace(request.params, seed=secrets.randbits(62))
            request = replace(request, params=params)
        send(request)
        self._requests[request.request_id] = OpenRequest(request, receiver)

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
        inside = [opened for opened in self._requests.values() if opened.is_in_engine]
        if len(inside) == 1:
            accused = inside[0]
        for opened in inside:
            opened.interrupt()
            if opened is accused and opened.num_strikes >= SUSPECT_STRIKES:
                log.error("request %s ends, because its engine died", opened.request.request_id)
                self._end(opened, InferenceError("The engine died each time it ran this request."))
            elif opened.num_revivals > self._max_revivals:
                self._end(opened, error)
            else:
                self._await_engine(opened)

    def revive(self, send: Send) -> None:
        """A new engine is ready. Submit the requests of the old one again."""
        self._send = send
        waiting = [opened for opened in self._requests.values() if not opened.is_in_engine]
        if not waiting:
            return
        log.warning("%d requests continue in the new engine", len(waiting))
        self.num_revived += len(waiting)
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
                self._send(opened.resumed())
            except UnavailableError:  # this engine is gone, too, so its death will be reported
                return
            opened.stop_waiting()
            opened.is_in_engine = True
            if _is_suspect(opened):
                self._on_trial = opened
                return

    def _await_engine(self, opened: OpenRequest) -> None:
        left = opened.seconds_left
        wait_s = MAX_WAIT_S if left is None else min(left, MAX_WAIT_S)
        loop = asyncio.get_running_loop()
        opened.expiry = loop.call_later(wait_s, self._expire, opened)

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
