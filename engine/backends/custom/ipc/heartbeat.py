"""The engine's pulse in shared memory: health is read, never asked for.

The loop notes each of its turns: a counter, the time, whether there was work, and how long a step
may honestly take. Beside it a thread ticks for the process as a whole. The frontend maps the same
bytes, so that a frozen process and a step that never ends are told apart, and from one that is only
slow, without waiting for any of them.
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

# Turns, CLOCK_MONOTONIC of the last in ns, busy, patience in ns; then the process's last tick.
TURN = struct.Struct("<QQQQ")
TICK = struct.Struct("<Q")
NUM_BYTES = TURN.size + TICK.size
# For whoever can't tell how long a step takes: a full batch of prompts on a slow machine.
UNKNOWN_PATIENCE_S = 120.0


class Watched(Protocol):
    """A loop, to whoever looks after it from another thread."""

    @property
    def is_computing(self) -> bool:
        """Whether it may be interrupted where it is."""
        ...

    def describe(self) -> str:
        """What it holds, in a line for the log."""
        ...


class Pulse(Protocol):
    """What a loop tells of itself."""

    def beat(self, busy: bool, patience_s: float) -> None: ...

    def watch(self, loop: Watched) -> None:
        """This is the loop that beats."""
        ...


class NoPulse:
    """Nobody looks."""

    def beat(self, busy: bool, patience_s: float) -> None:
        pass

    def watch(self, loop: Watched) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Vitals:
    """One look at an engine."""

    step_age_s: float | None  # since the last turn while there is work; None when idle
    patience_s: float  # how old a step may honestly become
    silent_s: float | None  # since the process last ticked; None where nothing ticks

    @property
    def is_stalled(self) -> bool:
        return self.step_age_s is not None and self.step_age_s > self.patience_s


class Heartbeat:
    """One side of the pulse; both sides open the same file descriptor."""

    def __init__(self, fileno: int) -> None:
        self._memory = mmap.mmap(fileno, NUM_BYTES)
        self._turns = 0

    def beat(self, busy: bool, patience_s: float = UNKNOWN_PATIENCE_S) -> None:
        self._turns += 1
        patience_ns = int(patience_s * 1e9)
        TURN.pack_into(self._memory, 0, self._turns, time.monotonic_ns(), busy, patience_ns)

    def tick(self) -> None:
        TICK.pack_into(self._memory, TURN.size, time.monotonic_ns())

    def watch(self, loop: Watched) -> None:
        pass  # a pulse alone looks after nobody

    def vitals(self) -> Vitals:
        turns, at_ns, busy, patience_ns = TURN.unpack_from(self._memory, 0)
        (tick_ns,) = TICK.unpack_from(self._memory, TURN.size)
        now_ns = time.monotonic_ns()
        return Vitals(
            step_age_s=max(0, now_ns - at_ns) / 1e9 if turns and busy else None,
            patience_s=patience_ns / 1e9 if turns else UNKNOWN_PATIENCE_S,
            silent_s=max(0, now_ns - tick_ns) / 1e9 if tick_ns else None,
        )


def heartbeat_file() -> IO[bytes]:
    """An unnamed file of the right size, to be mapped by both sides."""
    import tempfile  # the engine's own process never makes one

    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.truncate(NUM_BYTES)
    return file


log = logging.getLogger(__name__)

TICK_S = 0.5
INTERRUPT_SIGNAL = signal.SIGUSR2


class StepInterruptedError(Exception):
    """A step took so long that it can't be honest work."""


class Watchdog:
    """Made by the process's main thread, which also runs the loop: signals are delivered there."""

    def __init__(self, heartbeat: Heartbeat, tick_s: float = TICK_S) -> None:
        self._heartbeat = heartbeat
        self._tick_s = tick_s
        self._loop: Watched | None = None
        self._was_stalled = False
        heartbeat.tick()
        signal.signal(INTERRUPT_SIGNAL, self._interrupt)
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def beat(self, busy: bool, patience_s: float) -> None:
        self._heartbeat.beat(busy, patience_s)

    def watch(self, loop: Watched) -> None:
        self._loop = loop

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._tick_s):
            self._heartbeat.tick()
            is_stalled = self._heartbeat.vitals().is_stalled
            if is_stalled and not self._was_stalled:
                self._report()
                signal.pthread_kill(threading.main_thread().ident or 0, INTERRUPT_SIGNAL)
            self._was_stalled = is_stalled

    def _report(self) -> None:
        state = self._loop.describe() if self._loop is not None else "no loop"
        log.critical("a step does not end; interrupting it (%s)", state)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two of its instructions."""
        if self._loop is not None and self._loop.is_computing:
            raise StepInterruptedError("the step was interrupted")
