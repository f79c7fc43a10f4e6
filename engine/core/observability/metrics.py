"""Prometheus metrics: the names that vLLM's dashboards query, and our own `engine_*` names.

Only the server process has metrics. The counters of the engine process arrive in `EngineStats`.
Label values are fixed here or come from the operator, never from clients.

Some values are computed at each scrape. The engine runs in a child process, so the resource use of
the server and of its child processes is reported separately. Events that occur thousands of times a
second are appended to a list, and sorted into the buckets of their histogram when the list has
`MAX_NOTED` values, or when metrics are read.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import FinishReason
from engine.core.interfaces.stats import STEP_SECONDS, STEP_TOKENS, EngineStats, TierStats
from engine.core.observability.metric_tables import HISTOGRAMS, PER_TOKEN_S, REQUEST_S, TOTALS

if TYPE_CHECKING:
    import psutil

Outcome = Literal["ok", "abort", "error", "refused"]

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
_OUTCOMES: tuple[Outcome, ...] = ("ok", "abort", "error", "refused")
_MODEL_LABELS = ("model_name", "engine")
MAX_NOTED = 4096  # values of a `BulkHistogram` that are not sorted yet
# The fields of `TierStats`, with the name, kind and help text of their metrics.
_TIER_FIELDS: dict[str, tuple[str, type[CounterMetricFamily | GaugeMetricFamily], str]] = {
    "is_up": ("up", GaugeMetricFamily, "1 while the tier answers, else 0"),
    "num_blocks": ("blocks", GaugeMetricFamily, "Blocks in the tier"),
    "num_bytes": ("bytes", GaugeMetricFamily, "Bytes in the tier"),
    "hits": ("hits", CounterMetricFamily, "Blocks loaded from the tier"),
    "misses": ("misses", CounterMetricFamily, "Lookups that found no further block in the tier"),
    "bad": ("bad_records", CounterMetricFamily, "Damaged or foreign records, deleted"),
    "stored": ("stored_blocks", CounterMetricFamily, "Blocks written to the tier"),
    "errors": ("errors", CounterMetricFamily, "Calls to the tier that failed"),
    "bytes_loaded": ("loaded_bytes", CounterMetricFamily, "Bytes loaded from the tier"),
    "bytes_stored": ("stored_bytes", CounterMetricFamily, "Bytes written to the tier"),
    "load_s": ("load_seconds", CounterMetricFamily, "Time spent loading from the tier"),
    "store_s": ("store_seconds", CounterMetricFamily, "Time spent writing to the tier"),
    "saved_tokens": ("saved_tokens", CounterMetricFamily, "Tokens loaded instead of computed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """Statistics of one ended request. Times are in seconds. `ttft_s` is None if no token was
    generated. `usage` is None if the request did not finish: its sizes and times are unknown, not
    zero.
    """

    finish_reasons: tuple[FinishReason, ...]  # the finish reason of each choice
    choice_tokens: tuple[int, ...]  # generated tokens of each choice
    max_tokens: int | None  # the client's `max_tokens`, or None
    ttft_s: float | None
    e2e_s: float
    usage: UsageEvent | None

    @property
    def outcome(self) -> Outcome:
        if "error" in self.finish_reasons:
            return "error"
        return "abort" if "abort" in self.finish_reasons else "ok"


class TierCollector(Collector):
    """Collects the statistics of the tiers of the prefix cache, by the label `tier`. The metrics
    exist only if an engine has tiers.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._tiers: tuple[TierStats, ...] = ()

    def update(self, tiers: tuple[TierStats, ...]) -> None:
        if tiers and not self._tiers:
            self._registry.register(self)
        self._tiers = tiers or self._tiers

    def collect(self) -> Iterable[Metric]:
        for field, (name, kind, text) in _TIER_FIELDS.items():
            family = kind(f"engine_cache_tier_{name}", text, labels=["tier"])
            for tier in self._tiers:
                family.add_metric([tier.name], getattr(tier, field))
            yield family


