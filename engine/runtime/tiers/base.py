"""What the tiers of the prefix cache have in common: their interface, and the order of eviction.

Only the two threads of an `OffloadWorker` call a tier. One of them reads, the other writes and
tidies up.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from engine.runtime.model_runner import Bytes
from engine.runtime.radix_cache import POLICIES, EvictionPolicy, Key
from engine.runtime.tiers.record import (
    BadRecordError,
    BlockKey,
    RecordShape,
    check_header,
    check_payload,
    decode_header,
    encode_header,
)


class PeerError(Exception):
    """One of the sources of a tier failed. The tier itself goes on."""


class Loaded(IntEnum):
    """What became of one block that a tier was asked for."""

    OK = 0
    MISSING = 1
    BAD = 2  # the record was damaged or foreign; the tier has removed it


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one group that are read together."""

    shape: RecordShape
    identity: bytes
    places: Sequence[BlockKey]

    def name(self, index: int) -> str:
        return record_name(self.shape, self.places[index].key)

    def is_valid(self, index: int, header: bytes | bytearray, payload: memoryview) -> bool:
        """Whether a record that was read is the one that was asked for, and undamaged."""
        try:
            found = decode_header(header)
            check_header(found, self.shape, self.identity, self.places[index])
            check_payload(found, payload)
        except BadRecordError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Record:
    """A block to store."""

    shape: RecordShape
    identity: bytes
    place: BlockKey
    payload: Bytes

    @property
    def name(self) -> str:
        return record_name(self.shape, self.place.key)

    @property
    def num_bytes(self) -> int:
        return self.shape.record_bytes

    def header(self) -> bytes:
        return encode_header(self.shape, self.identity, self.place, self.payload.data)


def record_name(shape: RecordShape, key: bytes) -> str:
    """The name of a record in a tier, such as a file's name."""
    return f"{key.hex()}.{shape.group}"


class Tier(Protocol):
    name: str
    takes_blocks: bool  # whether blocks can be stored

    @property
    def num_bytes(self) -> int:
        """Bytes of all records, as far as this process knows."""
        ...

    @property
    def num_records(self) -> int: ...

    def find(self, names: Sequence[str]) -> list[bool]:
        """Which of these records the tier has."""
        ...

    def load(self, wanted: Wanted, rows: Bytes) -> list[Loaded]:
        """Read blocks into `rows`, one row each."""
        ...

    def store(self, records: Sequence[Record]) -> int:
        """Store those blocks that the tier lacks. Returns how many it stored."""
        ...

    def use(self, names: Sequence[str]) -> None:
        """Note that blocks were used, even if they came from elsewhere."""
        ...

    def tidy_up(self) -> None:
        """Do the work that is left for idle times. Called about once a second."""
        ...

    def close(self) -> None: ...


class Entry:
    """What an index knows of a record. `POLICIES` rank it."""

    __slots__ = ("created", "last_used", "num_bytes", "num_uses", "used_at")

    def __init__(self, num_bytes: int, tick: int, used_at: float, num_uses: int) -> None:
        self.num_bytes = num_bytes
        self.created = self.last_used = tick
        self.num_uses = num_uses
        self.used_at = used_at


class BoundedIndex:
    """The records of a tier, limited in their total bytes. It decides which of them to remove.

    `ttl_s` is the time after which an unused record expires. `clock` is a wall clock, because times
    are compared with those of files that earlier processes wrote.
    """

    def __init__(
        self,
        max_bytes: int,
        policy: EvictionPolicy,
        ttl_s: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._rank = POLICIES[policy]
        self._ttl_s = ttl_s
        self._clock = clock
        self._tick = 0
        self.clear()

    def clear(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._heap: list[tuple[Key, str]] = []  # entries whose rank has changed are outdated
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def num_uses(self, name: str) -> int:
        return self._entries[name].num_uses

    def add(
        self, name: str, num_bytes: int, used_at: float | None = None, num_uses: int = 0
    ) -> list[str]:
        """Add a record. Returns the names of the records that have to be removed for it, which the
        index has forgotten already.
        """
        self.remove(name)
        self._tick += 1
        at = self._clock() if used_at is None else used_at
        self._entries[name] = Entry(num_bytes, self._tick, at, num_uses)
        self.num_bytes += num_bytes
        self._push(name)
        return list(self._surplus())

    def use(self, names: Iterable[str]) -> None:
        """Note that records were read."""
        now = self._clock()
        for name in names:
            if (entry := self._entries.get(name)) is not None:
                self._tick += 1
                entry.last_used = self._tick
                entry.used_at = now
                entry.num_uses += 1
                self._push(name)

    def remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def expired(self) -> list[str]:
        """Forget the records whose time to live has passed, and return their names."""
        if self._ttl_s is None:
            return []
        limit = self._clock() - self._ttl_s
        late = [name for name, entry in self._entries.items() if entry.used_at <= limit]
        for name in late:
            self.remove(name)
        return late

    def is_expired(self, name: str) -> bool:
        entry = self._entries.get(name)
        if entry is None or self._ttl_s is None:
            return False
        return entry.used_at <= self._clock() - self._ttl_s

    def _push(self, name: str) -> None:
        heapq.heappush(self._heap, (self._rank(self._entries[name]), name))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(self._rank(entry), each) for each, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def _surplus(self) -> Iterator[str]:
        while self.num_bytes > self._max_bytes and self._heap:
            rank, name = heapq.heappop(self._heap)
            entry = self._entries.get(name)
            if entry is not None and self._rank(entry) == rank:
                self.remove(name)
                yield name
