"""The frontend of a history: the real link, recovery and generations, over engines that the history
drives, kills, replaces and stops.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.backend import PromptProgress
from engine.core.interfaces.request import (
    Control,
    FromEngine,
    GenerateRequest,
    Ready,
    RequestNotes,
    ToEngine,
)
from engine.core.sandbox.liveness import Vitals
from engine.frontend.engine_link import EngineLink
from engine.frontend.generation import Generation
from engine.frontend.prompts import Prepared
from engine.frontend.text_model import TextModel
from engine.ipc.child_process import RestartPolicy
from engine.ipc.connection import joined
from tests.oracle.clock import Clock
from tests.oracle.engines import Engine
from tests.oracle.results import Result

MAX_REVIVALS = 1000
RESTART_S = 30.0  # longer than any pause before a restart
TURN_S = 0.01
SLOW_EVENTS = 3  # that a slow client reads at a time


class DrivenClient:
    """The connection to one engine, whose process is this one."""

    def __init__(
        self,
        new_engine: Callable[[], Engine],
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._new_engine = new_engine
        self._on_message, self._on_exit = on_message, on_exit
        self.engine: Engine | None = None
        self.unread: list[FromEngine] = []  # what the frontend has not read yet
        self.late_turns = 0  # for so many turns, the frontend reads nothing
        self.frozen_turns = 0
        self.death = ""  # why the process ended by itself

    async def start(self) -> None:
        engine = self.engine = self._new_engine()
        spec, usable = engine.spec, engine.pool.num_usable
        ready = Ready(spec.max_seq_len, usable, spec.block_size, spec.max_slots, "", "cpu", 0.0)
        asyncio.get_running_loop().call_soon(self._on_message, ready)

    def send(self, message: ToEngine) -> None:
        if self.engine is None:
            raise UnavailableError("The engine is restarting; try again.")
        self.engine.channel.put(message)

    def vitals(self) -> Vitals | None:
        return None

    def wake(self) -> None:
        """A history decides itself how long an engine stands still."""

    @property
    def pid(self) -> int:
        return 1

    async def kill(self) -> bool:
        return True

    async def stop(self) -> None:
        self.engine = None

    def turn(self) -> None:
        if self.engine is None:
            return
        if self.frozen_turns:
            self.frozen_turns -= 1
            return
        try:
            self.engine.turn()
        except Exception as error:
            self.engine, self.death = None, f"the engine ended: {type(error).__name__}: {error}"
            self._on_exit(1)
            return
        self.unread += self.engine.channel.take()
        if self.late_turns:
            self.late_turns -= 1
            return
        self._read(len(self.unread))

    def _read(self, count: int) -> None:
        messages, self.unread = self.unread[:count], self.unread[count:]
        for message in joined(messages):
            self._on_message(message)

    def die(self, num_read: int) -> None:
        """The process ends during a turn. The frontend still reads some of its last messages."""
        if self.engine is None:
            return
        self.engine.turn()
        self.unread += self.engine.channel.take()
        self._read(num_read)
        self.engine = None
        self.unread.clear()
        self._on_exit(-9)


class Reading:
    """A client that reads the answer to its request."""

    def __init__(self, generation: Generation, result: Result, reader: str | None) -> None:
        self.result, self._generation = result, generation
        self._gate = asyncio.Event()
        self._is_slow = reader == "slow"
        read = self._feed if reader is None else self._iterate
        self.task = asyncio.get_running_loop().create_task(self._read(read))

    async def _read(self, read: Callable[[], Awaitable[None]]) -> None:
        try:
            await read()
        except EngineError as error:
            self.result.error, self.result.message = error.error_code, error.message
        except Exception as error:
            self.result.error, self.result.message = "BUG", f"{type(error).__name__}: {error}"

    async def _feed(self) -> None:
        await self._generation.feed(self.result.take)

    async def _iterate(self) -> None:
        count = 0
        async for event in self._generation:
            self.result.take(event)
            count += 1
            if self._is_slow and count % SLOW_EVENTS == 0:
                self._gate.clear()
                await self._gate.wait()

    def go_on(self) -> None:
        """A slow client reads again."""
        self._gate.set()

    async def cancel(self) -> None:
        if self.task.done():
            return
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self._generation.aclose()


class Server:
    """One link at a time, and the clients. `new_engine` makes the engine of a new process."""

    def __init__(self, text: TextModel, clock: Clock, new_engine: Callable[[], Engine]) -> None:
        self._text, self._clock, self._new_engine = text, clock, new_engine
        self.clients: list[DrivenClient] = []
        self.link = self._new_link()
        self.readings: dict[str, Reading] = {}
        self.num_deaths = 0

    def _new_link(self) -> EngineLink:
        def make_client(on_message: Any, on_exit: Any) -> DrivenClient:
            self.clients.append(DrivenClient(self._new_engine, on_message, on_exit))
            return self.clients[-1]

        policy = RestartPolicy(max_deaths=MAX_REVIVALS, clock=self._clock)
        return EngineLink(make_client, policy, max_revivals=MAX_REVIVALS)

    @property
    def client(self) -> DrivenClient:
        return self.clients[-1]

    @property
    def engine(self) -> Engine:
        engine = self.client.engine
        assert engine is not None, "no engine runs"
        return engine

    async def open(self) -> None:
        await self.link.start()

    def submit(self, request: GenerateRequest, prepared: Prepared, features: Any) -> None:
        result, notes = Result(), RequestNotes()
        result.timelines = notes.timelines

        def on_progress(progress: PromptProgress) -> None:
            result.progress.append(progress.processed)

        def on_captured(data: bytes) -> None:
            result.captured = data

        def on_wait(waits: bool) -> None:
            result.num_waits += not waits

        told = (on_progress if request.reports_progress else None, notes, on_captured)
        waits = on_wait if request.tells_begin else None
        generation = Generation(request, self._text, prepared, self.link, *told, waits)
        reading = Reading(generation, result, features["reader"])
        self.readings[request.request_id] = reading
        try:
            self.link.submit(request, generation)
        except EngineError as error:
            result.error, result.message = error.error_code, error.message
            reading.task.cancel()

    async def turn(self) -> None:
        self.client.turn()
        self._clock.advance(TURN_S)
        await self.settle(2)

    async def settle(self, count: int = 4) -> None:
        """Let the tasks of clients and links run."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def kill(self, num_read: int) -> None:
        self.num_deaths += 1
        self.client.die(num_read)
        await self.settle()
        self._clock.advance(RESTART_S)
        while self.link.ready is None:
            await asyncio.sleep(0)

    async def swap(self) -> None:
        """A new engine takes over all requests."""
        old, client, self.link = self.link, self.client, self._new_link()
        await self.link.start()
        old.hand_over(self.link)
        client.turn()  # what the old engine still sends is for nobody
        await old.stop()

    def control(self, action: Any, value: str = "") -> None:
        self.client.send(Control(1, action, value))

    def wake_slow_clients(self) -> None:
        for reading in self.readings.values():
            reading.go_on()

    @property
    def deaths(self) -> list[str]:
        return [client.death for client in self.clients if client.death]

    @property
    def is_done(self) -> bool:
        return all(each.task.done() for each in self.readings.values())

    async def close(self) -> None:
        for reading in self.readings.values():
            await reading.cancel()
        await self.link.stop()
        await self.settle()
