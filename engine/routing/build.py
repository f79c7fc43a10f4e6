"""Builds a router from settings: `[backends.*]` become replicas, `[models.*]` become routes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from engine.backends.base import InferenceBackend
from engine.backends.custom.engine_settings import engine_options, has_engine
from engine.backends.factory import make_backend
from engine.core.config_schema import NamedTables, Settings
from engine.core.config_tables import BackendTable, ModelTable, adapters_of, backends_of
from engine.core.errors import ConfigError, EngineError
from engine.core.memory import memory_room
from engine.core.store.model_store import resolve_model
from engine.routing.attempts import ShadowTraffic
from engine.routing.metrics import RouterMetrics
from engine.routing.on_demand import OnDemand
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.residency import Residency
from engine.routing.route import Route
from engine.routing.router import Router

# Engine options that come from the `[backends.*]` table, not from the server's settings.
_OF_THE_TABLE = ("model_path", "framework", "adapters")
# Default size of an engine's KV pool, used to estimate the engine's memory.
USUAL_POOL_MB = 224
ENGINE_MB = 96
REMOTE = "openai"  # a server that we did not start and can't stop


def build_router(settings: Settings, registry: CollectorRegistry, origin: str) -> Router:
    """Build the router without starting it. If a setting is invalid, raises a `ConfigError` that
    names the file (`origin`) and the key.
    """
    tables = settings.tables
    num_engines = sum(t.replicas for t in tables.backends.values() if has_engine(t.kind))
    share, residency = EngineShare(settings, num_engines), make_residency(settings)
    make = _BackendMaker(settings, share, residency)
    replicas = {
        name: _replicas(name, table, make, f"{origin}: backends.{name}")
        for name, table in tables.backends.items()
    }
    routes = [
        _route(model_id, table, tables, replicas) for model_id, table in tables.models.items()
    ]
    everyone = [replica for each in replicas.values() for replica in each]
    metrics = RouterMetrics(registry)
    shadow = _shadow(tables, replicas, registry)
    router = Router(everyone, routes, metrics, shadow, residency=residency)
    metrics.watch(router.replicas)
    return router


def make_residency(settings: Settings) -> Residency:
    budget_mb = settings.server.memory_budget_mb
    # A budget beyond the limit of the container would never unload a model before the kernel kills.
    budget = None if budget_mb is None else min(budget_mb * 2**20, memory_room().plannable)
    return Residency(budget, settings.server.idle_unload_s)


def on_demand(
    name: str,
    kind: str,
    model: str,
    options: Mapping[str, Any],
    residency: Residency,
    settings: Settings,
) -> OnDemand:
    """A backend that can be unloaded. If its configuration is invalid, raises `ConfigError` now and
    not at its first use.
    """
    first = [make_backend(kind, model, options)]
    return OnDemand(
        name,
        lambda: first.pop() if first else make_backend(kind, model, options),
        residency,
        expected_bytes=expected_bytes(kind, model, settings),
    )


def expected_bytes(kind: str, model: str, settings: Settings) -> int:
    """Expected memory in bytes: the size of the model's files, the KV pool, and the engine itself.
    0 if unknown.
    """
    if not has_engine(kind):
        return 0
    try:
        path = resolve_model(model)
    except EngineError:
        return 0  # the error is reported when the backend starts
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    pool_mb = settings.performance.memory_pool_size_mb or USUAL_POOL_MB
    return sum(each.stat().st_size for each in files) + (pool_mb + ENGINE_MB) * 2**20


class EngineShare:
    """Engine options for backends whose table does not set them. They come from the server's
    settings. Each engine gets an equal share of the CPU cores.
    """

    def __init__(self, settings: Settings, num_engines: int) -> None:
        self._settings = settings
        self._num_engines = num_engines

    def options(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if not has_engine(kind):
            return dict(options)
        told = msgspec.structs.asdict(engine_options(self._settings, kind))
        base = {name: value for name, value in told.items() if name not in _OF_THE_TABLE}
        given = options.get("backend_args", {})
        if not isinstance(given, Mapping):
            return dict(options)  # the configuration class reports the error
        if self._num_engines > 1:
            base |= self._part_of_the_cores(base)
        return {**options, "backend_args": base | dict(given)}

    def _part_of_the_cores(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Number of threads and core affinity of each engine, if there are several. If each engine
        used all cores, the engines would wait for each other. If engines pinned their threads, all
        engines would use the same cores.
        """
        from engine.native.machine import default_threads

        part: dict[str, Any] = {}
        if told["threads"] is None:
            part["threads"] = max(1, default_threads() // self._num_engines)
        if told["affinity"] == "auto":
            part["affinity"] = "off"
        return part


class _BackendMaker:
    """Makes backends from `[backends.*]` tables. Backends of all kinds except `REMOTE` can be
    unloaded and loaded again.
    """

    def __init__(self, settings: Settings, share: EngineShare, residency: Residency) -> None:
        self._settings = settings
        self._share = share
        self._residency = residency

    def __call__(self, name: str, table: BackendTable, where: str) -> InferenceBackend:
        options = self._share.options(table.kind, table.options)
        options = self._with_adapters(name.partition("#")[0], table.kind, options)
        try:
            if table.kind == REMOTE:
                return make_backend(table.kind, table.model, options)
            return on_demand(
                name, table.kind, table.model, options, self._residency, self._settings
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", param=error.param) from error

    def _with_adapters(self, name: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        adapters = adapters_of(name, self._settings.tables)
        if not adapters:
            return options
        if not has_engine(kind):
            each = next(iter(adapters))
            raise ConfigError(
                f"adapters.{each} is for a model of backends.{name}, and '{kind}' serves no LoRA"
                " adapters; use native, torch or jax",
                param=f"adapters.{each}",
            )
        return {**options, "backend_args": {**options["backend_args"], "adapters": adapters}}


def _replicas(name: str, table: BackendTable, make: _BackendMaker, where: str) -> list[Replica]:
    numbered = [f"{name}#{number}" for number in range(1, table.replicas + 1)]
    replicas = []
    for each in numbered if table.replicas > 1 else [name]:
        backend = make(each, table, where)
        replica = Replica(
            each, table.kind, backend, max_concurrent=table.max_concurrent, tags=table.tags
        )
        if isinstance(backend, OnDemand):
            backend.on_unload = replica.seen.clear  # an unloaded backend has lost its cache
        replicas.append(replica)
    return replicas


def _route(
    model_id: str, table: ModelTable, tables: NamedTables, replicas: Mapping[str, list[Replica]]
) -> Route:
    members = [
        Member(replica, use.weight or tables.backends[use.name].weight)
        for use in backends_of(table, tables)
        for replica in replicas[use.name]
    ]
    return Route(
        model_id,
        members,
        table.policy,
        make_policy(table.policy),
        aliases=table.aliases,
        fallbacks=table.fallbacks,
        shadow=table.shadow,
    )


def _shadow(
    tables: NamedTables, replicas: Mapping[str, list[Replica]], registry: CollectorRegistry
) -> ShadowTraffic | None:
    wanted = {model_id: t.shadow for model_id, t in tables.models.items() if t.shadow is not None}
    if not wanted:
        return None
    from engine.routing.metrics import ShadowMetrics
    from engine.routing.shadow.traffic import Shadow, ShadowRoute  # late: few servers use it

    routes = [
        ShadowRoute(
            model_id,
            each.backend,
            tuple(replica.backend for replica in replicas[each.backend]),
            each.share,
        )
        for model_id, each in wanted.items()
    ]
    return Shadow(routes, ShadowMetrics(registry))
