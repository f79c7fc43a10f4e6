"""Keeps a child running: starts it, waits until it is ready, watches it, and restarts it after a
crash.

The first start either succeeds or raises. After a later crash, the child is restarted after a
delay, which grows with the number of crashes. After too many crashes, the child is not restarted
for `CIRCUIT_OPEN_S`, and then tried once more. A child that no longer answers is killed and
restarted too.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from engine.backends.external.child_logs import ChildLog
from engine.backends.external.external_child import ending
from engine.core.errors import EngineError, ModelError
from engine.ipc.child_process import RestartPolicy

log = logging.getLogger(__name__)

# Crashes within this many seconds are counted together. The time is long, because a large model
# takes minutes to load before it can crash again.
DEATHS_WITHIN_S = 900.0
CIRCUIT_OPEN_S = 300.0
# If a probe is unanswered for longer than this when the start times out, the error says that the
# server hangs.
SILENT_AFTER_S = 1.0


class Child(Protocol):
    """One run of the supervised process, such as an `ExternalChild`."""

    ended: asyncio.Future[int]

    def note_processes(self) -> None: ...

    async def stop(self) -> None: ...


class ChildEndpoint(Protocol):
    """What the supervisor needs to know and do about the server that runs in the child."""

    async def problem(self) -> str | None:
        """Why the child is not ready. None if it is ready. Never raises."""
        ...

    async def up(self) -> None:
        """Called once per run, when the child has become ready. Raises if it can't be used."""
        ...

    async def down(self) -> None:
        """Called when the child stops serving. Requests that wait for it must then fail."""
        ...


@dataclass(frozen=True)
class Patience:
    start_timeout_s: float
    probe_interval_s: float = 0.25  # seconds between probes while the child loads
    watch_interval_s: float = 5.0  # seconds between probes while the child is ready
    # A child that has not answered for this long is killed. A busy server may take half a minute to
    # answer a probe.
    hang_after_s: float = 120.0
    circuit_open_s: float = CIRCUIT_OPEN_S


class Supervisor:
    """Keeps one child running. `begin` starts a new run. `name` is used in logs and messages."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], Awaitable[Child]],
        endpoint: ChildEndpoint,
        logs: ChildLog,
        patience: Patience,
        restarts: RestartPolicy | None = None,
    ) -> None:
        self._name = name
        self._begin = begin
        self._endpoint = endpoint
        self._logs = logs
        self._patience = patience
        self._restarts = restarts or RestartPolicy(window_s=DEATHS_WITHIN_S)
        self._state = f"{name} has not been started."
        self._loading_since: float | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._down_at: float | None = None
        self.is_ready = False
        self.num_restarts = 0

    @property
    def detail(self) -> str:
        """The child's state in words. While the child loads, also the elapsed time and the last
        line of its output.
        """
        if self._loading_since is None:
            return self._state
        seconds = time.monotonic() - self._loading_since
        said = f": {self._logs.last_line}" if self._logs.last_line else ""
        return f"{self._name} is loading ({seconds:.0f} s){said}"

    @property
    def is_overdue(self) -> bool:
        """Whether a child that was ready is down for longer than a restart may take, with the pause
        after too many crashes.
        """
        if self._down_at is None:
            return False
        allowed_s = self._patience.start_timeout_s + self._patience.circuit_open_s
        return time.monotonic() - self._down_at > allowed_s

    @property
    def child(self) -> Child | None:
        return self._child

    async def start(self) -> None:
        """Start the child and wait until it is ready. If this fails, end the child and raise."""
        await self._bring_up()
        self._keeping = asyncio.create_task(self._keep_up())

    async def stop(self) -> None:
        """End the child. Idempotent; may also be called during a start."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._take_down(f"{self._name} has been stopped.")

    async def _bring_up(self) -> None:
        self._loading_since = time.monotonic()
        try:
            child = self._child = await self._begin()
            await self._until_ready(child)
        except BaseException as error:
            await self._take_down(f"{self._name} is down: {error}")
            raise
        child.note_processes()
        self._loading_since = None
        self._state, self.is_ready, self._down_at = "ready", True, None

    async def _take_down(self, state: str) -> None:
        self._state, self.is_ready, self._loading_since = state, False, None
        child, self._child = self._child, None
        await self._endpoint.down()
        if child is not None:
            await child.stop()

    async def _until_ready(self, child: Child) -> None:
        problem: str | None = ""
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._patience.start_timeout_s):
                while problem is not None:
                    asked_at = time.monotonic()
                    problem = await self._unless_ended(child, self._endpoint.problem())
                    if problem is not None:
                        await asyncio.wait([child.ended], timeout=self._patience.probe_interval_s)
                await self._unless_ended(child, self._endpoint.up())
        except TimeoutError:
            if problem is None or time.monotonic() - asked_at > SILENT_AFTER_S:
                problem = "it takes connections and does not answer"
            said = f" It said last: {self._logs.last_line}" if self._logs.last_line else ""
            raise ModelError(
                f"{self._name} was not ready after {self._patience.start_timeout_s:g} s"
                f" (start_timeout_s): {problem}.{said}"
            ) from None

    async def _unless_ended(self, child: Child, work: Awaitable[str | None]) -> str | None:
        """The result of `work`. Raises `ModelError` if the child ends first."""
        working = asyncio.ensure_future(work)
        racing: list[asyncio.Future[Any]] = [working, child.ended]
        try:
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if child.ended.done():
                cause = f": {self._logs.cause}" if self._logs.cause else ""
                how = ending(child.ended.result())
                raise ModelError(f"{self._name} ended while loading, with {how}{cause}")
            return await working
        finally:
            working.cancel()
            # Wait for the cancelled work and ignore its errors.
            await asyncio.gather(working, return_exceptions=True)

    async def _keep_up(self) -> None:
        while True:
            assert self._child is not None
            why = await self._until_down(self._child)
            log.error("%s is down: %s", self._name, why)
            self._down_at = time.monotonic()
            await self._take_down(f"{self._name} stopped unexpectedly; it is being restarted.")
            await self._start_again()

    async def _until_down(self, child: Child) -> str:
        """Wait until the child stops serving, and return why. Its process may still run."""
        answered_at = time.monotonic()
        while True:
            await asyncio.wait([child.ended], timeout=self._patience.watch_interval_s)
            if child.ended.done():
                return ending(child.ended.result())
            # This runs in a thread, because it is slow: it reads all processes of the machine.
            await asyncio.to_thread(child.note_processes)
            problem = await self._endpoint.problem()
            if problem is None:
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > self._patience.hang_after_s:
                return f"no answer for {self._patience.hang_after_s:g} s ({problem}); killing it"

    async def _start_again(self) -> None:
        while True:
            delay = self._restarts.delay_after_death()
            if delay is None:
                delay = self._patience.circuit_open_s
                self._state = f"{self._name} died too often; it is tried again in {delay:g} s."
                log.critical("%s", self._state)
            else:
                log.warning("starting %s again in %.1f s", self._name, delay)
            await asyncio.sleep(delay)
            self.num_restarts += 1
            try:
                return await self._bring_up()
            except (EngineError, OSError) as error:
                log.error("%s could not be started again: %s", self._name, error)
