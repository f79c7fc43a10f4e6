"""Carries out a history over HTTP: clients connect, read and leave; engines die or are replaced."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import Control
from engine.servers.http.request_log import RequestRecord
from tests.oracle.histories import Event, History
from tests.oracle.http.reading import Reply, Whole, parse_reply, read_whole
from tests.oracle.http.spellings import Call
from tests.oracle.http.toy_server import Connection, ToyServer

SLOW_BYTES = 700  # that a slow client takes at first, and again with each turn
MAX_WAIT_S = 2.0  # a client that stalls for a minute is cut off


@dataclass
class Asked:
    """A request of a history: its API and body, and who sends it how."""

    name: str  # of the API, as in `spellings.NAMES`
    call: Call
    is_slow: bool = False
    tenant: str | None = None


@dataclass
class Client:
    """One client, with its connection."""

    asked: Asked
    connection: Connection
    has_left: bool = False
    record: RequestRecord | None = None  # what the server knows of it at its end

    @property
    def reply(self) -> Reply | None:
        return parse_reply(bytes(self.connection.received))

    @property
    def whole(self) -> Whole | None:
        reply = self.reply
        return None if reply is None else read_whole(self.asked.name, reply)


@dataclass
class Outcome:
    """What a history left."""

    block_size: int
    clients: dict[int, Client] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


class HttpRun:
    """One history. `asked` has its requests."""

    def __init__(self, server: ToyServer, history: History, asked: list[Asked]) -> None:
        self._server, self._history, self._asked = server, history, asked
        self._name = ""
        self.outcome = Outcome(history.shape["block_size"])

    async def go(self) -> Outcome:
        await self._server.fresh(self._history.shape)
        self._name = f"history-{self._server.num_histories}"
        for event in self._history.events:
            kind, *rest = event
            self.outcome.seen[kind] += 1
            await self._happen(event)
            await self._server.settle()
        await self._finish()
        return self.outcome

    async def _happen(self, event: Event) -> None:
        server = self._server
        match event:
            case ("submit", index):
                self._submit(index)
            case ("turns", count):
                for _ in range(count):
                    await self._turn()
            case ("cancel", index):
                self._leave(index)
            case ("evict", count):
                self._engine.kv.radix.evict(count)
            case ("flush",):
                server.backend.client.send(Control(1, "flush_cache"))
            case ("shrink", count):
                self._engine.shrink(count)
            case ("grow",):
                self._engine.grow()
            case ("fault", point, at):
                await self._strike(Fault(point, at=at))
            case ("memory", at):
                await self._strike(Fault("forward", "memory", at=at))
            case ("kill", num_read):
                await server.kill(num_read)
            case ("swap",):
                await server.swap()
            case ("freeze", turns):
                server.backend.client.frozen_turns = turns
            case ("late", turns):
                server.backend.client.late_turns = turns
            case ("wait", seconds):
                server.clock.advance(min(seconds, MAX_WAIT_S))

    @property
    def _engine(self) -> Any:
        return self._server.backend.engines[-1]

    async def _turn(self) -> None:
        for each in self.outcome.clients.values():
            if each.asked.is_slow and not each.has_left:
                each.connection.read(SLOW_BYTES)
        await self._server.turn()

    async def _strike(self, fault: Fault) -> None:
        with faults.planned(fault):
            await self._turn()

    def _submit(self, index: int) -> None:
        asked = self._asked[index]
        room = SLOW_BYTES if asked.is_slow else None
        call = asked.call
        headers = {**call.headers, "x-request-id": self._request_id(index)}
        connection = self._server.connect("POST", call.path, call.body, headers, room)
        self.outcome.clients[index] = Client(asked, connection)

    def _request_id(self, index: int) -> str:
        return f"{self._name}-{index}"

    def _leave(self, index: int) -> None:
        client = self.outcome.clients.get(index)
        if client is not None and not client.connection.is_closing():
            client.has_left = True
            client.connection.leave()

    async def _finish(self) -> None:
        """Every request ends, and nothing stays held."""
        server, outcome = self._server, self.outcome
        self._engine.grow()
        clients = outcome.clients.values()
        if not await server.finish([each.connection for each in clients]):
            outcome.wrong.append("a request does not end")
            return
        # Steps in flight end, and an idle engine tidies up, unless it stands still.
        for _ in range(3 + server.backend.client.frozen_turns):
            await server.turn()
        engine = self._engine
        if not engine.is_idle:
            outcome.wrong.append("the engine still works when every client has its answer")
        outcome.wrong += engine.problems()
        if server.backend.num_open:
            outcome.wrong.append(f"the frontend keeps {server.backend.num_open} requests open")
        outcome.wrong += [each.death for each in server.backend.clients if each.death]
        history = server.app.state.services.history
        for index, client in outcome.clients.items():
            client.record = await history.find(self._request_id(index), None)
        for each in server.backend.engines:
            outcome.seen["preemptions"] += each.scheduler.num_preemptions
            outcome.seen["hits"] += each.kv.num_hit
