"""Prometheus collectors whose values are computed at each scrape: the resource use of our
processes, and histograms of frequent events.

The engine runs in a child process, so the server and its child processes are reported separately. A
`BulkHistogram` is for events that occur thousands of times a second. Values are first appended to a
list. They are sorted into buckets when the list has `MAX_NOTED` values, or when metrics are read.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.core.interfaces.stats import TierStats

if TYPE_CHECKING:
    import psutil
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

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


MAX_NOTED = 4096


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

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add values that are already sorted into buckets. `counts` has the number of values per
        bucket, `total` is the sum of all values.
        """
        with self._sorting:
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
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
