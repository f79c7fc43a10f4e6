"""What became of the copies that shadow traffic sends, as Prometheus series."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Outcome = Literal[
    "identical",  # the same answer, word for word
    "different",
    "sampled",  # an answer; sampled at random, it says nothing about the other one
    "error",
    "unsupported",  # the request has a parameter that the backend lacks
    "unavailable",  # the backend was not ready
    "dropped",  # more copies than the backend keeps up with
]
Difference = Literal["text", "finish_reason", "num_tokens"]

_LABELS = ("model_name", "backend")
_TOKENS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class ShadowMetrics:
    """Series for all models that have a shadow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "engine_shadow_requests",
            "Copies of requests for the shadow backend, by outcome",
            (*_LABELS, "outcome"),
            registry=registry,
        )
        self._differences = Counter(
            "engine_shadow_differences",
            "Greedy requests whose copy got another answer, by what differs",
            (*_LABELS, "kind"),
            registry=registry,
        )
        self._positions = Histogram(
            "engine_shadow_divergence_tokens",
            "Equal tokens before the answer and its copy's answer diverge",
            _LABELS,
            buckets=_TOKENS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "engine_shadow_in_flight",
            "Copies that the shadow backend is answering",
            _LABELS,
            registry=registry,
        )

    def in_flight(self, model: str, backend: str, count: int) -> None:
        self._in_flight.labels(model, backend).set(count)

    def ended(self, model: str, backend: str, outcome: Outcome) -> None:
        self._requests.labels(model, backend, outcome).inc()

    def differs(self, model: str, backend: str, kind: Difference) -> None:
        self._differences.labels(model, backend, kind).inc()

    def diverged(self, model: str, backend: str, position: int) -> None:
        self._positions.labels(model, backend).observe(position)
