"""The engine's heartbeat in shared memory. With it, the frontend can check the engine's health
without sending a message.

In each iteration, the engine loop writes a counter, the time, whether there is work, and the
step timeout, which is the time after which a step counts as hung. A separate thread of the engine
process writes the time twice a second (a tick). The frontend reads the same memory. So it can
distinguish a frozen process, a hung step and a slow step.
"""

import faulthandler
import logging
import mmap
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import IO, Protocol

# The shared memory starts with four integers about the last iteration of the loop: its number, its
# CLOCK_MONOTONIC time in ns, whether there was work, and the step timeout in ns. The fifth integer,
# TICK, is the time of the last tick in ns.
TURN = struct.Struct("<QQQQ")
TICK = struct.Struct("<Q")
NUM_BYTES = TURN.size + TICK.size
# The timeout of steps whose duration cannot be estimated yet. Even a full prefill batch on a slow
# machine takes less time than this.
UNKNOWN_STEP_TIMEOUT_S = 120.0


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


log = logging.getLogger(__name__)

TICK_S = 0.5
INTERRUPT_SIGNAL = signal.SIGUSR2


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
