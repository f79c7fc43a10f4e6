"""A histogram for events that occur thousands of times a second. Values are only appended; they are
sorted into buckets a thousand at a time, or when metrics are read.
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
    """One set of values, published under one or several names, each with its help text."""

    def __init__(
        self, names: Mapping[str, str], labels: Mapping[str, str], edges: Sequence[float]
    ) -> None:
        self._names = dict(names)
        self._labels = dict(labels)
        self._edges = tuple(edges)
        self._noted: list[float] = []
        self._counts = [0] * (len(edges) + 1)  # the last bucket has no upper edge
        self._sum = 0.0
        self._sorting = threading.Lock()  # metrics are rendered off the event loop

    def observe(self, value: float) -> None:
        self._noted.append(value)
        if len(self._noted) >= MAX_NOTED:
            self._sort()

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add values that were bucketed elsewhere: a count per bucket, and their sum."""
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
