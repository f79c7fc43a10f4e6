"""Carries out a history over HTTP: clients connect, read and leave; engines die or are replaced."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import Control
from engine.core.interp.results import InterpResult
from engine.servers.http.request_log import RequestRecord
from tests.oracle.histories import Event, History
from tests.oracle.http.keys import ADMIN, KEYS, TENANTS
from tests.oracle.http.reading import Reply, Whole, parse_reply, read_values, read_whole
from tests.oracle.http.spellings import Call
from tests.oracle.http.toy_backend import ADAPTERS
from tests.oracle.http.toy_server import Connection, ToyServer

SLOW_BYTES = 700  # that a slow client takes at first, and again with each turn
OVERDUE_TURNS = 4  # in which a request whose time is over is told so
MAX_WAIT_S = 2.0  # a client that stalls for a minute is cut off


@dataclass
class Asked:
    """A request of a history: its API and body, and who sends it how."""

    name: str  # of the API, as in `spellings.NAMES`
    call: Call
    is_slow: bool = False
    tenant: str | None = None
    weights: str = ""  # of the model or adapter by whose name it asks, at that time


@dataclass
class Client:
    """One client, with its connection."""

    asked: Asked
    connection: Connection
    seen_at: float | None = None  # when the engine had read it
    num_overdue: int = 0  # turns in which it was open after its time limit
    has_left: bool = False
    record: RequestRecord | None = None  # what the server knows of it at its end
    read: dict[str, Any] | None = None  # what a stream has read inside the model

    @property
    def reply(self) -> Reply | None:
        return parse_reply(bytes(self.connection.received))

    @property
    def whole(self) -> Whole | None:
        reply = self.reply
        if reply is None:
            return None
        whole = read_whole(self.asked.name, reply)
        return whole if self.read is None else replace(whole, read=self.read)


@dataclass
class Outcome:
    """What a history left."""

    block_size: int
    clients: dict[int, Client] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


def adapter_of(number: int) -> tuple[str, str]:
    """The name and the path of an adapter that an operator loads."""
    return ADAPTERS[number % 2], f"/toy/{ADAPTERS[number // 2 % 2]}"


async def fetch_read(server: ToyServer, client: Client) -> list[str]:
    """Fetch what a stream has read inside the model, which only its tenant may."""
    whole, asked = client.whole, client.asked
    reads = "capture" in asked.call.body.get("interp", {}) and asked.name.endswith(".stream")
    if not reads or client.has_left or whole is None or whole.error is not None:
        return []
    path, found = f"/v1/interp/results/{whole.answer_id}", list[str]()
    for who, key in KEYS.items():
        reply = await server.ask("GET", path, key)
        if (reply.status == 200) != (TENANTS[who] == TENANTS[asked.tenant]):
            found.append(f"{path}: {key} gets {reply.status}")
        elif reply.status == 200:
            client.read = read_values(InterpResult(reply.body).body("float"))
    return found


class HttpRun:
    """One history. `asked` has its requests."""

    def __init__(self, server: ToyServer, history: History, asked: list[Asked]) -> None:
        self._server, self._history, self._asked = server, history, asked
        self._name = ""
        self.outcome = Outcome(history.shape["block_size"])

    async def go(self) -> Outcome:
        await self._server.fresh(self._history.shape)
        if self._history.shape.get("limit_s"):
            self._server.on_turn = self._count_overdue
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
            case ("load_adapter", number):
                await self._load_adapter(*adapter_of(number))
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

    def _count_overdue(self) -> None:
        client, now = self._server.backend.client, self._server.clock.now
        if client.frozen_turns or client.late_turns:
            return
        for each in self.outcome.clients.values():
            each.seen_at = now if each.seen_at is None else each.seen_at
            is_late = now > each.seen_at + self._history.shape["limit_s"]
            each.num_overdue += is_late and not each.connection.is_closing()

    async def _strike(self, fault: Fault) -> None:
        with faults.planned(fault):
            await self._turn()

    async def _load_adapter(self, name: str, path: str) -> None:
        """An operator gives another adapter a name. Requests that have begun keep theirs."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        reply = await self._server.ask("POST", "/v1/load_lora_adapter", ADMIN, body)
        if reply.status != 200:
            self.outcome.wrong.append(f"adapter {name}: {reply.body.decode()}")

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
            if client.num_overdue > OVERDUE_TURNS and not client.asked.is_slow:
                wrong = f"request {index}: it was open for {client.num_overdue} turns too long"
                outcome.wrong.append(wrong)
            client.record = await history.find(self._request_id(index), None)
            outcome.wrong += await fetch_read(server, client)
        for each in server.backend.engines:
            outcome.seen["preemptions"] += each.scheduler.num_preemptions
            outcome.seen["hits"] += each.kv.num_hit
