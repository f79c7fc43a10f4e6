"""Decides from the heartbeat of an engine process when to wake it and when to give it up. Also
bounds how long an engine may load, and how long it may be down until the server says so.

A thread of the engine process ticks twice a second, even while a step computes or the model is
loaded. A process that does not tick is frozen, for example by SIGSTOP. It gets one SIGCONT. If it
stays silent, or is soon silent again, it is given up. So is a process whose step hangs. Seconds in
which a process computed, or waited for a processor, are not counted as silence
(`core/sandbox/silence.py`).

A load has no fixed limit, because a slow disk and a long compilation are no freeze. It ends if the
process and its children do nothing for a quarter of an hour, or if it takes ten times as long as
the longest load so far. A server whose engine is down for longer than its restarts may take is not
alive: `/livez` says so, and whoever supervises the server can start it again.
"""

import time
from enum import Enum

from engine.core.sandbox.silence import Headway
from engine.ipc.heartbeat import Vitals

# Seconds of silence: after FROZEN_AFTER_S, the engine is reported as unhealthy. After
# WAKE_AFTER_S, its process gets a SIGCONT. After GIVE_UP_AFTER_S, it is given up.
FROZEN_AFTER_S = 3.0
WAKE_AFTER_S = 4.0
GIVE_UP_AFTER_S = 7.0
# A process that has ticked since it was woken, and is silent again within RELAPSE_S, is given up
# after RELAPSED_AFTER_S. Otherwise, whatever stops it again and again would keep its requests
# waiting forever.
RELAPSE_S = 60.0
RELAPSED_AFTER_S = 3.0
# The step timeout is the time after which a step counts as hung and is interrupted. If the step
# still runs after this many times that, the process is given up.
GIVE_UP_TIMEOUTS = 2.0
# This many checks in a row must fail. A single failure may be the frontend's fault, because the
# engine blocks while the frontend does not read its messages.
NUM_BAD_CHECKS = 2
# Ranks on other machines have ten minutes to join, and the engine does nothing meanwhile.
LOAD_STALLED_S = 900.0
FIRST_LOAD_S = 6 * 3600.0  # nothing is known yet
MIN_LOAD_S = 3600.0
# An engine that is restarted may load nothing for this many seconds, pauses between attempts
# included. It is longer than open requests wait, and than the pause after too many deaths.
MIN_DOWN_S = 180.0
TIMES_LONGER = 10.0


class LivenessVerdict(Enum):
    WAIT = 0
    WAKE = 1
    GIVE_UP = 2


class LivenessMonitor:
    """Checks one engine process, again and again."""

    def __init__(self) -> None:
        self._woken_at: float | None = None
        self._is_woken = False  # whether it was woken in this silence
        self._silent_s = 0.0
        self._num_bad = 0

    def check(self, vitals: Vitals, now: float) -> LivenessVerdict:
        """What to do with the process that has these vitals at the time `now`."""
        silent_s = vitals.silent_s or 0.0
        if silent_s < self._silent_s:
            self._is_woken = False  # it has ticked since
        self._silent_s = silent_s
        was_woken = self._woken_at is not None and now - self._woken_at < RELAPSE_S
        is_relapse = was_woken and not self._is_woken
        is_lost = silent_s > (RELAPSED_AFTER_S if is_relapse else GIVE_UP_AFTER_S)
        is_hung = (vitals.step_age_s or 0.0) > GIVE_UP_TIMEOUTS * vitals.step_timeout_s
        self._num_bad = self._num_bad + 1 if is_lost or is_hung else 0
        if self._num_bad == NUM_BAD_CHECKS:
            return LivenessVerdict.GIVE_UP
        if silent_s > WAKE_AFTER_S and not (self._is_woken or is_relapse):
            self._woken_at, self._is_woken = now, True
            return LivenessVerdict.WAKE
        return LivenessVerdict.WAIT


def trouble_of(vitals: Vitals) -> str | None:
    """Why an engine makes no progress, in words. None if it makes progress."""
    if vitals.silent_s is not None and vitals.silent_s > FROZEN_AFTER_S:
        return f"The engine's process does not go on{f': {vitals.cause}' if vitals.cause else ''}."
    return "The engine makes no progress." if vitals.is_stalled else None


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
