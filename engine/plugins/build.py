"""Wraps a backend in the plugins of the `[plugins.*]` tables."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from engine.backends.base import InferenceBackend
from engine.core.config_tables import PluginTable
from engine.core.errors import ConfigError
from engine.core.interfaces.plugin import InferencePlugin
from engine.core.registry.plugin_registry import plugin_class
from engine.plugins.backend import PluggedBackend
from engine.plugins.host import PluginHost
from engine.plugins.metrics import PluginMetrics


def plug_in(
    backend: InferenceBackend, tables: Mapping[str, PluginTable], registry: CollectorRegistry
) -> InferenceBackend:
    """Wrap `backend` in all enabled plugins. Returns `backend` itself if none is enabled. Raises
    `ConfigError` if a plugin can't be made.
    """
    enabled = {name: table for name, table in tables.items() if table.enabled}
    if not enabled:
        return backend
    metrics = PluginMetrics(registry)
    hosts = [
        PluginHost(name, make_plugin(name), table, metrics)
        for name, table in sorted(enabled.items(), key=lambda item: (item[1].order, item[0]))
    ]
    return PluggedBackend(backend, hosts)


def make_plugin(name: str) -> InferencePlugin:
    kind = plugin_class(name)
    if not (isinstance(kind, type) and issubclass(kind, InferencePlugin)):
        raise ConfigError(f"plugins.{name}: it is not an InferencePlugin class", param=name)
    for field in ("name", "version"):
        value = getattr(kind, field, None)
        if not isinstance(value, str) or not 1 <= len(value) <= 64:
            raise ConfigError(f"plugins.{name}: its class has no {field}", param=name)
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"plugins.{name}: it can't be made: {type(error).__name__}: {error}"[:300], param=name
        ) from error
