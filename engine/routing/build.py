"""Settings to a router: `[backends.*]` become replicas, `[models.*]` become routes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from engine.backends.base import InferenceBackend
from engine.backends.custom.engine_settings import engine_options, has_engine
from engine.backends.factory import make_backend
from engine.core.config_schema import NamedTables, Settings
from engine.core.config_tables import BackendTable, ModelTable, backends_of
from engine.core.errors import ConfigError
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router, ShadowTraffic

# What an engine is told about the model that it runs; the table says that.
_OF_THE_TABLE = ("model_path", "framework")


def build_router(settings: Settings, registry: CollectorRegistry, origin: str) -> Router:
    """Nothing is started yet. Raises `ConfigError` that names `origin`, the file, and the key."""
    tables = settings.tables
    share = _EngineShare(settings, tables)
    replicas = {
        name: _replicas(name, table, share, f"{origin}: backends.{name}")
        for name, table in tables.backends.items()
    }
    routes = [
        _route(model_id, table, tables, replicas) for model_id, table in tables.models.items()
    ]
    everyone = [replica for each in replicas.values() for replica in each]
    metrics = RouterMetrics(registry)
    metrics.watch(everyone)
    return Router(everyone, routes, metrics, _shadow(tables, replicas, registry))


class _EngineShare:
    """What engines of ours are told that a backend's table doesn't: the settings that a server
    with one model has, and a fair part of the machine's cores.
    """

    def __init__(self, settings: Settings, tables: NamedTables) -> None:
        self._settings = settings
        self._num_engines = sum(
            table.replicas for table in tables.backends.values() if has_engine(table.kind)
        )

    def options(self, table: BackendTable) -> dict[str, Any]:
        if not has_engine(table.kind):
            return dict(table.options)
        told = msgspec.structs.asdict(engine_options(self._settings, table.kind))
        base = {name: value for name, value in told.items() if name not in _OF_THE_TABLE}
        given = table.options.get("backend_args", {})
        if not isinstance(given, Mapping):
            return dict(table.options)  # the configuration class says what is wrong with it
        if self._num_engines > 1:
            base |= self._part_of_the_cores(base)
        return {**table.options, "backend_args": base | dict(given)}

    def _part_of_the_cores(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Engines that each took all cores would wait for each other; bound ones would all be bound
        to the same cores.
        """
        from engine.backends.custom.frameworks.native.machine import default_threads

        part: dict[str, Any] = {}
        if told["threads"] is None:
            part["threads"] = max(1, default_threads() // self._num_engines)
        if told["affinity"] == "auto":
            part["affinity"] = "off"
        return part


def _replicas(name: str, table: BackendTable, share: _EngineShare, where: str) -> list[Replica]:
    numbered = [f"{name}#{number}" for number in range(1, table.replicas + 1)]
    return [
        Replica(
            each,
            table.kind,
            _backend(table, share, where),
            max_concurrent=table.max_concurrent,
            tags=table.tags,
        )
        for each in (numbered if table.replicas > 1 else [name])
    ]


def _backend(table: BackendTable, share: _EngineShare, where: str) -> InferenceBackend:
    try:
        return make_backend(table.kind, table.model, share.options(table))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", param=error.param) from error


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
    from engine.routing.shadow import Shadow, ShadowRoute  # few servers have any
    from engine.routing.shadow_metrics import ShadowMetrics

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
