"""Signs of life: what our processes show, why they stop, and what their supervisor does then.

**Heartbeat.** In each iteration, an engine loop writes a counter, the time, whether there is work,
and the step timeout, which is the time after which a step counts as hung, to shared memory. A
separate thread writes the time twice a second (a tick), even while a step computes or the model is
loaded. The frontend reads the same memory, without sending a message. So it can distinguish a
frozen process, a hung step and a slow step.

**Silence.** If the ticks stop, the clock alone does not tell why. A process that was stopped, or
that sleeps, is frozen. One that uses a processor is alive, and may use some seconds of it without a
sign. One that is ready to run and gets no processor waits for the machine, and no second of that
counts. Nor do seconds in which the process that watches was held up itself.

**Verdict.** A frozen process gets one SIGCONT. If it stays silent, or is soon silent again, it is
given up. So is a process whose step hangs. A load has no fixed limit, because a slow disk and a
long compilation are no freeze. It ends if the process and its children do nothing for a quarter of
an hour, or if it takes ten times as long as the longest load so far. A server whose engine is down
for longer than its restarts may take is not alive: `/livez` says so, and whoever supervises the
server can start it again.
"""

import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

log = logging.getLogger(__name__)

# The shared memory starts with four integers about the last iteration of the loop: its number, its
# CLOCK_MONOTONIC time in ns, whether there was work, and the step timeout in ns. The fifth integer,
# TICK, is the time of the last tick in ns.
TURN = struct.Struct("<QQQQ")
TICK = struct.Struct("<Q")
NUM_BYTES = TURN.size + TICK.size
# The timeout of steps whose duration cannot be estimated yet. Even a full prefill batch on a slow
# machine takes less time than this.
UNKNOWN_STEP_TIMEOUT_S = 120.0
TICK_S = 0.5
INTERRUPT_SIGNAL = signal.SIGUSR2

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
# How often a process that loads is looked at, with its children, and how much processor time they
# use in between if they do anything. The thread that shows signs of life uses less.
HEADWAY_S = 5.0
HEADWAY_CPU_S = 0.03

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


class Watched(Protocol):
    """An engine loop that a watchdog thread observes."""

    @property
    def is_computing(self) -> bool:
        """Whether the loop is inside a model computation, which the watchdog may interrupt."""
        ...

    def describe(self) -> str:
        """The loop's state as a line for the log."""
        ...


class Pulse(Protocol):
    """The interface through which an engine loop reports its progress."""

    def beat(self, busy: bool, step_timeout_s: float) -> None: ...

    def watch(self, loop: Watched) -> None:
        """Set the engine loop that a watchdog may observe and interrupt."""
        ...


class NoPulse:
    """A `Pulse` that ignores all reports."""

    def beat(self, busy: bool, step_timeout_s: float) -> None:
        pass

    def watch(self, loop: Watched) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Vitals:
    """One reading of an engine's heartbeat."""

    # Seconds since the last iteration of the loop. None if the loop has no work.
    step_age_s: float | None
    step_timeout_s: float  # a step counts as hung after this many seconds
    # Seconds since the last tick, as far as they count: see `Silence`. None if no thread writes
    # ticks.
    silent_s: float | None
    cause: str = ""  # why the process is silent, in words, if that is known

    @property
    def is_stalled(self) -> bool:
        return self.step_age_s is not None and self.step_age_s > self.step_timeout_s


class Heartbeat:
    """The heartbeat in shared memory. The frontend and the engine process each have such an object,
    and both objects map the same file.
    """

    def __init__(self, fileno: int) -> None:
        self._memory = mmap.mmap(fileno, NUM_BYTES)
        self._turns = 0

    def beat(self, busy: bool, step_timeout_s: float = UNKNOWN_STEP_TIMEOUT_S) -> None:
        self._turns += 1
        step_timeout_ns = int(step_timeout_s * 1e9)
        TURN.pack_into(self._memory, 0, self._turns, time.monotonic_ns(), busy, step_timeout_ns)

    def tick(self) -> None:
        TICK.pack_into(self._memory, TURN.size, time.monotonic_ns())

    def watch(self, loop: Watched) -> None:
        pass  # the heartbeat alone does not observe the loop; a `Watchdog` does

    @property
    def has_begun(self) -> bool:
        """Whether the loop runs. Before that, the engine loads its model."""
        return bool(TURN.unpack_from(self._memory, 0)[0])

    def vitals(self) -> Vitals:
        turns, at_ns, busy, step_timeout_ns = TURN.unpack_from(self._memory, 0)
        (tick_ns,) = TICK.unpack_from(self._memory, TURN.size)
        now_ns = time.monotonic_ns()
        return Vitals(
            step_age_s=max(0, now_ns - at_ns) / 1e9 if turns and busy else None,
            step_timeout_s=step_timeout_ns / 1e9 if turns else UNKNOWN_STEP_TIMEOUT_S,
            silent_s=max(0, now_ns - tick_ns) / 1e9 if tick_ns else None,
        )


def heartbeat_file() -> IO[bytes]:
    """An unnamed file of the size of a heartbeat. The frontend and the engine process map it."""
    import tempfile  # not needed in the engine process

    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.truncate(NUM_BYTES)
    return file


class StepInterruptedError(Exception):
    """A step ran longer than its timeout, and the watchdog interrupted it."""


class Watchdog:
    """A thread of the engine process that writes the ticks, and interrupts a hung step with a
    signal.

    Python runs signal handlers in the main thread. So the main thread must create the watchdog and
    also run the loop.
    """

    def __init__(self, heartbeat: Heartbeat, tick_s: float = TICK_S) -> None:
        self._heartbeat = heartbeat
        self._tick_s = tick_s
        self._loop: Watched | None = None
        self._was_stalled = False
        heartbeat.tick()
        signal.signal(INTERRUPT_SIGNAL, self._interrupt)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def beat(self, busy: bool, step_timeout_s: float) -> None:
        self._heartbeat.beat(busy, step_timeout_s)

    def watch(self, loop: Watched) -> None:
        self._loop = loop

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._tick_s):
            self._heartbeat.tick()
            is_stalled = self._heartbeat.vitals().is_stalled
            if is_stalled and not self._was_stalled:
                try:
                    self._report()
                except Exception:  # the loop may change its state meanwhile; the step still hangs
                    log.exception("what the loop does can't be told")
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)
            self._was_stalled = is_stalled

    def _report(self) -> None:
        state = self._loop.describe() if self._loop is not None else "no loop"
        log.critical("a step does not end; interrupting it (%s)", state)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It runs in the main thread, between two bytecode instructions."""
        if self._loop is not None and self._loop.is_computing:
            raise StepInterruptedError("the step was interrupted")


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
