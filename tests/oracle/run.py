"""Carries out a history: its events happen one by one, then everything runs to its end."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from engine.core import faults
from engine.core.faults import Fault
from engine.runtime.speculation.drafts import Speculation
from tests.oracle.asking import Asked, Content
from tests.oracle.clock import Clock, GivenLoop
from tests.oracle.engines import Engine, Storage, Work
from tests.oracle.histories import Event, History
from tests.oracle.level import Level
from tests.oracle.requests import DrawnRequest
from tests.oracle.results import Result
from tests.oracle.server import Reading, Server

MAX_TURNS = 3000
STRANGE_REQUESTS = 2
LAST_TURNS = 3  # steps in flight end, and idle engines tidy up
OVERDUE_TURNS = 3  # after so many turns past its deadline, a request must have ended


@dataclass
class Submitted:
    """A request of a history, and what it gives alone."""

    drawn: DrawnRequest
    content: Content
    asked: Asked
    alone: Result
    at: float | None = None  # when the engine read it
    num_overdue: int = 0  # turns in which it was open after its deadline


@dataclass
class Outcome:
    """What a history left."""

    results: dict[int, Result] = field(default_factory=dict)  # of the requests that were submitted
    cancelled: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)  # how often each kind of thing happened
    num_marked: int = 0  # rows that a fault made not finite
    num_crossed: int = 0  # faults that met a request which makes its own steps fail
    repeats: bool = False  # whether steps were repeated, because they failed
    engines: list[Engine] = field(default_factory=list)
    work: Work = field(default_factory=Work)


class Run:
    """One history of one level."""

    def __init__(
        self,
        level: Level,
        history: History,
        submitted: list[Submitted],
        clock: Clock,
        loop: GivenLoop,
    ) -> None:
        self._level, self._history, self._submitted = level, history, submitted
        self._clock = clock
        self._storage = Storage(history.shape["tiers"], history.shape["policy"], level.redis)
        self._longest = max(map(_longest, submitted))
        has_node = bool(history.shape.get("has_node"))
        self._server = Server(level.text, clock, loop, self._new_engine, has_node=has_node)
        self.outcome = Outcome()

    def _new_engine(self) -> Engine:
        shape = self._history.shape
        engine = Engine(self._level.parts(shape, self._longest), shape, self._storage.tiers())
        self.outcome.engines.append(engine)
        return engine

    async def go(self) -> Outcome:
        shape = self._history.shape
        if shape.get("has_stranger") and shape["tiers"] and shape["sharing"]:
            self._let_stranger_answer()
        await self._server.open()
        for event in self._history.events:
            await self._happen(event)
        await self._finish()
        return self.outcome

    def _let_stranger_answer(self) -> None:
        """A model with other weights computes some requests, and leaves its blocks in the tiers."""
        shape = {**self._history.shape, "weights": 1, "tight": False}
        engine = Engine(self._level.parts(shape, self._longest), shape, self._storage.tiers())
        for each in self._submitted[:STRANGE_REQUESTS]:
            engine.channel.put(each.asked.request)
        while not engine.is_idle:
            engine.turn()

    async def _happen(self, event: Event) -> None:
        kind, *rest = event
        self.outcome.seen[kind] += 1
        await getattr(self, f"_{kind}")(*rest)

    async def _submit(self, index: int) -> None:
        each = self._submitted[index]
        self._server.submit(each.asked.request, each.asked.prepared, each.drawn)
        await self._server.settle()

    async def _turns(self, count: int) -> None:
        for _ in range(count):
            if self._server.is_quiet:
                return
            await self._turn()

    async def _turn(self) -> None:
        is_prompt = not self._server.client.late_turns and not self._server.client.frozen_turns
        await self._server.turn()
        for each, reading in self._open() if is_prompt else ():
            each.at = self._clock.now if each.at is None else each.at
            limit = each.drawn["deadline"]
            if limit is not None and each.drawn["reader"] != "slow" and not reading.task.done():
                each.num_overdue += self._clock.now > each.at + limit

    def _open(self) -> list[tuple[Submitted, Reading]]:
        readings = self._server.readings
        named = [(each, readings.get(each.asked.request.request_id)) for each in self._submitted]
        return [(each, reading) for each, reading in named if reading is not None]

    async def _cancel(self, index: int) -> None:
        reading = self._server.readings.get(f"r{index}")
        if reading is not None and not reading.task.done():
            self.outcome.cancelled.add(index)
            await reading.cancel()

    async def _evict(self, count: int) -> None:
        for engine in self._server.engines:
            engine.kv.radix.evict(count)

    async def _flush(self) -> None:
        self._server.control("flush_cache")

    async def _shrink(self, count: int) -> None:
        for engine in self._server.engines:
            engine.shrink(count)

    async def _grow(self) -> None:
        for engine in self._server.engines:
            engine.grow()

    async def _fault(self, point: str, at: int) -> None:
        await self._strike(Fault(point, at=at))

    async def _memory(self, at: int) -> None:
        await self._strike(Fault("forward", "memory", at=at))

    async def _nan(self, at: int) -> None:
        self.outcome.num_marked += await self._strike(Fault("nonfinite", "mark", at=at))

    async def _strike(self, fault: Fault) -> int:
        with faults.planned(fault) as plan:
            await self._turn()
        if any(each.drawn["poison"] == "crash" for each, _ in self._open()):
            self.outcome.num_crossed += plan.num_strikes
        return plan.num_strikes

    async def _kill(self, num_read: int) -> None:
        await self._server.kill(num_read)

    async def _lose_node(self, num_read: int) -> None:
        await self._server.lose_node(num_read)

    async def _swap(self) -> None:
        await self._server.swap()

    async def _freeze(self, turns: int) -> None:
        self._server.client.frozen_turns = turns

    async def _late(self, turns: int) -> None:
        self._server.client.late_turns = turns

    async def _tier_lost(self) -> None:
        self._storage.lose()

    async def _tier_fails(self, count: int) -> None:
        self._storage.num_failures = count

    async def _load_adapter(self, number: int) -> None:
        if (path := self._level.adapter_path(number)) is not None:
            self._server.control("load_adapter", str(Path(path)))

    async def _wait(self, seconds: float) -> None:
        self._clock.advance(seconds)
        await self._server.settle()

    async def _finish(self) -> None:
        """Without further events, every request ends, and nothing stays held."""
        server, outcome = self._server, self.outcome
        await self._grow()
        for _ in range(MAX_TURNS):
            if server.is_done:
                break
            server.wake_slow_clients()
            await self._turn()
        else:
            open_ids = [name for name, each in server.readings.items() if not each.task.done()]
            outcome.wrong.append(f"no end of {', '.join(open_ids)} after {MAX_TURNS} turns")
        for _ in range(LAST_TURNS + server.client.frozen_turns):
            await self._turn()
        for index in range(len(self._submitted)):
            if (reading := server.readings.get(f"r{index}")) is not None:
                outcome.results[index] = reading.result
        if server.is_done:
            for engine in server.engines:
                outcome.wrong += engine.problems()
                if not engine.is_idle:
                    outcome.wrong.append("an engine still works when every client has its answer")
        if server.link.num_open:
            outcome.wrong.append(f"the frontend keeps {server.link.num_open} requests open")
        outcome.wrong += server.deaths
        await server.close()
        self._storage.close()
        self._count()

    def _count(self) -> None:
        seen = self.outcome.seen
        for engine in self.outcome.engines:
            work = engine.work
            for name, count in vars(work).items():
                setattr(self.outcome.work, name, getattr(self.outcome.work, name) + count)
            seen["loads"] += work.loaded_blocks
            seen["preemptions"] += engine.scheduler.num_preemptions
            seen["hits"] += engine.kv.num_hit
            if (drafts := engine.scheduler.find(Speculation)) is not None:
                seen["accepted"] += drafts.num_accepted
                seen["rejected"] += drafts.num_drafted - drafts.num_accepted
                seen["by_model"] += drafts.num_model_accepted
        for result in self.outcome.results.values():
            seen["revivals"] += result.usage is not None and result.usage.num_revivals


def _longest(each: Submitted) -> int:
    request = each.asked.request
    return len(request.prompt) + (request.params.max_tokens or 0)
