"""The tier in host memory. It is meant for models whose KV pool is in the memory of a GPU."""

import threading
from collections.abc import Sequence

import numpy as np

from engine.backends.custom.runtime.eviction_order import EvictionPolicy
from engine.backends.custom.runtime.model_runner import Bytes
from engine.backends.custom.runtime.tiers.base import BoundedIndex, Loaded, Record, Wanted


class HostTier:
    """Blocks in host memory. They need no checksums, because the KV pool has none either."""

    name = "host"

    def __init__(self, max_bytes: int, policy: EvictionPolicy, ttl_s: float | None) -> None:
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
                kept = Record(record.shape, record.identity, record.place, np.array(record.payload))
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
