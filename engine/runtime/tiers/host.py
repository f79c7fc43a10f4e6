"""The tier in host memory. It is meant for models whose KV pool is in the memory of a GPU.

A GPU copies blocks directly from pinned memory. So the tier keeps its blocks there, and lends them
without a copy.
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from engine.runtime.model_runner import Bytes
from engine.runtime.radix_cache import EvictionPolicy
from engine.runtime.tiers.base import BoundedIndex, Loaded, Record, Wanted


class HostTier:
    """Blocks in host memory. They need no checksums, because the KV pool has none either. `new_row`
    returns memory for a block that a GPU can read. With it, the tier lends its blocks.
    """

    takes_blocks = True

    def __init__(
        self,
        max_bytes: int,
        policy: EvictionPolicy,
        ttl_s: float | None,
        new_row: Callable[[int], Bytes] | None = None,
        name: str = "host",
    ) -> None:
        self.name = name
        self.lends = new_row is not None
        self._new_row = new_row or (lambda num_bytes: np.empty(num_bytes, np.uint8))
        self._index = BoundedIndex(max_bytes, policy, ttl_s)
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    @property
    def num_records(self) -> int:
        return len(self._index)

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._records and not self._index.is_expired(name) for name in names]

    def lend(self, wanted: Wanted) -> list[Bytes]:
        """The blocks before the first one that is missing. They must not be changed."""
        names = [wanted.name(index) for index in range(len(wanted.places))]
        rows: list[Bytes] = []
        with self._lock:
            for name in names:
                if (record := self._records.get(name)) is None:
                    break
                rows.append(record.payload)
            self._index.use(names[: len(rows)])
        return rows

    def records(self, names: Sequence[str]) -> list[Record | None]:
        """The records with these names. Their bytes must not be changed."""
        with self._lock:
            self._index.use(names)
            return [self._records.get(name) for name in names]

    def load(self, wanted: Wanted, rows: Bytes) -> list[Loaded]:
        names = [wanted.name(index) for index in range(len(wanted.places))]
        with self._lock:
            found = [self._records.get(name) for name in names]
            self._index.use(names)
        for row, record in zip(rows, found, strict=True):
            if record is not None:
                row[:] = record.payload
        return [Loaded.MISSING if record is None else Loaded.OK for record in found]

    def store(self, records: Sequence[Record]) -> int:
        num_stored = 0
        for record in records:
            with self._lock:
                if record.name in self._records:
                    continue
            # A copy, because the array of a record may be a part of a much larger one.
            row = self._new_row(len(record.payload))
            row[:] = record.payload
            kept = Record(record.shape, record.identity, record.place, row)
            with self._lock:
                self._records[record.name] = kept
                self._drop(self._index.add(record.name, record.num_bytes))
            num_stored += 1
        return num_stored

    def use(self, names: Sequence[str]) -> None:
        with self._lock:
            self._index.use(names)

    def tidy_up(self) -> None:
        with self._lock:
            self._drop(self._index.expired())

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._index.clear()

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            del self._records[name]