class ProcessTreeCollector(Collector):
    """Collects the resource use of our processes. The label `process` is "server" for this process
    and "worker" for its child processes.
    """

    @cached_property
    def _server(self) -> "psutil.Process":
        import psutil  # imported late, for a faster start

        return psutil.Process()

    def collect(self) -> Iterable[Metric]:
        import psutil

        cpu = CounterMetricFamily(
            "engine_process_cpu_seconds",
            "User and system CPU time of the server or its workers",
            labels=["process"],
        )
        memory = GaugeMetricFamily(
            "engine_process_resident_memory_bytes",
            "Resident memory of the server or its workers",
            labels=["process"],
        )
        threads = GaugeMetricFamily(
            "engine_process_threads", "Threads of the server or its workers", labels=["process"]
        )
        disk = CounterMetricFamily(
            "engine_process_disk_bytes",
            "Bytes read from and written to disk",
            labels=["process", "direction"],
        )
        groups = {"server": [self._server], "worker": self._server.children(recursive=True)}
        for name, processes in groups.items():
            usage = [figures for each in processes if (figures := _usage(each)) is not None]
            seconds, resident, count, read, written = (
                (sum(column) for column in zip(*usage, strict=True)) if usage else (0,) * 5
            )
            cpu.add_metric([name], seconds)
            memory.add_metric([name], resident)
            threads.add_metric([name], count)
            disk.add_metric([name, "read"], read)
            disk.add_metric([name, "write"], written)
        network = CounterMetricFamily(
            "engine_host_network_bytes",
            "Network traffic of the whole machine",
            labels=["direction"],
        )
        traffic = psutil.net_io_counters()
        if traffic is not None:  # None on a machine without network interfaces
            network.add_metric(["receive"], traffic.bytes_recv)
            network.add_metric(["transmit"], traffic.bytes_sent)
        return [cpu, memory, threads, disk, network]


def _usage(process: "psutil.Process") -> tuple[float, int, int, int, int] | None:
    """The CPU seconds, resident bytes, threads, bytes read and bytes written of a process. None if
    the process has ended.
    """
    import psutil

    try:
        with process.oneshot():
            times = process.cpu_times()
            resident = process.memory_info().rss
            threads = process.num_threads()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    try:
        disk = process.io_counters()
    except (psutil.Error, OSError):  # some containers hide the disk counters
        return times.user + times.system, resident, threads, 0, 0
    return times.user + times.system, resident, threads, disk.read_bytes, disk.write_bytes


class BulkHistogram(Collector):
    """A histogram for frequent events. It is published under one or several names. `names` maps
    each name to its help text.
    """

    def __init__(
        self, names: Mapping[str, str], labels: Mapping[str, str], edges: Sequence[float]
    ) -> None:
        self._names = dict(names)
        self._labels = dict(labels)
        self._edges = tuple(edges)
        self._noted: list[float] = []
        self._counts = [0] * (len(edges) + 1)  # the last bucket has no upper edge
        self._sum = 0.0
        self._sorting = threading.Lock()  # needed, because metrics are rendered in another thread

    def observe(self, value: float) -> None:
        self._noted.append(value)
        if len(self._noted) >= MAX_NOTED:
            self._sort()

    def grow(self, before: Sequence[int], now: Sequence[int], total: float) -> None:
        """Add values that somebody else has sorted into the same buckets. The buckets had `before`
        values, and have more `now`. `total` is the sum of the new values.
        """
        with self._sorting:
            counts = zip(self._counts, before, now, strict=True)
            self._counts = [own + new - old for own, old, new in counts]
            self._sum += total

    def collect(self) -> Iterable[Metric]:
        self._sort()
        edges = [*map(floatToGoString, self._edges), "+Inf"]
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        for name, help_text in self._names.items():
            family = HistogramMetricFamily(name, help_text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), buckets, self._sum)
            yield family

    def _sort(self) -> None:
        with self._sorting:
            noted, self._noted = self._noted, []
            for value in noted:
                self._counts[bisect_left(self._edges, value)] += 1
            self._sum += sum(noted)


