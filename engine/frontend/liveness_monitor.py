"""Decides from the heartbeat of an engine process when to wake it and when to give it up.

A thread of the engine process ticks twice a second, even while a step computes or the model is
loaded. A process that does not tick is frozen, for example by SIGSTOP. It gets one SIGCONT. If it
stays silent, or is soon silent again, it is given up. So is a process whose step hangs. Seconds in
which a process computed, or waited for a processor, are not counted as silence
(`core/sandbox/silence.py`).
"""

from enum import Enum

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
