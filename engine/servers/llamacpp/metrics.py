"""The metrics of llama.cpp's server, for dashboards that query their names."""

from collections.abc import Iterable

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.interfaces.stats import EngineStats
from engine.servers.serving.admission import WorkTotals
from engine.servers.serving.services import Services


def add_llamacpp_metrics(app: FastAPI, services: Services) -> None:
    """Add the metrics to those that the server has. They are no routes of their own."""
    services.metrics.registry.register(LlamacppMetrics(services))


class LlamacppMetrics(Collector):
    """Computes the metrics at each scrape. Like in llama.cpp, they have no labels."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        totals = self._services.lifecycle.totals
        stats = self._services.backend.stats() or EngineStats()
        for name, text, counted in _counts(totals, stats):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=counted)
        running = len(self._services.lifecycle.pumps)
        for name, text, value in _values(totals, stats, running):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=value)


def _counts(totals: WorkTotals, stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens computed", totals.computed_tokens),
        ("prompt_tokens_cached", "Prompt tokens found in the cache", totals.cached_tokens),
        ("prompt_seconds", "Time of prefill", totals.prefill_s),
        ("tokens_predicted", "Tokens sampled", totals.generated_tokens),
        ("tokens_predicted_seconds", "Time of decode", totals.decode_s),
        ("n_decode", "Engine steps", stats.num_steps),
        ("spec_decode_num_draft_tokens", "Draft tokens: none, there is no draft model", 0),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens: none", 0),
        ("spec_decode_num_drafts", "Verified drafts: none", 0),
    ]


def _values(totals: WorkTotals, stats: EngineStats, running: int) -> list[tuple[str, str, float]]:
    return [
        (
            "prompt_tokens_seconds",
            "Prefill in tokens/s",
            _rate(totals.computed_tokens, totals.prefill_s),
        ),
        (
            "predicted_tokens_seconds",
            "Decode in tokens/s",
            _rate(totals.generated_tokens, totals.decode_s),
        ),
        ("requests_processing", "Requests in progress", running),
        ("requests_deferred", "Sequences that wait for a slot", stats.num_waiting),
        ("n_tokens_max", "Longest prompt with its answer, in tokens", totals.longest),
        (
            "n_busy_slots_per_decode",
            "Sampled tokens per engine step",
            _rate(stats.generated_tokens, stats.num_steps),
        ),
    ]


def _rate(count: float, by: float) -> float:
    return count / by if by else 0.0
