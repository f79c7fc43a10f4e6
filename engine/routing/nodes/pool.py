"""The engines of one model: that of this server, if it has one, and those of its nodes.

A pool takes the place of the link to a single engine. Each request goes to the engine that
`RequestRouter` chooses. If this engine is lost, its open requests move to others: after the tokens
that they have generated, with the same seed. While there is no engine at all, requests wait.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable

from engine.core.errors import EngineError, UnavailableError
from engine.core.interfaces.request import (
    CachedPrefixes,
    ControlReply,
    GenerateRequest,
    Ready,
    RequestNotes,
)
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.frontend.engine_link import EngineLink
from engine.frontend.link import Link
from engine.frontend.request_recovery import OpenRequest, Receiver
from engine.ipc.connection import EngineClient, OnExit, OnMessage
from engine.routing.monotonic_stats import MonotonicStats, summed
from engine.routing.nodes.pooled import PooledEngine
from engine.routing.nodes.prefill import Prefill, Prefills
from engine.routing.nodes.request_router import ChosenEngine, RequestRouter

log = logging.getLogger(__name__)

LOCAL = "local"
MAX_REMEMBERED = 4096  # requests for which the pool remembers the engine
MAX_DECISIONS = 50
NO_ENGINE = "No engine is here yet: start one on any machine with `engine node join`."


class NodePool:
    """Several engines behind one backend. `own` is the engine of this server. `max_revivals` is how
    often a request continues in another engine. `min_prefill_tokens` is for `PrefillCosts`.
    """

    def __init__(
        self,
        own: EngineLink | None,
        fingerprint: str,
        max_revivals: int,
        min_prefill_tokens: int | None = None,
    ) -> None:
        self._max_revivals = max_revivals
        self.move: Callable[[OpenRequest], bool] = lambda opened: False
        self.router = RequestRouter()
        self.engines: dict[str, PooledEngine] = {}
        self.decisions: deque[tuple[str, str, str]] = deque(maxlen=MAX_DECISIONS)
        self._placed: OrderedDict[str, str] = OrderedDict()  # request id -> engine
        # Where requests wait while there is no engine.
        self._lobby = EngineLink(_no_client, None, max_revivals=max_revivals)
        self.prefills = Prefills(self.router, max_revivals, min_prefill_tokens, self._place)
        self._gone = MonotonicStats()  # totals of engines that have left
        self._num_revived = 0
        self._last_ready: Ready | None = None
        self.expected: Ready | None = None  # what the first node will be like
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_stopped = False
        self.own: PooledEngine | None = None
        if own is not None:
            self.move = own.move
            self.own = self._add(PooledEngine(LOCAL, own, fingerprint))

    # --- engines that come and go ---

    def add(self, name: str, connect: Callable[[OnMessage, OnExit], EngineClient]) -> PooledEngine:
        """Add the engine of a node, which is ready. `connect` makes the client."""
        made: list[PooledEngine] = []
        link = EngineLink(
            lambda on_message, on_exit: connect(on_message, lambda status: self.lose(made[0])),
            None,
            max_revivals=self._max_revivals,
        )
        made.append(PooledEngine(name, link, ""))
        return self._add(made[0])

    def _add(self, engine: PooledEngine) -> PooledEngine:
        engine.number = self.router.add(engine)
        engine.link.move = functools.partial(self._rehome, engine)
        engine.link.on_cached = functools.partial(self._on_cached, engine)
        self.engines[engine.name] = engine
        return engine

    def begin(self, engine: PooledEngine) -> None:
        """Send requests to an engine from now on: those that wait, and new ones."""
        self._last_ready = engine.link.ready or self._last_ready
        self.prefills.add(engine)
        self.refresh(engine)
        self._run(self._ask_report(engine.link))
        own = self.own
        waiting = self._lobby.release()
        if own is not None and own is not engine and not own.link.is_up:
            waiting += own.link.release()  # they need not wait for a restart any longer
        for opened in waiting:
            self._place(opened)

    def refresh(self, engine: PooledEngine) -> None:
        """Let the router know whether an engine takes requests."""
        self.router.set_usable(engine.number, engine.state == "ready")

    def drain(self, engine: PooledEngine) -> None:
        """Send no new requests to an engine. Its open requests continue."""
        engine.is_leaving = True
        self.refresh(engine)

    def lose(self, engine: PooledEngine) -> None:
        """An engine of a node is gone. Its open requests move."""
        if self.engines.get(engine.name) is not engine:
            return
        del self.engines[engine.name]
        engine.is_leaving = True  # so that no request moves back to it
        self.router.set_usable(engine.number, False)
        self.prefills.remove(engine)
        if engine.link.stats is not None:
            engine.totals.update(engine.link.stats)
        self._gone.absorb(engine.totals)
        engine.link.lost(f"The node {engine.name} is gone.")
        self._num_revived += engine.link.num_revived
        for opened in engine.link.release():  # those on trial
            self._place(opened)
        self.router.remove(engine.number)

    async def _ask_report(self, link: EngineLink) -> None:
        with contextlib.suppress(EngineError):
            await link.control("report_cache")

    def _on_cached(self, engine: PooledEngine, news: CachedPrefixes) -> None:
        if engine.name in self.engines:
            self.router.update_routing_table(engine.number, news)

    # --- requests ---

    def submit(self, request: GenerateRequest, receiver: Receiver) -> None:
        choice = self._choose(request)
        if choice is None:
            if not self.accepts:
                raise UnavailableError(self.detail, retry_after=2.0)
            self._lobby.hold(request, receiver)
            return
        engine, why = choice
        if self.prefills.nodes and (node := self.prefills.begin(request, receiver, engine)):
            self.decisions.append((request.request_id, node, "it computes the prompt"))
            return
        receiver.engine = engine.link
        self._note(request.request_id, engine, why)
        engine.link.submit(request, receiver)

    def take_over(self, opened: OpenRequest) -> None:
        self._place(opened)

    def release(self) -> list[OpenRequest]:
        held = self.prefills.release()
        links = [each.link for each in self.engines.values()]
        released = [opened for link in (*links, self._lobby) for opened in link.release()]
        return held + [each for each in released if not isinstance(each.receiver, Prefill)]

    def hand_over(self, successor: Link) -> int:
        released = self.release()
        for opened in released:
            successor.take_over(opened)
        return len(released)

    def _choose(self, request: GenerateRequest, among: int = -1) -> tuple[PooledEngine, str] | None:
        if self.own is not None:
            self._look_at(self.own)
        choice = self._route(request, among)
        if choice is None:
            own = self.own  # it may be on its way back
            return None if own is None or not own.link.accepts else (own, "no other is here")
        return self._by_number(choice.engine), choice.why

    def _route(self, request: GenerateRequest, among: int) -> ChosenEngine | None:
        """Choose an engine. A whole request goes to a prefill node only if no other is here. Only
        this server's own engine has the files of adapters.
        """
        if request.adapter is not None:
            among &= 0 if self.own is None else 1 << self.own.number
        nodes = self.prefills.nodes
        found = self.router.route_request(request, among & ~nodes)
        if found is None and nodes:
            return self.router.route_request(request, among & nodes)
        return found

    def _look_at(self, own: PooledEngine) -> None:
        """Check whether this server's own engine died or is back. It does not notify the pool."""
        self.refresh(own)
        if own.link.is_up and own.num_restarts != own.link.num_restarts:
            own.num_restarts = own.link.num_restarts
            self.router.update_routing_table(own.number, CachedPrefixes(is_all=True))
            self._run(self._ask_report(own.link))

    def _by_number(self, number: int) -> PooledEngine:
        engine = self.router.engine(number)
        assert isinstance(engine, PooledEngine)
        return engine

    def _rehome(self, lost: PooledEngine, opened: OpenRequest) -> bool:
        """Continue a request of an engine that died. Returns False if it waits for a restart of
        this server's own engine.
        """
        if isinstance(opened.receiver, Prefill):
            self.prefills.end(opened.receiver, "lost")
            return True
        same = self._same_as(lost)
        found = (self._choose_other(opened, lost, same) if same else None) or self._choose_other(
            opened, lost, -1
        )
        if found is None:
            if self.move(opened):
                return True
            if lost is not self.own:
                self._lobby.take_over(opened)
            return lost is not self.own
        self._give(opened, found, f"{lost.name} was lost")
        return True

    def _same_as(self, lost: PooledEngine) -> int:
        alike = (each for each in self.engines.values() if each.fingerprint == lost.fingerprint)
        return sum(1 << each.number for each in alike)

    def _choose_other(
        self, opened: OpenRequest, lost: PooledEngine, among: int
    ) -> PooledEngine | None:
        choice = self._route(opened.request, among & ~(1 << lost.number))
        return None if choice is None else self._by_number(choice.engine)

    def _place(self, opened: OpenRequest, why: str = "it waited for an engine") -> None:
        if isinstance(opened.receiver, Prefill):
            self.prefills.end(opened.receiver, "lost")
            return
        found = self._choose(opened.request)
        if found is None:
            self._lobby.take_over(opened)
        else:
            self._give(opened, found[0], why)

    def _give(self, opened: OpenRequest, engine: PooledEngine, why: str) -> None:
        self._note(opened.request.request_id, engine, why)
        engine.link.take_over(opened)

    def _note(self, request_id: str, engine: PooledEngine, why: str) -> None:
        engine.num_requests += 1
        self._placed[request_id] = engine.name
        self.decisions.append((request_id, engine.name, why))
        if len(self._placed) > MAX_REMEMBERED:
            self._placed.popitem(last=False)

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        parts = (f"{request_id}-{number}" for number in itertools.count())
        placed = itertools.takewhile(None.__ne__, map(self._placed.get, parts))
        names = [self._placed.get(request_id), *placed]
        return tuple(dict.fromkeys(each for each in names if each is not None))

    # Receivers call these methods only before their request was given to an engine.

    def forget(self, request_id: str, choice: int | None) -> None:
        self._lobby.forget(request_id, choice)

    def leave(self, request_id: str, notes: RequestNotes) -> None:
        self._lobby.leave(request_id, notes)

    def num_revivals(self, request_id: str) -> int:
        return self._lobby.num_revivals(request_id)

    def done(self, request_id: str) -> None:
        self._lobby.done(request_id)

    # --- the pool as one engine ---

    async def start(self) -> Ready | None:
        return None if self.own is None else await self.own.link.start()

    async def stop(self) -> None:
        self._is_stopped = True
        self.prefills.stop(UnavailableError("The server is shutting down."))
        for task in self._tasks:
            task.cancel()
        links = [each.link for each in self.engines.values()]
        await asyncio.gather(*(link.stop() for link in (*links, self._lobby)))

    async def flush_cache(self) -> ControlReply:
        replies = await asyncio.gather(*(link.flush_cache() for link in self._up()))
        done = all(each.ok for each in replies)
        return ControlReply(0, done, "; ".join(each.message for each in replies))

    async def set_log_level(self, level: str) -> ControlReply:
        if self.own is None:
            return ControlReply(0, True)
        return await self.own.link.set_log_level(level)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        async def of(engine: PooledEngine) -> tuple[str, EngineSnapshot | None]:
            with contextlib.suppress(EngineError):
                return engine.name, await engine.link.snapshot()
            return engine.name, None

        up = [each for each in self.engines.values() if each.link.is_up]
        taken = await asyncio.gather(*map(of, up))
        return {name: snapshot for name, snapshot in taken if snapshot is not None}

    def _up(self) -> Iterable[EngineLink]:
        return [each.link for each in self.engines.values() if each.link.is_up]

    @property
    def ready(self) -> Ready | None:
        for link in self._up():
            return link.ready
        return None

    @property
    def last_ready(self) -> Ready | None:
        own = None if self.own is None else self.own.link.last_ready
        return own or self.ready or self._last_ready or self.expected

    @property
    def stats(self) -> EngineStats | None:
        for engine in self.engines.values():
            if engine.link.stats is not None:
                engine.totals.update(engine.link.stats)
        told = [each.link.stats for each in self.engines.values() if each.link.stats is not None]
        return summed(told, [*(each.totals for each in self.engines.values()), self._gone])

    @property
    def num_open(self) -> int:
        return self._lobby.num_open + sum(each.link.num_open for each in self.engines.values())

    @property
    def num_restarts(self) -> int:
        return 0 if self.own is None else self.own.link.num_restarts

    @property
    def num_revived(self) -> int:
        return self._num_revived + sum(each.link.num_revived for each in self.engines.values())

    @property
    def survives(self) -> bool:
        return self._max_revivals > 0

    @property
    def detail(self) -> str:
        if self._is_stopped:
            return "The engine has been stopped."
        if self.is_up:
            return "ready"
        return NO_ENGINE if self.own is None else self.own.link.detail

    @property
    def pid(self) -> int | None:
        return None if self.own is None else self.own.link.pid

    @property
    def step_age_s(self) -> float | None:
        return None if self.own is None else self.own.link.step_age_s

    @property
    def trouble(self) -> str | None:
        """The trouble of this server's own engine, unless another engine is up."""
        if self.own is None or any(each is not self.own.link for each in self._up()):
            return None
        return self.own.link.trouble

    @property
    def is_overdue(self) -> bool:
        """Whether this server's own engine is, unless another engine is up."""
        return self.own is not None and not self.is_up and self.own.link.is_overdue

    @property
    def is_up(self) -> bool:
        return any(each.link.is_up for each in self.engines.values())

    @property
    def accepts(self) -> bool:
        """Requests may wait for an engine if lost ones survive, or if engines only come later."""
        return not self._is_stopped and (self.is_up or self.survives)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _no_client(on_message: OnMessage, on_exit: OnExit) -> EngineClient:
    raise AssertionError("requests only wait here")
