"""Knows how fast each tier is and whether it works. A failed tier is not used for a while."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.core.interfaces.stats import TierStats
from engine.runtime.budget import CostLine
from engine.runtime.tiers.base import PeerError, Tier
from engine.runtime.tiers.host import HostTier

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
KIB = 1024
USUAL_BYTES_PER_S = 200 * 2**20  # assumed until the first blocks were loaded
# A tier that seems too slow is tried again after this time, with a few blocks.
PROBE_AFTER_S = 30.0


class Breaker:
    """A circuit breaker. After a failure it stays open for a second, then for twice as long each
    time, up to half a minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last attempt failed."""
        return self._retry_at is not None

    @property
    def may_try(self) -> bool:
        return self._retry_at is None or self._clock() >= self._retry_at

    def fail(self) -> None:
        if self._retry_at is not None and self._clock() >= self._retry_at:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._retry_at = self._clock() + self._pause_s

    def succeed(self) -> None:
        self._retry_at = None
        self._pause_s = FIRST_PAUSE_S


class WatchedTier:
    """A tier with its counters and circuit breakers. No method raises because the tier failed.

    If a read has failed, only the writing thread tries the tier again. So no request waits for it.
    """

    def __init__(self, tier: Tier, clock: Callable[[], float] = time.monotonic) -> None:
        self.tier = tier
        self._clock = clock
        self._reading, self._writing = Breaker(clock), Breaker(clock)
        self._load_cost = CostLine()
        self._loaded_at: float | None = None
        self.num_hits = self.num_misses = self.num_bad = self.num_stored = self.num_errors = 0
        self.bytes_loaded = self.bytes_stored = 0
        self.load_s = self.store_s = 0.0
        self.saved_tokens = 0  # prompt tokens that requests need not compute thanks to this tier

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def lends(self) -> bool:
        """Whether reading costs no copy."""
        return isinstance(self.tier, HostTier) and self.tier.lends

    @property
    def is_readable(self) -> bool:
        return not self._reading.is_open

    @property
    def is_writable(self) -> bool:
        return self.tier.takes_blocks and self._writing.may_try

    def load_seconds(self, num_bytes: int) -> float:
        """The expected time to load this many bytes."""
        measured = self._load_cost.at(max(1, num_bytes // KIB))
        return measured or num_bytes / USUAL_BYTES_PER_S

    @property
    def must_probe(self) -> bool:
        """Whether it is not known how fast the tier is now. A tier that is never read because it
        seems slow would seem slow for ever.
        """
        return self._loaded_at is None or self._clock() - self._loaded_at > PROBE_AFTER_S

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps a call that reads. If it raises, the tier is not read until it answers again."""
        try:
            yield
        except PeerError as error:
            self.num_errors += 1
            log.warning("%s", error)
        except Exception as error:
            self._fail(self._reading, "read", error)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Wraps a call that writes. If it raises, the next attempt is made after a pause."""
        try:
            yield
        except Exception as error:
            self._fail(self._writing, "written", error)

    def loaded(self, num_blocks: int, num_bytes: int, num_bad: int, seconds: float) -> None:
        self.num_hits += num_blocks
        self.bytes_loaded += num_bytes
        self.num_bad += num_bad
        self.load_s += seconds
        if num_bytes:
            self._loaded_at = self._clock()
            self._load_cost.add(max(1, num_bytes // KIB), seconds)

    def stored(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        self._writing.succeed()
        self.num_stored += num_blocks
        self.bytes_stored += num_bytes
        self.store_s += seconds

    def tidy_up(self) -> None:
        """Does the tier's own work. A tier that failed to be read counts as working again if this
        succeeds.
        """
        if self._reading.is_open and not self._reading.may_try:
            return
        try:
            self.tier.tidy_up()
        except Exception as error:
            self._fail(self._reading, "used", error)
        else:
            self._reading.succeed()

    def stats(self) -> TierStats:
        return TierStats(
            name=self.name,
            num_blocks=self.tier.num_records,
            num_bytes=self.tier.num_bytes,
            hits=self.num_hits,
            misses=self.num_misses,
            bad=self.num_bad,
            stored=self.num_stored,
            errors=self.num_errors,
            bytes_loaded=self.bytes_loaded,
            bytes_stored=self.bytes_stored,
            load_s=self.load_s,
            store_s=self.store_s,
            saved_tokens=self.saved_tokens,
            is_up=self.is_readable,
        )

    def _fail(self, breaker: Breaker, verb: str, error: Exception) -> None:
        is_known = breaker.is_open
        breaker.fail()
        self.num_errors += 1
        if is_known:
            return  # the log has it already
        # The text of the error may hold an address with a password.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
        log.warning(
            "cache tier %s can't be %s and is left alone for a while: %s",
            self.name,
            verb,
            f"{type(error).__name__} {reason}".strip(),
        )
