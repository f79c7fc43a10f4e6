"""What the engine loop asks the threads of the tiers to do, and the blocks that come back."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.runtime.model_runner import Bytes, Group
from engine.runtime.tiers.health import WatchedTier
from engine.runtime.tiers.record import BlockKey, RecordShape


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """Loaded blocks `first` .. of a job, one row each."""

    group: Group
    first: int
    rows: "Bytes | list[Bytes]"
    tier: str

    @property
    def num_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @property
    def own_bytes(self) -> int:
        """The memory that the batch itself takes. Rows of a list are lent by their tier."""
        return 0 if isinstance(self.rows, list) else self.rows.nbytes


@dataclass(eq=False, slots=True)
class ReadJob:
    """Loads the blocks of one prefix. Blocks are numbered from the start of the sequence.

    The KV pool has the blocks before `first`. `sides` has a list for each side column of the prefix
    cache: its group, its reach, and which blocks have an entry there.
    """

    places: Sequence[BlockKey]
    first: int
    sides: Sequence[tuple[Group, int, list[int]]]
    # The seconds that computing one block would take. None if no step was measured yet.
    block_s: float | None
    asked_at: float
    wait_s: float  # max wait for the first block, besides the time that earlier jobs take
    stall_s: float  # max wait for each further block
    plan: "list[Segment] | None" = None  # what is left to load; None: not looked up yet
    ready: deque[LoadedBlocks] = field(default_factory=deque)
    progress_at: float | None = None  # when the last batch came, or when the lookup was done
    expected_s: float = 0.0  # how long loading will take
    is_cancelled: bool = False
    news: threading.Event = field(default_factory=threading.Event)
    is_done: bool = False

    @property
    def ahead_bytes(self) -> int:
        return sum(batch.own_bytes for batch in list(self.ready))


@dataclass(slots=True)
class Segment:
    """Consecutive blocks that one tier has."""

    tier: WatchedTier
    group: Group
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Blocks to store. `rows` returns their bytes. It may wait for the device."""

    shape: RecordShape
    places: Sequence[BlockKey]
    rows: Callable[[], Bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.places) * self.shape.num_bytes


def run_length(has: list[bool], start: int) -> int:
    """How many consecutive values from `start` on are true."""
    end = start
    while end < len(has) and has[end]:
        end += 1
    return end - start


def cut(segment: Segment, end: int) -> Segment:
    count = min(segment.count, end - segment.first)
    return Segment(segment.tier, segment.group, segment.first, count)
