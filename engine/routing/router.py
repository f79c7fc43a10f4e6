"""The router combines several backends into one. Each model has one or more backends, and each
request is sent to one of them.

The router is itself an `InferenceBackend`. It starts and stops its backends and checks their health
before it sends a request. Events that a backend pushes reach the server directly, without a queue.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from engine.backends.base import InferenceBackend, ReplayedTokens, Resolved, Tokenizing
from engine.core.errors import (
    CacheError,
    EngineError,
    InvalidRequestError,
    UnavailableError,
)
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Embeddings,
    EmbedRequest,
    Event,
    Health,
    ModelCard,
    TokenizerInfo,
    UsageEvent,
)
from engine.core.interfaces.request import GenerateRequest
from engine.core.interfaces.snapshot import EngineSnapshot
from engine.core.interfaces.stats import EngineStats
from engine.core.observability.logging import current_request_id
from engine.routing.adapter_routes import load_adapter, unload_adapter
from engine.routing.attempts import (
    RETRY_AFTER_S,
    Attempts,
    EventTap,
    Routed,
    Running,
    ShadowTraffic,
)
from engine.routing.decisions import Decision, DecisionLog
from engine.routing.metrics import RouterMetrics
from engine.routing.model_table import RouteTable
from engine.routing.prefixes import Request
from engine.routing.replica import Replica, combined_health, sum_stats, tree_bytes
from engine.routing.residency import Residency
from engine.routing.route import Route

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK_S = 1.0


class Router(InferenceBackend):
    """Sends requests to replicas. The first of `routes` is the default model. `replicas` are all
    backends to run, including those for shadow traffic.
    """

    totals_survive_restarts = True

    def __init__(
        self,
        replicas: Sequence[Replica],
        routes: Sequence[Route],
        metrics: RouterMetrics,
        shadow: ShadowTraffic | None = None,
        residency: Residency | None = None,
    ) -> None:
        self.table = RouteTable(replicas, routes)
        self.shadow = shadow
        self.residency = residency or Residency()
        self.decisions = DecisionLog()
        self.running = Running()
        self._metrics = metrics
        for replica in replicas:
            replica.backend.on_interrupted = self.running.rehome
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def replicas(self) -> list[Replica]:
        return self.table.replicas

    @property
    def routes(self) -> list[Route]:
        return self.table.routes

    async def start(self) -> str:
        """Start all replicas. If there is a memory budget, they are started one after the other,
        else in parallel. A replica gets requests as soon as it is ready. If one replica fails to
        start, all replicas are stopped.
        """
        self.begin()
        if self.residency.budget_bytes is not None:
            return await self._start_in_turn()
        starting = [asyncio.create_task(replica.start()) for replica in self.replicas]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        return self._address

    def begin(self) -> None:
        """Start to check all replicas periodically. This does not start replicas."""
        self._ticking = asyncio.create_task(self._tick())

    def add(self, route: Route, replica: Replica | None = None) -> None:
        """Add a model whose replica already runs, as `ModelTable.add` does."""
        if replica is not None:
            replica.backend.on_interrupted = self.running.rehome
        self.table.add(route, replica)

    async def stop(self) -> None:
        self._is_stopped = True
        if self._ticking is not None:
            self._ticking.cancel()
        if self.shadow is not None:
            await self.shadow.stop()
        stops = [replica.backend.stop() for replica in self.replicas]
        for replica, result in zip(
            self.replicas, await asyncio.gather(*stops, return_exceptions=True), strict=True
        ):
            if isinstance(result, BaseException):
                log.error("%s could not be stopped: %r", replica.name, result)

    def health(self) -> Health:
        """The router is ready if at least one model has a ready replica."""
        is_ready = not self._is_stopped and any(route.is_up for route in self.routes)
        return combined_health(self.replicas, is_ready)

    @property
    def is_ready(self) -> bool:
        return not self._is_stopped and any(route.takes_requests for route in self.routes)

    def model_health(self, model_id: str) -> Health:
        route = self.table.find(model_id)
        if route is None:
            return Health(ready=False, detail="There is no such model.", loaded=False)
        if route.is_up:
            up = [health for each in route.members if (health := each.replica.health()).ready]
            return next((health for health in up if health.loaded), up[0])
        details = [f"{each.replica.name}: {each.replica.health().detail}" for each in route.members]
        return Health(ready=False, detail=" ".join(details))

    @property
    def is_accelerated(self) -> bool:
        return any(replica.backend.is_accelerated for replica in self.replicas)

    def memory_bytes(self) -> int:
        return tree_bytes()

    def models(self) -> list[ModelCard]:
        return self.table.cards()

    def resolve(self, name: str | None) -> Resolved | None:
        """Returns the requested model. If none of its backends is ready, returns the first of its
        fallback models that has a ready backend.
        """
        return self.table.resolve(name)

    @property
    def adapters(self) -> Mapping[str, str]:
        found = (replica.backend.adapters for replica in self.replicas)
        return {name: path for each in found for name, path in each.items()}

    async def load_adapter(
        self, name: str, path: str, *, base: str | None = None, replaces: bool = False
    ) -> None:
        await load_adapter(name, path, base, self.routes, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        await unload_adapter(name, self.routes)

    def answered_by(self, request_id: str) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                each.chosen
                for each in self.decisions.find(request_id)
                if each.has_answered and each.chosen is not None
            )
        )

    def stats(self) -> EngineStats | None:
        return sum_stats(self.replicas)

    def chat(self, request: ChatRequest) -> AsyncIterator[Event]:
        return Routed(self._attempts(request, request.context.model))

    def complete(self, request: CompletionRequest) -> AsyncIterator[Event]:
        return Routed(self._attempts(request, request.context.model))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        attempts = self._attempts(request, request.model)
        made: Embeddings | None = None
        while (attempt := await attempts.next()) is not None:
            with attempt:
                left = attempts.remaining()
                assert isinstance(left, EmbedRequest)
                made = await attempt.replica.backend.embed(left)
                attempt.note(
                    UsageEvent(
                        prompt_tokens=made.prompt_tokens, completion_tokens=0, cached_tokens=0
                    )
                )
        assert made is not None
        return made

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        return await self._first_answer(model, lambda backend: backend.tokenize(content, **how))

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        return await self._first_answer(model, lambda backend: backend.detokenize(token_ids))

    async def token_bytes(self, token_ids: tuple[int, ...], *, model: str = "") -> list[bytes]:
        return await self._first_answer(model, lambda backend: backend.token_bytes(token_ids))

    async def _first_answer(self, model: str, ask: Callable[[InferenceBackend], Awaitable[T]]) -> T:
        """Ask a model's backends in turn: a backend of another kind may accept what one refuses."""
        refusal: InvalidRequestError | None = None
        for backend in self._ready_backends(model):
            try:
                return await ask(backend)
            except InvalidRequestError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo | None:
        for backend in self._ready_backends(model):
            if (info := await backend.tokenizer_info()) is not None:
                return info
        return None

    async def sites(self, *, model: str = "") -> list[dict[str, Any]]:
        for backend in self._ready_backends(model):
            with contextlib.suppress(InvalidRequestError):
                return await backend.sites()
        return await super().sites(model=model)

    async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
        found = [self.table.route(model)] if model else self.routes
        done = []
        for replica in dict.fromkeys(m.replica for route in found for m in route.members):
            try:
                words = await replica.backend.flush_prefixes()
            except (InvalidRequestError, CacheError) as error:
                words = (error.message,)
            replica.seen.clear()
            done += [f"{replica.name}: {each}" for each in words]
        return tuple(done)

    async def snapshots(self) -> dict[str, EngineSnapshot]:
        replicas = list(self.replicas)
        taken = await asyncio.gather(*(each.backend.snapshots() for each in replicas))
        return {
            replica.name: snapshot
            for replica, found in zip(replicas, taken, strict=True)
            for snapshot in found.values()
        }

    async def replay(self, request: GenerateRequest, *, model: str = "") -> ReplayedTokens:
        return await self._ready_backends(model)[0].replay(request)

    def files_of(self, model: str) -> Path | None:
        for member in self.table.route(model).members:
            if (path := member.replica.backend.files_of("")) is not None:
                return path
        return None

    async def set_log_level(self, level: str) -> tuple[str, ...]:
        told = [await replica.backend.set_log_level(level) for replica in self.replicas]
        return tuple(word for words in told for word in words)

    def ended(self, route: Route, replica: Replica, error: EngineError | None) -> None:
        self._metrics.ended(replica.name, route.id, error)

    def freed(self, replica: Replica) -> None:
        for route in self.table.served_by(replica):
            route.wake()

    def may_eject(self, replica: Replica) -> bool:
        """Whether each model that this replica serves has another replica that is ready."""
        return all(
            any(
                member.replica is not replica
                and member.replica.state(member.replica.health()) == "ready"
                for member in route.members
            )
            for route in self.table.served_by(replica)
        )

    @property
    def _address(self) -> str:
        return "router://" + ",".join(replica.name for replica in self.replicas)

    async def _start_in_turn(self) -> str:
        """Start replicas one after the other, in reverse order. If not all fit in the memory
        budget, those that come first in the settings stay loaded.
        """
        try:
            for replica in reversed(self.replicas):
                await replica.start()
        except BaseException:
            await self.stop()
            raise
        return self._address

    def _attempts(self, request: Request, model: str) -> Attempts:
        route = self.table.route(model)
        named = request if isinstance(request, EmbedRequest) else request.context
        decision = Decision(
            request_id=named.request_id,
            http_request_id=current_request_id() or "",
            model=route.id,
            policy=route.policy_name,
        )
        self.decisions.add(decision)

        def mirror() -> EventTap | None:
            if self.shadow is None or isinstance(request, EmbedRequest):
                return None
            return self.shadow.mirror(route.id, request)

        adapter = model if model and self.table.find(model) is None else ""
        return Attempts(route, request, decision, self, mirror, adapter)

    def _ready_backends(self, model: str) -> list[InferenceBackend]:
        route = self.table.route(model)
        ready = [each.replica.backend for each in route.members if each.replica.backend.is_ready]
        if not ready:
            raise UnavailableError(
                f"No backend of {route.id} is ready. Retry later.", retry_after=RETRY_AFTER_S
            )
        return ready

    async def _tick(self) -> None:
        """Update all replicas periodically until cancelled."""
        while True:
            self.residency.tick()
            for replica in self.replicas:
                replica.tick()
            for route in self.routes:
                route.wake_all()
            await asyncio.sleep(TICK_S)
