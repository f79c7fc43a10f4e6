"""Tells why a process is silent: it is frozen, it computes, or the machine gives it no processor.

Processes that are watched show a sign of life from time to time. If the signs stop, the clock alone
does not tell why. A process that was stopped, or that sleeps, is frozen. One that uses a processor
is alive, and may use some seconds of it without a sign. One that is ready to run and gets no
processor waits for the machine, and no second of that counts. Nor do seconds in which the process
that watches was held up itself.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

# A process that was silent for less than this is not looked at. The signs come twice a second.
QUIET_S = 1.0
# A process is busy if it uses at least this share of a processor. Threads that wait for Python's
# lock use less, even if nobody will ever release it.
BUSY_SHARE = 0.05
# Seconds of processor time that a process may use without a sign. No request makes an engine hold
# Python's lock for nearly that long.
BUSY_ALLOWED_S = 20.0
# Seconds for which a process that loads may sleep without a sign. A driver, or a slow disk, may
# hold Python's lock meanwhile.
LOADING_ALLOWED_S = 60.0
# More than that between two looks is the fault of the process that looks.
MAX_LOOK_S = 1.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Activity:
    """What the system says about a process."""

    cpu_s: float  # processor time of all its threads so far
    is_stopped: bool = False  # by a signal or a debugger
    wants_processor: bool = False  # a thread runs, or is ready to run
    awaits_disk: bool = False  # a thread waits in the kernel and can't be interrupted


def activity_of(pid: int) -> Activity | None:
    """None if the process has ended."""
    return _linux_activity(pid) if sys.platform == "linux" else _other_activity(pid)


def _linux_activity(pid: int) -> Activity | None:
    try:
        fields = _stat(_PROC / str(pid))
        state, ticks = fields[0], int(fields[11]) + int(fields[12])
        states = {state}
        if state not in "RTtZX":
            for task in (_PROC / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError):  # the thread has just ended
                    states.add(_stat(task)[0])
    except OSError:
        return None
    if state in "ZX":
        return None
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return Activity(cpu_s, state in "Tt", "R" in states, "D" in states)


def _stat(folder: Path) -> list[str]:
    """The fields behind the name, which may contain any character."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _other_activity(pid: int) -> Activity | None:
    """Without /proc, it is not known whether a process is ready to run."""
    import psutil  # imported late, because a start does not need it

    try:
        process = psutil.Process(pid)
        times, status = process.cpu_times(), process.status()
    except psutil.Error:
        return None
    is_running = status == psutil.STATUS_RUNNING
    return Activity(times.user + times.system, status == psutil.STATUS_STOPPED, is_running)


class Silence:
    """Counts the seconds for which a process was silent, as far as it was its own fault."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._last: Activity | None = None  # None while the process is not silent
        self._looked_at = 0.0
        self._silent_s = 0.0
        self._stopped_s = self._idle_s = self._busy_s = 0.0

    def counted(self, silent_s: float, is_loading: bool = False) -> float:
        """How much of a silence counts. The process has shown no sign for `silent_s` seconds."""
        if silent_s < self._silent_s or silent_s < QUIET_S:
            self._last = None
        self._silent_s = silent_s
        if silent_s < QUIET_S:
            return silent_s
        self._look(silent_s, time.monotonic())
        idle_s = max(0.0, self._idle_s - (LOADING_ALLOWED_S if is_loading else 0.0))
        return self._stopped_s + idle_s + max(0.0, self._busy_s - BUSY_ALLOWED_S)

    @property
    def cause(self) -> str:
        """A text that says why the process is silent."""
        if self._last is None or self._silent_s < QUIET_S:
            return "it shows signs of life"
        if self._last.is_stopped:
            return "a signal or a debugger has stopped it"
        if self._busy_s > max(self._idle_s, BUSY_ALLOWED_S):
            return f"it computed for {self._busy_s:.0f} s of processor time without a sign"
        if self._last.wants_processor:
            return "it waits for a processor: the machine is starved"
        return "it waits in the kernel" if self._last.awaits_disk else "it sleeps"

    def _look(self, silent_s: float, now: float) -> None:
        seen = activity_of(self._pid)
        if seen is None:
            return  # it has ended, and who started it will notice
        is_first = self._last is None
        used_s = 0.0 if self._last is None else max(0.0, seen.cpu_s - self._last.cpu_s)
        # The first look at a silence comes when it has just begun, unless this process was held up.
        first_s = min(silent_s, QUIET_S + MAX_LOOK_S)
        passed_s = first_s if is_first else min(now - self._looked_at, MAX_LOOK_S)
        if is_first:
            self._stopped_s = self._idle_s = self._busy_s = 0.0
        elif passed_s < MAX_LOOK_S / 10:
            return  # the system counts processor time in steps of 10 ms
        self._last, self._looked_at = seen, now
        if used_s >= BUSY_SHARE * passed_s or seen.wants_processor:
            self._busy_s += min(passed_s, used_s)
        elif seen.is_stopped:
            self._stopped_s += passed_s
        else:
            self._idle_s += passed_s


# How often a process that loads is looked at, with its children, and how much processor time they
# use in between if they do anything. The thread that shows signs of life uses less.
HEADWAY_S = 5.0
HEADWAY_CPU_S = 0.03


class Headway:
    """Measures whether a loading process, or one of its children, makes progress. Its signs of
    life do not show that, because a separate thread gives them.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s = 0.0
        self._looked_at = time.monotonic()
        self.idle_s = 0.0  # seconds since it was last seen to do anything

    def look(self) -> float:
        """Look at the processes, unless that was done just now. Returns the seconds since the last
        look if something was done in them.
        """
        now = time.monotonic()
        if now - self._looked_at < HEADWAY_S:
            return 0.0
        passed_s, self._looked_at = min(now - self._looked_at, 2 * HEADWAY_S), now
        seen = [each for pid in _family(self._pid) if (each := activity_of(pid)) is not None]
        cpu_s = sum(each.cpu_s for each in seen)
        is_moving = any(each.wants_processor or each.awaits_disk for each in seen)
        is_moving = is_moving or abs(cpu_s - self._cpu_s) >= HEADWAY_CPU_S  # or a child has ended
        self._cpu_s = cpu_s
        self.idle_s = 0.0 if is_moving else self.idle_s + passed_s
        return passed_s if is_moving else 0.0


def _family(pid: int) -> list[int]:
    """A process and all processes that it started."""
    import psutil  # imported late, because a start does not need it

    try:
        return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


LOOK_S = 0.2


async def answer_of(work: Awaitable[Result], pid: int, max_idle_s: float) -> Result:
    """Wait for what a process does. Raises `TimeoutError` if the process has been stopped, or has
    slept, for `max_idle_s` seconds, or if it has computed for very long.
    """
    working = asyncio.ensure_future(work)
    began_at, silence = time.monotonic(), Silence(pid)
    try:
        while not working.done():
            await asyncio.wait([working], timeout=min(LOOK_S, max_idle_s))
            if silence.counted(time.monotonic() - began_at) > max_idle_s and not working.done():
                raise TimeoutError
        return working.result()
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([working], timeout=LOOK_S)
