"""Prometheus metrics of plugins. Label values are fixed or come from the configuration, never from
clients or plugins.
"""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Hook = Literal["initialize", "pre_inference", "text_filter", "filter", "post_inference", "close"]
Outcome = Literal["ok", "refused", "error", "timeout", "dropped"]

_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


class PluginMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "engine_plugin_calls",
            "Calls of a plugin's hooks, by outcome",
            ("plugin", "hook", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "engine_plugin_call_seconds",
            "Duration of a call of a plugin's hook",
            ("plugin", "hook"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._enabled = Gauge(
            "engine_plugin_enabled",
            "1 while the plugin takes part, 0 after three failures in a row",
            ("plugin",),
            registry=registry,
        )

    def called(self, plugin: str, hook: Hook, outcome: Outcome, seconds: float) -> None:
        self._calls.labels(plugin, hook, outcome).inc()
        self._seconds.labels(plugin, hook).observe(seconds)

    def dropped(self, plugin: str) -> None:
        self._calls.labels(plugin, "post_inference", "dropped").inc()

    def set_enabled(self, plugin: str, enabled: bool) -> None:
        self._enabled.labels(plugin).set(enabled)
