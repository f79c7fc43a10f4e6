"""The router's Prometheus metrics. Label values come from the configuration, never from clients."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.errors import EngineError, InvalidRequestError, RateLimitError
from engine.core.interfaces.handover import PrefillOutcome
from engine.routing.replica import Replica

if TYPE_CHECKING:
    from engine.routing.nodes.prefill import Prefills

_LABELS = ("backend", "kind")


class RouterMetrics:
    """Counts attempts when they end. `ReplicaCollector` reads all other values at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._attempts = Counter(
            "engine_backend_requests",
            "Attempts at a backend, by outcome: ok, error, busy (429), refused (400)",
            ("backend", "model_name", "outcome"),
            registry=registry,
        )

    def ended(self, backend: str, model: str, error: EngineError | None) -> None:
        self._attempts.labels(backend, model, _outcome(error)).inc()

    def watch(self, replicas: Sequence[Replica]) -> None:
        self._registry.register(ReplicaCollector(replicas))


class ReplicaCollector(Collector):
    """Reads the replicas' state at each scrape."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        ready = _gauge(
            "engine_backend_ready", "1 while the router sends requests to the backend, else 0"
        )
        in_flight = _gauge("engine_backend_in_flight", "Requests that the backend is answering")
        rate = _gauge(
            "engine_backend_tokens_per_second",
            "Tokens generated per second, over the last ten seconds",
        )
        first_token = _gauge(
            "engine_backend_first_token_seconds",
            "Median time to first token of the last 256 requests",
        )
        failures = _counter("engine_backend_failures", "Requests that failed at the backend")
        ejections = _counter(
            "engine_backend_ejections", "Times that the router ejected the backend for its failures"
        )
        restarts = _counter(
            "engine_backend_restarts", "Engine processes of the backend that were replaced"
        )
        prompt = _counter("engine_backend_prompt_tokens", "Prompt tokens of finished requests")
        cached = _counter(
            "engine_backend_cached_tokens",
            "Prompt tokens of finished requests found in the backend's cache",
        )
        generated = _counter("engine_backend_generated_tokens", "Tokens that the backend generated")
        for replica in self._replicas:
            labels = [replica.name, replica.kind]
            health = replica.backend.health()
            ready.add_metric(labels, replica.state(health) == "ready")
            in_flight.add_metric(labels, replica.in_flight)
            rate.add_metric(labels, replica.tokens_per_s)
            if replica.first_token_p50_s is not None:
                first_token.add_metric(labels, replica.first_token_p50_s)
            failures.add_metric(labels, replica.num_failures)
            ejections.add_metric(labels, replica.outlier.num_ejections)
            restarts.add_metric(labels, health.num_restarts)
            prompt.add_metric(labels, replica.prompt_tokens)
            cached.add_metric(labels, replica.cached_tokens)
            generated.add_metric(labels, replica.generated_tokens)
        return [
            *(ready, in_flight, rate, first_token, failures, ejections, restarts),
            *(prompt, cached, generated),
        ]


def _gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=_LABELS)


def _counter(name: str, help_text: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, help_text, labels=_LABELS)


def _outcome(error: EngineError | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, RateLimitError):
        return "busy"
    return "refused" if isinstance(error, InvalidRequestError) else "error"


class PrefillCollector(Collector):
    """Reads at each scrape what prefill nodes have done."""

    def __init__(self, prefills: "Callable[[], Sequence[Prefills]]") -> None:
        self._prefills = prefills

    def collect(self) -> Iterable[Metric]:
        prompts = CounterMetricFamily(
            "engine_prefill_node_prompts",
            "Prompts that were sent to prefill nodes, by outcome: done, refused, lost, late",
            labels=["outcome"],
        )
        seconds = CounterMetricFamily(
            "engine_prefill_node_seconds",
            "Time between sending a prompt to a prefill node and its answer, summed",
        )
        known = self._prefills()
        for outcome in get_args(PrefillOutcome):
            prompts.add_metric([outcome], sum(each.outcomes[outcome] for each in known))
        seconds.add_metric([], sum(each.seconds for each in known))
        return [prompts, seconds]


Outcome = Literal[
    "identical",  # both backends answered with the same text
    "different",  # the texts differ
    "sampled",  # tokens were sampled at random, so the texts can't be compared
    "error",  # the backend failed, refused the copy or took too long
    "unsupported",  # the backend lacks one of the request's parameters
    "unavailable",  # the backend was not ready
    "dropped",  # too many copies are waiting, because the backend is too slow
]
Difference = Literal["text", "finish_reason", "num_tokens"]

_SHADOW_LABELS = ("model_name", "backend")
_TOKENS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class ShadowMetrics:
    """Metrics of all models that have a shadow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "engine_shadow_requests",
            "Copies of requests for the shadow backend, by outcome",
            (*_SHADOW_LABELS, "outcome"),
            registry=registry,
        )
        self._differences = Counter(
            "engine_shadow_differences",
            "Greedy requests whose copy got another answer, by what differs",
            (*_SHADOW_LABELS, "kind"),
            registry=registry,
        )
        self._positions = Histogram(
            "engine_shadow_divergence_tokens",
            "Equal tokens before the answer and its copy's answer diverge",
            _SHADOW_LABELS,
            buckets=_TOKENS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "engine_shadow_in_flight",
            "Copies that the shadow backend is answering",
            _SHADOW_LABELS,
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
