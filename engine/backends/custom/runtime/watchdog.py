"""Looks after the loop from inside the engine's process.

A thread ticks for the process, so that the frontend tells a frozen one from a busy one. When a step
is older than its patience, the thread writes every stack and what the loop holds to the log, once,
and interrupts the computation: the loop then repeats the step in halves. That ends a wait for
something that never comes; a kernel that hangs is ended by the frontend, with the process.
"""

import faulthandler
import logging
import signal
import sys
import threading
from types import FrameType

from engine.backends.custom.runtime.heartbeat import Heartbeat, Watched

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
