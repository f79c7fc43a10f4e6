"""Adds and removes models while the server runs.

A server started with one model has no router. The first change puts a router around the running
backend, which keeps running.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from engine.backends.base import BackendHolder, InferenceBackend
from engine.backends.custom.base_custom import CustomBackend
from engine.backends.custom.engine_settings import backend_name, has_engine
from engine.core.config_schema import Settings
from engine.core.errors import ConflictError, EngineError, NotFoundError
from engine.core.store.model_store import resolve_model
from engine.routing.build import EngineShare, expected_bytes, make_residency, on_demand
from engine.routing.metrics import RouterMetrics
from engine.routing.on_demand import OnDemand
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.residency import Residency
from engine.routing.route import Route
from engine.routing.router import Router
from engine.routing.swapping import Swapped

log = logging.getLogger(__name__)

POLICY = "prefix"


class ModelManager:
    """Adds and removes models. `rebuild` makes the server's initial backend again, after it was
    unloaded. `rebuild` is None if that is impossible.
    """

    def __init__(
        self,
        holder: BackendHolder,
        settings: Settings,
        registry: CollectorRegistry,
        rebuild: Callable[[], InferenceBackend] | None,
    ) -> None:
        self._holder = holder
        self._settings = settings
        self._registry = registry
        self._rebuild = rebuild
        self._changing = asyncio.Lock()

    async def load(
        self, model_id: str, model: str, kind: str | None, options: Mapping[str, Any]
    ) -> None:
        """Load a model and return when it is ready. A new model is added to the router after
        loading. A model that the router already has is loaded again if it was unloaded.
        """
        async with self._changing:
            await self._load(model_id, model, kind, options)

    async def unload(self, model_id: str, wait_s: float) -> bool:
        """Free the model's memory. Its running requests get `wait_s` seconds to finish. The next
        request for the model loads it again. Returns False if the model was not loaded.
        """
        async with self._changing:
            known = self._unloadable(self._known(model_id))
            return any([await each.unload(wait_s) for each in known])

    async def swap(
        self, model_id: str, model: str | None, options: Mapping[str, Any]
    ) -> dict[str, int]:
        """Replace the engines of a model one after the other, without an interruption. `model` and
        `options` are what the new ones have instead. Returns what became of the open requests. If
        one of the new engines can't start, those before it are replaced by engines like the old.
        """
        async with self._changing:
            if model is not None:
                resolve_model(model)  # raises for an unknown name before anything changes
            swapped: dict[OnDemand, Swapped] = {}
            try:
                for each in self._unloadable(self._known(model_id)):
                    swapped[each] = await each.swap(lambda old: old.remade(model, options))
            except EngineError as error:
                if swapped:
                    error.message += await _swap_back(swapped)
                raise
        done = swapped.values()
        return {
            "engines": len(done),
            "moved": sum(each.num_moved for each in done),
            "finishing": sum(each.num_left for each in done),
        }

    async def copy(self, model_id: str, new_id: str) -> None:
        """Add a second model with the backends of `model_id`. It needs no memory of its own."""
        async with self._changing:
            router, route = self._router(), self._known(model_id)
            if router.table.find(new_id) is not None:
                raise ConflictError(f"There is a model {new_id} already; choose another id.")
            policy = make_policy(route.policy_name)
            router.add(Route(new_id, route.members, route.policy_name, policy))

    async def remove(self, model_id: str, wait_s: float) -> None:
        """Remove the model, so that clients can't request it any more. Its running requests get
        `wait_s` seconds to finish.
        """
        async with self._changing:
            await self._remove(model_id, wait_s)

    async def _load(
        self, model_id: str, model: str, kind: str | None, options: Mapping[str, Any]
    ) -> None:
        router = self._router()
        known = router.table.find(model_id)
        if known is not None:
            await self._load_again(known, model, options)
            return
        kind = kind or backend_name(self._settings)
        if has_engine(kind):
            resolve_model(model)  # raises for an unknown name before a backend is made
        num_engines = 1 + sum(has_engine(replica.kind) for replica in router.replicas)
        share = EngineShare(self._settings, num_engines)
        told = share.options(kind, options)
        backend = on_demand(model_id, kind, model, told, router.residency, self._settings)
        try:
            await backend.start()
        except BaseException:
            await backend.stop()
            router.residency.forget(backend)
            raise
        replica = _replica(model_id, kind, backend)
        router.add(_route(model_id, replica), replica)

    async def _remove(self, model_id: str, wait_s: float) -> None:
        router, route = self._router(), self._known(model_id)
        if len(router.routes) == 1:
            raise ConflictError(f"{model_id} is the only model; unload it, or load another first.")
        for other in router.routes:
            if route.id in other.fallbacks:
                raise ConflictError(f"{model_id} is a fallback of {other.id}.")
        for replica in router.table.remove(route):
            if isinstance(replica.backend, OnDemand):
                await replica.backend.unload(wait_s)
                router.residency.forget(replica.backend)
            await replica.backend.stop()

    def unloadable(self, model_id: str) -> list[OnDemand]:
        """The backends of a model that can be unloaded. A server that started with one model has
        none, until another model was added.
        """
        current = self._holder.current.unwrapped
        route = current.table.find(model_id) if isinstance(current, Router) else None
        backends = [] if route is None else [member.replica.backend for member in route.members]
        return [backend for backend in backends if isinstance(backend, OnDemand)]

    def seconds_left(self, model_id: str) -> float:
        """Seconds until the model is unloaded if no further request comes."""
        return max((each.seconds_left for each in self.unloadable(model_id)), default=math.inf)

    def describe(self, num_admitted: int = 0) -> list[dict[str, Any]]:
        """The models. `num_admitted` requests are open at the server, which one backend has all."""
        current = self._holder.current.unwrapped
        if not isinstance(current, Router):
            state = "loaded" if current.health().ready else "loading"
            return [
                {
                    "id": card.id,
                    "state": state,
                    "backend": card.backend,
                    "default": position == 0,
                    "in_flight": num_admitted,
                    "memory_mb": round(current.memory_bytes() / 2**20, 1),
                }
                for position, card in enumerate(current.models())
            ]
        return [
            {
                "id": route.id,
                "state": _state(route),
                "backend": "+".join(dict.fromkeys(each.replica.kind for each in route.members)),
                "default": position == 0,
                "in_flight": sum(each.replica.in_flight for each in route.members),
                "memory_mb": round(sum(_memory(each) for each in route.members) / 2**20, 1),
                "idle_s": _idle_s(route),
            }
            for position, route in enumerate(current.routes)
        ]

    async def _load_again(self, route: Route, model: str, options: Mapping[str, Any]) -> None:
        if options or model != route.id:
            raise ConflictError(
                f"There is a model {route.id} already; remove it, or choose another id for this."
            )
        for each in self._unloadable(route):
            await each.load()

    def _known(self, model_id: str) -> Route:
        route = self._router().table.find(model_id)
        if route is None:
            raise NotFoundError(f"There is no model {model_id} here.", param="id")
        return route

    def _unloadable(self, route: Route) -> list[OnDemand]:
        found = self.unloadable(route.id)
        if len(found) < len(route.members):
            raise ConflictError(
                f"{route.id} is answered by a backend that can't be loaded and unloaded from here."
            )
        return found

    def _router(self) -> Router:
        current = self._holder.current.unwrapped
        if isinstance(current, Router):
            return current
        residency = make_residency(self._settings)
        cards = current.models()
        if not cards:
            raise ConflictError("The first model is still loading; retry when it is ready.")
        model_id = cards[0].id
        backend: InferenceBackend = current
        if self._rebuild is not None:
            backend = OnDemand(model_id, self._rebuild, residency, loaded=current)
        replica = _replica(model_id, cards[0].backend, backend)
        router = _router_around(replica, residency, self._registry)
        router.begin()
        self._holder.current = self._holder.current.rewrapped(router)
        return router


def router_of_one(
    model_id: str,
    kind: str,
    make: Callable[[], InferenceBackend],
    settings: Settings,
    registry: CollectorRegistry,
) -> Router:
    """Makes a router with one backend. Neither of them is started yet."""
    residency = make_residency(settings)
    expected = expected_bytes(kind, settings.model.model_path, settings)
    backend = OnDemand(model_id, make, residency, expected_bytes=expected)
    replica = _replica(model_id, kind, backend)
    replica.has_started = False
    return _router_around(replica, residency, registry)


def _router_around(replica: Replica, residency: Residency, registry: CollectorRegistry) -> Router:
    metrics = RouterMetrics(registry)
    router = Router([replica], [_route(replica.name, replica)], metrics, residency=residency)
    metrics.watch(router.replicas)
    return router


async def _swap_back(swapped: Mapping[OnDemand, Swapped]) -> str:
    """Undo the swaps of a model whose next engine could not start. Returns what to tell the
    administrator.
    """
    stuck = []
    for each, done in swapped.items():

        def like_before(_: CustomBackend, former: CustomBackend = done.replaced) -> CustomBackend:
            return former.remade(None, {})

        try:
            await each.swap(like_before)
        except EngineError:
            log.exception("%s could not be swapped back", each.name)
            stuck.append(each.name)
    if not stuck:
        return " All engines of the model are as before."
    return (
        f" These engines could not be swapped back and have the new options: {', '.join(stuck)}."
        " Swap the model again, with options with which every engine starts."
    )


def _replica(model_id: str, kind: str, backend: InferenceBackend) -> Replica:
    replica = Replica(model_id, kind, backend)
    replica.has_started = True
    if isinstance(backend, OnDemand):
        backend.on_unload = replica.seen.clear  # an unloaded backend has lost its cache
    return replica


def _route(model_id: str, replica: Replica) -> Route:
    return Route(model_id, [Member(replica, 1.0)], POLICY, make_policy(POLICY))


def _state(route: Route) -> str:
    return "+".join(dict.fromkeys(_member_state(member) for member in route.members))


def _member_state(member: Member) -> str:
    backend = member.replica.backend
    if isinstance(backend, OnDemand):
        return backend.state
    state = member.replica.state(backend.health())
    return "loaded" if state == "ready" else state


def _memory(member: Member) -> int:
    backend = member.replica.backend
    return backend.resident_bytes() if isinstance(backend, OnDemand) else backend.memory_bytes()


def _idle_s(route: Route) -> float | None:
    idle = [
        member.replica.backend.idle_s
        for member in route.members
        if isinstance(member.replica.backend, OnDemand)
    ]
    return round(min(idle), 1) if idle else None
