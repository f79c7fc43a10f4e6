"""A histogram for what happens thousands of times a second: values are only noted, and sorted into
their buckets by the thousand, or when somebody looks.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MAX_NOTED = 4096


class BulkHistogram(Collector):
    """One set of values under one name or several, each name with its help text."""

    def __init__(
        self, names: Mapping[str, str], labels: Mapping[str, str], edges: Sequence[float]
    ) -> None:
        self._names = dict(names)
        self._labels = dict(labels)
        self._edges = tuple(edges)
        self._noted: list[float] = []
        self._counts = [0] * (len(edges) + 1)  # the last one: above every edge
        self._sum = 0.0
        self._sorting = threading.Lock()  # metrics are rendered away from the event loop

    def observe(self, value: float) -> None:
        self._noted.append(value)
        if len(self._noted) >= MAX_NOTED:
            self._sort()

    def add(self, counts: Sequence[int], total: float) -> None:
        """Values that were sorted elsewhere: how many for each bucket, and their sum."""
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