class Metrics:
    """All metrics of one server. They are in a registry of their own, not in the library's default
    registry.
    """

    def __init__(self, model_name: str, engine: str = "0") -> None:
        # Without this call, the library adds a second time series with the creation time to each
        # counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.registry.register(ProcessTreeCollector())
        self._tiers = TierCollector(self.registry)
        self._model = (model_name, engine)
        self._last_stats = EngineStats()
        self._totals = [(stat, self._counter(name, help_text)) for stat, name, help_text in TOTALS]
        self._define_engine_gauges()
        self._define_request_series()
        self._define_server_series()

    def watch_in_flight(self, count: Callable[[], int]) -> None:
        """Set the function that returns the number of requests in progress. The function is called
        at each scrape.
        """
        self._in_flight.set_function(count)

    def request_refused(self) -> None:
        """Count a request that the backend refused. Call this instead of `request_finished`."""
        self._requests["refused"].inc()

    def request_finished(self, request: FinishedRequest) -> None:
        """Record an ended request. Call this once for every request that was started and not
        refused, however the request ended.
        """
        self._requests[request.outcome].inc()
        for reason in request.finish_reasons:
            self._finish_reasons[reason].inc()
        self._note("vllm:e2e_request_latency_seconds", request.e2e_s)
        self._note("vllm:request_generation_tokens", sum(request.choice_tokens))
        longest = max(request.choice_tokens, default=0)
        self._note("vllm:request_max_num_generation_tokens", longest)
        self._note("vllm:request_params_n", len(request.finish_reasons))
        if request.max_tokens is not None:
            self._note("vllm:request_params_max_tokens", request.max_tokens)
        if request.ttft_s is not None:
            self._note("vllm:time_to_first_token_seconds", request.ttft_s)
            if longest > 1:
                self._note(
                    "vllm:request_time_per_output_token_seconds",
                    (request.e2e_s - request.ttft_s) / (longest - 1),
                )
        if request.usage is not None:
            self._observe_usage(request.usage)

    def inter_token(self, seconds: float, num_tokens: int = 1) -> None:
        """Record that a chunk with `num_tokens` tokens of a stream arrived `seconds` after the
        previous chunk. Call this at most once per chunk.
        """
        self._inter_token.observe(seconds / num_tokens if num_tokens > 1 else seconds)

    def slow_request(self) -> None:
        """Count a request that took longer than `logging.slow_request_s`."""
        self._slow_requests.inc()

    def http_request(self, route: str | None, method: str, status: int, seconds: float) -> None:
        """Record an HTTP request. `route` is the pattern of the route, not the path that the client
        sent. It is None if no route matched.
        """
        name = route or "unmatched"
        known_method = method if method in _METHODS else "OTHER"
        self._http_requests.labels(name, known_method, str(status)).inc()
        self._http_seconds.labels(name).observe(seconds)

    def engine_ready(self, startup_s: float) -> None:
        """Record that the engine is ready. `startup_s` is the time that loading and warm-up
        took.
        """
        self._ready.set(1)
        self._startup.set(startup_s)

    def set_ready(self, is_ready: bool) -> None:
        """Set whether the engine is ready. If it is not, its gauges are set to 0, because their
        last values are no longer true.
        """
        self._ready.set(is_ready)
        if not is_ready:
            self._observe_gauges(EngineStats())

    def engine_restarted(self, totals_survive: bool = False) -> None:
        """Record that a new engine replaced the old one. Its counters start at zero unless
        `totals_survive` is true.
        """
        self._restarts.inc()
        if not totals_survive:
            self._last_stats = EngineStats()

    def requests_revived(self, number: int) -> None:
        self._revived.inc(number)

    def observe(self, stats: EngineStats) -> None:
        """Update the metrics from the engine's statistics. Gauges are set to the new values.
        Counters grow by the difference to the last call.
        """
        # The counters of an engine only grow. So if there are fewer steps than before, this is a
        # new engine.
        last = self._last_stats if stats.num_steps >= self._last_stats.num_steps else EngineStats()
        for stat, counter in self._totals:
            grown = getattr(stats, stat) - getattr(last, stat)
            if grown > 0:
                counter.inc(grown)
        new, old = stats.steps, last.steps
        self._step_seconds.grow(old.by_seconds, new.by_seconds, new.seconds - old.seconds)
        self._step_tokens.grow(old.by_tokens, new.by_tokens, new.tokens - old.tokens)
        self._observe_gauges(stats)
        self._tiers.update(stats.tiers)
        self._last_stats = stats

    def render(self) -> tuple[bytes, str]:
        """The metrics in Prometheus's text format, and the content type of this text."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def _note(self, histogram: str, value: float) -> None:
        self._histograms[histogram].observe(value)

    def _observe_usage(self, usage: UsageEvent) -> None:
        self._note("vllm:request_queue_time_seconds", usage.queue_s)
        self._note("vllm:request_prefill_time_seconds", usage.prefill_s)
        self._note("vllm:request_decode_time_seconds", usage.decode_s)
        self._note("vllm:request_inference_time_seconds", usage.prefill_s + usage.decode_s)
        self._note("vllm:request_prompt_tokens", usage.prompt_tokens)
        self._note(
            "vllm:request_prefill_kv_computed_tokens", usage.prompt_tokens - usage.cached_tokens
        )

    def _observe_gauges(self, stats: EngineStats) -> None:
        for running in self._running:
            running.set(stats.num_running)
        for waiting in self._waiting:
            waiting.set(stats.num_waiting)
        pools = (
            (stats.num_blocks, stats.num_free_blocks, stats.num_referenced_blocks),
            (
                stats.num_window_blocks,
                stats.num_free_window_blocks,
                stats.num_referenced_window_blocks,
            ),
        )
        shares = [used / total for total, _, used in pools if total]
        for usage in self._kv_usage:
            usage.set(max(shares, default=0.0))
        for gauges, (total, free, used) in zip(self._kv_blocks, pools, strict=True):
            # Blocks that only the prefix cache holds can be evicted at any time.
            states = {"free": free, "used": used, "cached": max(total - free - used, 0)}
            for state, count in states.items():
                gauges[state].set(count)
        self._cache_config.clear()
        if stats.num_blocks:
            self._cache_config.labels(*self._model, stats.block_size, stats.num_blocks).set(1)

    def _block_gauges(self, name: str, text: str) -> dict[str, Gauge]:
        blocks = Gauge(name, text, (*_MODEL_LABELS, "state"), registry=self.registry)
        return {state: blocks.labels(*self._model, state) for state in ("free", "used", "cached")}

    def _define_engine_gauges(self) -> None:
        self._running = [
            self._gauge("vllm:num_requests_running", "Sequences that are running"),
            self._gauge("engine_sequences_running", "Sequences that are running"),
        ]
        self._waiting = [
            self._gauge("vllm:num_requests_waiting", "Sequences that wait for admission"),
            self._gauge("engine_sequences_waiting", "Sequences that wait for admission"),
        ]
        self._kv_usage = [
            self._gauge(
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks held by sequences, 0 to 1, in the fuller of the block pools",
            ),
            self._gauge("vllm:gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc"),
        ]
        states = "by state: used by sequences, cached by the prefix cache alone, free"
        self._kv_blocks = (
            self._block_gauges("engine_kv_blocks", f"KV blocks {states}"),
            self._block_gauges(
                "engine_kv_window_blocks", f"KV blocks of layers with a sliding window {states}"
            ),
        )
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "Sizes of the KV cache as labels; the value is always 1",
            (*_MODEL_LABELS, "block_size", "num_gpu_blocks"),
            registry=self.registry,
        )
        self._step_seconds = self._bulk(
            {"engine_step_seconds": "Duration of an engine step"}, STEP_SECONDS
        )
        self._step_tokens = self._bulk(
            {"vllm:iteration_tokens_total": "Tokens computed in an engine step"}, STEP_TOKENS
        )
        self._ready = self._gauge("engine_ready", "1 while the engine takes requests, else 0")
        self._startup = self._gauge(
            "engine_startup_seconds", "Duration of the first load and warm-up"
        )
        self._restarts = self._counter("engine_restarts", "Engine processes that were replaced")
        self._revived = self._counter(
            "engine_revived_requests", "Requests that continued in another engine process"
        )

    def _define_request_series(self) -> None:
        self._in_flight = self._gauge(
            "engine_requests_in_flight", "Requests admitted and not yet ended"
        )
        self._slow_requests = self._counter(
            "engine_slow_requests", "Requests slower than logging.slow_request_s"
        )
        outcomes = Counter(
            "engine_requests",
            "Requests that ended, by outcome: ok, abort, error, refused",
            (*_MODEL_LABELS, "outcome"),
            registry=self.registry,
        )
        self._requests = {each: outcomes.labels(*self._model, each) for each in _OUTCOMES}
        reasons = Counter(
            "vllm:request_success",
            "Choices that ended, by finish reason: stop, length, abort, error",
            (*_MODEL_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._finish_reasons = {
            each: reasons.labels(*self._model, each) for each in _FINISH_REASONS
        }
        self._inter_token = self._bulk(
            {
                "vllm:inter_token_latency_seconds": "Time between two tokens of a stream",
                "vllm:time_per_output_token_seconds": "Older name of "
                "vllm:inter_token_latency_seconds",
            },
            PER_TOKEN_S,
        )
        self._histograms = {
            name: self._bulk({name: help_text}, edges)
            for name, (help_text, edges) in HISTOGRAMS.items()
        }

    def _define_server_series(self) -> None:
        self._http_requests = Counter(
            "engine_http_requests",
            "HTTP requests answered, by route pattern, method and status",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "engine_http_request_seconds",
            "Time from arrival to the last byte of the response",
            ("route",),
            buckets=REQUEST_S,
            registry=self.registry,
        )

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, _MODEL_LABELS, registry=self.registry).labels(*self._model)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, _MODEL_LABELS, registry=self.registry).labels(*self._model)

    def _bulk(self, names: Mapping[str, str], edges: Sequence[float]) -> BulkHistogram:
        series = BulkHistogram(names, dict(zip(_MODEL_LABELS, self._model, strict=True)), edges)
        self.registry.register(series)
        return series
