"""Bounds how long an engine may load, and how long it may be down until the server says so.

A load has no fixed limit, because a slow disk and a long compilation are no freeze. It ends if the
process and its children do nothing for a quarter of an hour, or if it takes ten times as long as
the longest load so far. A server whose engine is down for longer than its restarts may take is not
alive: `/livez` says so, and whoever supervises the server can start it again.
"""

import time

from engine.core.sandbox.silence import Headway

# Ranks on other machines have ten minutes to join, and the engine does nothing meanwhile.
LOAD_STALLED_S = 900.0
FIRST_LOAD_S = 6 * 3600.0  # nothing is known yet
MIN_LOAD_S = 3600.0
# Seconds for which a restart may make no headway, with the pauses between its attempts. Open
# requests wait for less, and the pause after too many deaths is shorter.
MIN_DOWN_S = 180.0
TIMES_LONGER = 10.0


class Downtime:
    """The loads of an engine, and the time for which the engine is down."""

    def __init__(self) -> None:
        self._longest_s: float | None = None
        self._load_began_at = 0.0
        self._down_at: float | None = None
        self._moving_s = 0.0
        self._headway: Headway | None = None

    def load(self, pid: int) -> None:
        """A process begins to load. What an earlier one did before it ended is no headway."""
        self._load_began_at = time.monotonic()
        self._headway, self._moving_s = Headway(pid), 0.0

    def loaded(self) -> None:
        took_s = time.monotonic() - self._load_began_at
        self._longest_s = max(self._longest_s or 0.0, took_s)
        self._down_at, self._headway = None, None

    def down(self) -> None:
        """An engine that was ready is down."""
        if self._down_at is None:
            self._down_at = time.monotonic()

    def too_long(self) -> str | None:
        """Why the load that is under way must end, in words. None if it may go on."""
        if self._headway is None:
            return None
        self._moving_s += self._headway.look()
        if self._headway.idle_s > LOAD_STALLED_S:
            return f"Nothing was done for {self._headway.idle_s:.0f} s while it loaded."
        took_s = time.monotonic() - self._load_began_at
        return f"It loaded for {took_s:.0f} s." if took_s > self._max_load_s else None

    @property
    def _max_load_s(self) -> float:
        if self._longest_s is None:
            return FIRST_LOAD_S
        return max(MIN_LOAD_S, TIMES_LONGER * self._longest_s)

    @property
    def is_overdue(self) -> bool:
        """Whether a restart takes longer than it may."""
        if self._down_at is None:
            return False
        still_s = time.monotonic() - self._down_at - min(self._moving_s, self._max_load_s)
        return still_s > max(MIN_DOWN_S, TIMES_LONGER * (self._longest_s or 0.0))
