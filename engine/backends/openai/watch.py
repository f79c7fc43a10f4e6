"""Tracks whether a server is available, from request results and periodic probes.

A failed connection or a refused key makes it unready at once. Other failures trigger a probe. While
it is unready it is probed more often, at first almost immediately.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
# After this many inconclusive probe failures in a row, the server counts as unready.
MAX_DOUBTS = 2


@dataclass(frozen=True)
class Problem:
    why: str
    is_certain: bool  # the server is surely down: no request can succeed


Probe = Callable[[], Awaitable[Problem | None]]


class Watch:
    """`is_ready` and `detail` can be read at any time."""

    def __init__(self, probe: Probe, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._num_failures = 0
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        self.detail = "not connected yet"

    def start(self) -> None:
        self._set(None)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.is_ready, self.detail = False, "disconnected"

    def succeeded(self) -> None:
        """The server answered."""
        self._num_failures = 0
        if not self.is_ready:
            self._set(None)

    def failed(self, problem: Problem) -> None:
        """A request failed by the server's fault."""
        if problem.is_certain:
            self._set(problem.why)
        self._hurry.set()

    async def _run(self) -> None:
        delay = self._interval_s
        while True:
            if self.is_ready and not self._num_failures:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), delay)
            else:
                await asyncio.sleep(delay)
            self._hurry.clear()
            problem = await self._probe()
            if problem is None:
                self.succeeded()
                delay = self._interval_s
                continue
            self._num_failures += 1
            if problem.is_certain or self._num_failures >= MAX_DOUBTS:
                self._set(problem.why)
            delay = min(self._interval_s, FIRST_RETRY_S * 2 ** min(self._num_failures - 1, 10))

    def _set(self, problem: str | None) -> None:
        was_ready, self.is_ready = self.is_ready, problem is None
        self.detail = problem or "ready"
        if was_ready and problem is not None:
            log.warning("the server is not ready: %s", problem)
        elif not was_ready and problem is None:
            log.info("the server is ready")
