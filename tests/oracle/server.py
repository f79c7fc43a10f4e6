"""The frontend of a history: the real link, recovery and generations, over engines that the history
drives, kills, replaces and stops.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.backend import Event, PromptProgress
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
from engine.routing.nodes.pool import NodePool
from tests.oracle.clock import Clock, GivenLoop
from tests.oracle.engines import Engine
from tests.oracle.results import Result

MAX_REVIVALS = 1000
MAX_WAKES = 1000  # of tasks, one after the other, until all wait
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

    @property
    def is_late(self) -> bool:
        """Whether the engine stands still, or the frontend has not read all messages."""
        return bool(self.unread or self.late_turns or self.frozen_turns)

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

    def __init__(
        self, generation: Generation, result: Result, reader: str | None, clock: Clock
    ) -> None:
        self.result, self._generation, self._clock = result, generation, clock
        result.submitted_at = clock.now
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
        self.result.ended_at = self._clock.now

    def _take(self, event: Event) -> None:
        if self.result.first_token_at is None:
            self.result.first_token_at = self._clock.now
        self.result.take(event)

    async def _feed(self) -> None:
        await self._generation.feed(self._take)

    async def _iterate(self) -> None:
        count = 0
        async for event in self._generation:
            self._take(event)
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
    """One link at a time, and the clients. `new_engine` makes the engine of a new process. With
    `has_node`, a node takes a part of the requests.
    """

    def __init__(
        self,
        text: TextModel,
        clock: Clock,
        loop: GivenLoop,
        new_engine: Callable[[], Engine],
        *,
        has_node: bool = False,
    ) -> None:
        self._text, self._clock, self._loop, self._new_engine = text, clock, loop, new_engine
        self._has_node = has_node
        self.clients: list[DrivenClient] = []  # of this server's own engines, the last one runs
        self.nodes: list[DrivenClient] = []  # all that ever joined, the last one is here
        self._own = self._new_own()
        self.link: EngineLink | NodePool = self._own
        self.readings: dict[str, Reading] = {}

    def _new_own(self) -> EngineLink:
        policy = RestartPolicy(max_deaths=MAX_REVIVALS, clock=self._clock)
        connect = functools.partial(self._connect, self.clients)
        return EngineLink(connect, policy, max_revivals=MAX_REVIVALS)

    def _connect(self, clients: list[DrivenClient], on_message: Any, on_exit: Any) -> DrivenClient:
        clients.append(DrivenClient(self._new_engine, on_message, on_exit))
        return clients[-1]

    @property
    def client(self) -> DrivenClient:
        return self.clients[-1]

    @property
    def _running(self) -> list[DrivenClient]:
        return [self.client, *self.nodes[-1:]]

    @property
    def engines(self) -> list[Engine]:
        return [each.engine for each in self._running if each.engine is not None]

    async def open(self) -> None:
        if not self._has_node:
            self.link = self._own
            await self._own.start()
            return
        self.link = pool = NodePool(self._own, "", MAX_REVIVALS)
        await pool.start()
        assert pool.own is not None
        pool.begin(pool.own)
        await self._join(pool)

    async def _join(self, pool: NodePool) -> None:
        """A node joins."""
        connect = functools.partial(self._connect, self.nodes)
        engine = pool.add(f"node {len(self.nodes)}", connect)
        await engine.link.start()
        pool.begin(engine)

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
        reading = Reading(generation, result, features["reader"], self._clock)
        self.readings[request.request_id] = reading
        try:
            self.link.submit(request, generation)
        except EngineError as error:
            result.error, result.message = error.error_code, error.message
            reading.task.cancel()

    async def turn(self) -> None:
        for each in self._running:
            each.turn()
        self._clock.advance(TURN_S)
        await self.settle()

    async def settle(self) -> None:
        """Let the tasks of clients and links run until all of them wait."""
        for _ in range(MAX_WAKES):
            if self._loop.is_idle:
                return
            await asyncio.sleep(0)
        raise AssertionError("the tasks of clients and links never wait")

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is going to happen by itself."""
        is_read = not any(each.is_late for each in self._running)
        return is_read and self.is_done and all(each.is_idle for each in self.engines)

    async def kill(self, num_read: int) -> None:
        """This server's own engine dies, and is restarted."""
        self.client.die(num_read)
        await self.settle()
        self._clock.advance(RESTART_S)
        while self._own.ready is None:
            await asyncio.sleep(0)

    async def lose_node(self, num_read: int) -> None:
        """The node is lost, and another one joins."""
        if isinstance(self.link, NodePool):
            self.nodes[-1].die(num_read)
            await self.settle()
            await self._join(self.link)

    async def swap(self) -> None:
        """New engines take over all requests."""
        old, clients, self._own = self.link, self._running, self._new_own()
        await self.open()
        old.hand_over(self.link)
        for each in clients:
            each.turn()  # what the old engines still send is for nobody
        await old.stop()

    def control(self, action: Any, value: str = "") -> None:
        self.client.send(Control(1, action, value))

    def wake_slow_clients(self) -> None:
        for reading in self.readings.values():
            reading.go_on()

    @property
    def deaths(self) -> list[str]:
        return [each.death for each in (*self.clients, *self.nodes) if each.death]

    @property
    def is_done(self) -> bool:
        return all(each.task.done() for each in self.readings.values())

    async def close(self) -> None:
        for reading in self.readings.values():
            await reading.cancel()
        await self.link.stop()
        await self.settle()
