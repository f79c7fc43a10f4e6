"""A `Replica` is one running backend of the router, with its availability and recent results."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import psutil

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError
from engine.core.interfaces.backend import Health, ModelCard, UsageEvent
from engine.core.interfaces.stats import EngineStats
from engine.ipc.child_process import resident_bytes
from engine.routing.monotonic_stats import MonotonicStats, summed
from engine.routing.prefixes import SeenPrefixes

log = logging.getLogger(__name__)

CONSECUTIVE_FAILURES = 3
WINDOW = 20  # number of recent requests whose failure share is computed
MIN_IN_WINDOW = 10
MAX_FAILURE_SHARE = 0.5
FIRST_EJECTION_S = 1.0
MAX_EJECTION_S = 60.0
MAX_DOUBLINGS = 10
# Each further ejection of a backend lasts twice as long. If the backend has then worked for this
# many seconds, its next ejection lasts FIRST_EJECTION_S again.
FORGIVEN_AFTER_S = 60.0


@dataclass
class Outlier:
    """Counts failures of one backend, and ejects it if it fails too often. An ejected backend gets
    no requests for some time. Then one request probes it.
    """

    clock: Callable[[], float] = time.monotonic
    num_ejections: int = 0  # ejections in total
    _in_a_row: int = 0  # consecutive ejections
    _consecutive: int = 0  # consecutive failures
    # one entry per recent request; True means that it failed
    _window: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _out_until: float | None = None  # time at which the ejection ends; None if not ejected
    _returned_at: float = float("-inf")
    _is_probed: bool = False

    @property
    def is_out(self) -> bool:
        """Whether the backend is ejected and gets no requests yet."""
        return self._out_until is not None and self.clock() < self._out_until

    @property
    def wants_probe(self) -> bool:
        """Whether the ejection time is over and no request is probing the backend yet."""
        return self._out_until is not None and not self.is_out and not self._is_probed

    @property
    def is_ejected(self) -> bool:
        """Whether the backend is ejected. This includes the time until a probe has succeeded."""
        return self._out_until is not None

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._out_until is None else max(0.0, self._out_until - self.clock())

    def begin(self) -> None:
        """Record that a request is sent to the backend."""
        if self._out_until is not None:
            self._is_probed = True

    def abandon(self) -> None:
        """Record the end of a request that does not show whether the backend works, such as an
        aborted one.
        """
        self._is_probed = False

    def reset_failures(self) -> None:
        """Forget all failures, because the backend was down and reports that it is ready again."""
        self._out_until = None
        self._is_probed = False
        self._consecutive = 0
        self._window.clear()

    def succeed(self) -> None:
        self._consecutive = 0
        self._is_probed = False
        if self._out_until is not None:
            self._out_until = None
            self._returned_at = self.clock()
            self._window.clear()
        self._window.append(False)

    def fail(self, may_eject: bool) -> bool:
        """Record a failed request. Returns whether the backend is now ejected because of it."""
        was_probed, self._is_probed = self._is_probed, False
        self._consecutive += 1
        self._window.append(True)
        if not may_eject or self.is_out:
            return False
        if was_probed or self._consecutive >= CONSECUTIVE_FAILURES or self._fails_often():
            self._eject()
            return True
        return False

    def _fails_often(self) -> bool:
        count = len(self._window)
        return count >= MIN_IN_WINDOW and sum(self._window) > MAX_FAILURE_SHARE * count

    def _eject(self) -> None:
        now = self.clock()
        if self._out_until is None and now - self._returned_at > FORGIVEN_AFTER_S:
            self._in_a_row = 0
        self.num_ejections += 1
        self._in_a_row = min(self._in_a_row + 1, MAX_DOUBLINGS)
        self._out_until = now + min(MAX_EJECTION_S, FIRST_EJECTION_S * 2 ** (self._in_a_row - 1))
        self._consecutive = 0
        self._window.clear()


State = Literal["ready", "loading", "ejected", "down"]

NUM_FIRST_TOKENS = 256  # samples for the median time to first token
RATE_WINDOW_S = 10.0


class Replica:
    """A backend with counters of its requests and results."""

    def __init__(
        self,
        name: str,
        kind: str,
        backend: InferenceBackend,
        *,
        max_concurrent: int | None = None,
        tags: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.kind = kind
        self.backend = backend
        self.max_concurrent = max_concurrent
        self.tags = tags
        self.outlier = Outlier(clock)
        self.seen = SeenPrefixes(clock=clock)
        self.has_started = False
        self.in_flight = 0
        self.num_requests = 0
        self.num_failures = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.first_tokens_s: deque[float] = deque(maxlen=NUM_FIRST_TOKENS)
        self._clock = clock
        self._card: ModelCard | None = None
        self._num_restarts = 0
        self._was_ready = True
        self.totals = MonotonicStats()
        self._samples: deque[tuple[float, int]] = deque()

    async def start(self) -> None:
        began = time.monotonic()
        try:
            await self.backend.start()
        except EngineError as error:
            raise type(error)(
                f"backend {self.name}: {error.message}",
                param=error.param,
                code=error.error_code,
                retry_after=error.retry_after,
            ) from error
        self.has_started = True
        log.info("backend %s is ready after %.1f s", self.name, time.monotonic() - began)

    @property
    def is_full(self) -> bool:
        return self.max_concurrent is not None and self.in_flight >= self.max_concurrent

    def health(self) -> Health:
        """The status that the backend reports. If it has restarted, the estimate of its cache is
        cleared. If it has become ready again, its failure record is cleared.
        """
        health = self.backend.health()
        if health.ready and not self._was_ready:
            self.outlier.reset_failures()
        self._was_ready = health.ready
        if health.num_restarts != self._num_restarts:
            self._num_restarts = health.num_restarts
            self.seen.clear()
        return health

    def state(self, health: Health) -> State:
        if not health.ready:
            return "down" if self.has_started else "loading"
        return "ejected" if self.outlier.is_ejected else "ready"

    def card(self) -> ModelCard | None:
        """The last known model card of the backend. None if it has not reported one yet."""
        cards = self.backend.models()
        if cards:
            self._card = cards[0]
        return self._card

    def take(self) -> None:
        self.in_flight += 1
        self.num_requests += 1
        self.outlier.begin()

    def release(self) -> None:
        self.in_flight -= 1
        assert self.in_flight >= 0, self.name

    def add_usage(self, usage: UsageEvent) -> None:
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens

    @property
    def first_token_p50_s(self) -> float | None:
        return median(self.first_tokens_s) if self.first_tokens_s else None

    @property
    def prefix_hit_rate(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the last `RATE_WINDOW_S`."""
        if not self._samples:
            return 0.0
        began, count = self._samples[0]
        return (self.generated_tokens - count) / max(self._clock() - began, 1.0)

    def tick(self) -> None:
        """Update health, throughput and cache size. Called about once a second."""
        self.health()
        now = self._clock()
        self._samples.append((now, self.generated_tokens))
        while self._samples[0][0] < now - RATE_WINDOW_S:
            self._samples.popleft()
        self.seen.forget_old()
        stats = self.stats()
        if stats is not None and stats.num_blocks:
            self.seen.resize(stats.num_blocks * stats.block_size)

    def stats(self) -> EngineStats | None:
        """The backend's statistics, with totals that continue across engine restarts."""
        stats = self.backend.stats()
        if stats is None:
            return None
        return self.totals.update(stats)


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that serves a model, and its weight for this model."""

    replica: Replica
    weight: float

    @property
    def load(self) -> float:
        return self.replica.in_flight / self.weight


def tree_bytes() -> int:
    """Memory of this process and its children."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return resident_bytes([os.getpid(), *(child.pid for child in children)])


def combined_health(replicas: list[Replica], is_ready: bool) -> Health:
    """The health of several replicas. `detail` says what troubles each of them."""
    states = [(replica, replica.health()) for replica in replicas]
    troubled = [f"{each.name}: {health.detail}" for each, health in states if not health.ready]
    ages = [health.step_age_s for _, health in states if health.step_age_s is not None]
    return Health(
        ready=is_ready,
        detail=" ".join(troubled) or "ready",
        step_age_s=max(ages, default=None),
        num_restarts=sum(health.num_restarts for _, health in states),
        num_revived=sum(health.num_revived for _, health in states),
        alive=not states or any(health.alive for _, health in states),
    )


def sum_stats(replicas: list[Replica]) -> EngineStats | None:
    """The sum of all replicas' statistics. Totals never become smaller. None if no replica reports
    statistics.
    """
    told = [stats for each in replicas if (stats := each.stats()) is not None]
    return summed(told, [each.totals for each in replicas])
