"""CPU, memory and I/O of this process and its children, read at each scrape.

The engine runs in a child process, so server and workers are reported separately.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    import psutil


class ProcessTreeCollector(Collector):
    """The label `process` is "server" for this process and "worker" for its children."""

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
    """CPU seconds, resident bytes, threads, bytes read and written; None if the process is gone."""
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
    except (psutil.Error, OSError):  # some containers hide it
        return times.user + times.system, resident, threads, 0, 0
    return times.user + times.system, resident, threads, disk.read_bytes, disk.write_bytes
