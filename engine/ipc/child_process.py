"""Child processes, each in its own process group, and when to restart them.

A child ends when its parent ends: the kernel sends it the parent-death signal, and the pipe to the
parent closes. Killing a child kills its whole process group. `RestartPolicy` decides when to
restart a child and when to give up.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.core.sandbox.processes import KILLED_WITHIN_S

log = logging.getLogger(__name__)


class ChildProcess:
    """One run of a child process that `start_child` started. A restart makes a new object."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def wait(self) -> int:
        """Wait until the child has ended. Returns its exit status."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(0.02)
        return status

    async def stop(self, grace_s: float) -> int:
        """Wait up to `grace_s` for the child to end by itself, then kill its process group. A child
        that waits in the kernel may not end even then. It is left behind, and counts as killed.
        """
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), KILLED_WITHIN_S)
        log.critical("process %d was killed and does not end", self.pid)
        return -signal.SIGKILL

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child, not to its group. No effect if the child has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def resident_bytes(pids: Iterable[int]) -> int:
    """Memory of processes. Those that have ended do not count."""
    import psutil  # imported late, because a start does not need it

    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


@dataclass
class RestartPolicy:
    """Exponential backoff with an upper limit and jitter. Gives up when the child has died
    `max_deaths` times within `window_s`.
    """

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    _deaths: deque[float] = field(default_factory=deque)

    def delay_after_death(self) -> float | None:
        """Record a death. Returns the seconds to wait before the next start, or None if the child
        died too often.
        """
        now = self.clock()
        self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - self.window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self.max_deaths:
            return None
        delay: float = self.first_delay_s * 2 ** (len(self._deaths) - 1)
        return min(self.max_delay_s, delay) * random.uniform(0.8, 1.2)
