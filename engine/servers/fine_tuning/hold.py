"""Holds a training process while requests are open, so that they have the machine for themselves.

The lowest priority alone is not enough: the training process would still use the memory bandwidth
and the caches that the engine needs, and the cores between two steps of the engine. A process that
is stopped (SIGSTOP) uses nothing.
"""

import asyncio
import contextlib
import time

from engine.finetuning.process import TrainerProcess
from engine.servers.serving.admission import Lifecycle

QUIET_S = 0.5  # seconds without requests after which training goes on
POLL_S = 0.1
# While requests are open without a break, training gets a slice now and then. Slices meet far fewer
# than one in a hundred steps of the engine.
SLICE_S, SLICE_EVERY_S = 0.05, 20.0


class Hold:
    """Stops a training process while the server has open requests. `end` ends the watch."""

    def __init__(self, lifecycle: Lifecycle, process: TrainerProcess) -> None:
        self._lifecycle = lifecycle
        self._process = process
        self.is_held = False
        self._task = asyncio.create_task(self._watch())

    async def end(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            await self._lifecycle.busy.wait()
            self._set(True)
            try:
                await self._quiet()
            finally:
                self._set(False)

    def _set(self, is_held: bool) -> None:
        self.is_held = is_held
        if is_held:
            self._process.hold()
        else:
            self._process.go_on()

    async def _quiet(self) -> None:
        """Wait until there were no requests for a while."""
        busy_at = sliced_at = time.monotonic()
        while time.monotonic() - busy_at < QUIET_S:
            await asyncio.sleep(POLL_S)
            if self._lifecycle.busy.is_set():
                busy_at = time.monotonic()
            if time.monotonic() - sliced_at > SLICE_EVERY_S:
                self._set(False)
                await asyncio.sleep(SLICE_S)
                self._set(True)
                sliced_at = time.monotonic()
