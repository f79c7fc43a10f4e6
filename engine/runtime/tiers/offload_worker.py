"""Moves blocks between host memory and tiers, in two threads beside the engine loop.

The reading thread works on `ReadJob`s: it looks for the blocks that a waiting sequence lacks, and
loads them in small batches, so that the sequence can start with those that came in time. The
writing thread stores what the engine loop hands to it. If it can't keep up, blocks are dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from engine.runtime.groups.aux_block_state import resumable
from engine.runtime.model_runner import Bytes, Group
from engine.runtime.tiers.base import Loaded, Record, Wanted, record_name
from engine.runtime.tiers.health import WatchedTier
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.jobs import (
    LoadedBlocks,
    ReadJob,
    Segment,
    WriteJob,
    cut,
    run_length,
)
from engine.runtime.tiers.record import BlockKey, RecordShape

log = logging.getLogger(__name__)

BATCH_BYTES = 4 * 2**20  # bytes that are read from a tier at a time
LENT_BYTES = 64 * 2**20  # the same for a tier that lends its blocks: about 1.3 ms of a GPU's bus
MAX_AHEAD_BYTES = 64 * 2**20  # a job may be ahead of the engine loop by this many bytes
MAX_ALL_AHEAD_BYTES = 256 * 2**20  # all jobs together, also those that are done
MAX_QUEUED_BYTES = 256 * 2**20  # bytes that wait to be written
PROBE_BLOCKS = 2  # blocks that are loaded to measure how fast a tier is
TIDY_INTERVAL_S = 1.0
CLOSE_S = 5.0  # at the end, the queue is written for at most this long
STUCK_S = 1.0  # a call that takes longer than this counts as stuck


class OffloadWorker:
    def __init__(
        self,
        tiers: Sequence[WatchedTier],
        identity: bytes,
        shapes: dict[Group, RecordShape],
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self.tiers = tiers
        self._identity = identity
        self._shapes = shapes
        # Called with the keys of blocks that no tier could store.
        self.on_lost: Callable[[Sequence[bytes]], None] = lambda keys: None
        self._max_queued_bytes = max_queued_bytes
        self._reads: list[ReadJob] = []
        self._kept: list[ReadJob] = []  # jobs whose blocks the engine loop may still take
        self._writes: deque[WriteJob] = deque()
        self._used: deque[str] = deque()
        self._queued_bytes = 0
        self._wakes_reader, self._wakes_writer = threading.Condition(), threading.Condition()
        self._reading_since: float | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.reach_tiers()
        for name, run in (("tier-reader", self._run_reader), ("tier-writer", self._run_writer)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def reach_tiers(self) -> None:
        """Ask each tier once, so that those which need a connection have it before the first
        request. A request does not wait as long as it may take to open one.
        """
        for tier in self.tiers:
            with tier.reading():
                tier.tier.find([record_name(self._shapes["full"], b"")])

    @property
    def has_readable(self) -> bool:
        """Whether some tier can be read, and the reading thread is not stuck in a call."""
        since = self._reading_since
        is_stuck = since is not None and time.monotonic() - since > STUCK_S
        return not is_stuck and any(tier.is_readable for tier in self.tiers)

    @property
    def ahead_bytes(self) -> int:
        """Bytes that were loaded, and that the engine loop has not taken yet."""
        return sum(job.ahead_bytes for job in self._kept)

    def is_next(self, job: ReadJob) -> bool:
        return bool(self._reads) and self._reads[0] is job

    def backlog_s(self, job: ReadJob) -> float:
        """How long a job and those before it will take, as far as that is known."""
        total = 0.0
        for each in list(self._reads):
            total += each.expected_s
            if each is job:
                break
        return total

    def room(self) -> int:
        """How many bytes can be queued for the writing thread."""
        is_open = not self._closing and any(tier.is_writable for tier in self.tiers)
        return self._max_queued_bytes - self._queued_bytes if is_open else 0

    @property
    def is_writing(self) -> bool:
        """Whether blocks wait to be written."""
        return self._queued_bytes > 0

    def read(self, job: ReadJob) -> None:
        self._kept.append(job)
        with self._wakes_reader:
            self._reads.append(job)
            self._wakes_reader.notify()

    def taken(self) -> None:
        """Called when the engine loop has taken batches. A job may then continue."""
        with self._wakes_reader:
            self._wakes_reader.notify()

    def drop(self, job: ReadJob) -> None:
        """The engine loop takes no more blocks of a job. If it is not done, it ends."""
        job.is_cancelled = True
        self._kept = [each for each in self._kept if each is not job]
        self.taken()

    def write(self, job: WriteJob) -> None:
        """Queue blocks to be stored."""
        with self._wakes_writer:
            self._queued_bytes += job.num_bytes
            self._writes.append(job)
            self._wakes_writer.notify()

    def use(self, names: Sequence[str]) -> None:
        """Note that blocks were used, so that tiers evict them later."""
        self._used.extend(names)

    def close(self, gives_up: bool = False) -> None:
        """Write what is queued, then end both threads. With `gives_up`, nothing more is written,
        and the threads end when their current call returns.
        """
        self._closing = True
        if gives_up:
            self._writes.clear()
        for wakes in (self._wakes_reader, self._wakes_writer):
            with wakes:
                wakes.notify_all()
        for thread in () if gives_up else self._threads:
            thread.join(CLOSE_S)

    def _run_reader(self) -> None:
        while not self._closing:
            job = self._next_read()
            if job is None:
                with self._wakes_reader:
                    self._wakes_reader.wait_for(
                        lambda: self._closing or self._next_read() is not None, TIDY_INTERVAL_S
                    )
            else:
                self.read_some(job)

    def _next_read(self) -> ReadJob | None:
        """The first job that may load more."""
        most = MAX_AHEAD_BYTES if self.ahead_bytes < MAX_ALL_AHEAD_BYTES else 0
        may = (each for each in self._reads if each.is_cancelled or each.ahead_bytes < most)
        return next(may, None)

    def read_some(self, job: ReadJob) -> None:
        """Look up the blocks of a job, or load its next batch."""
        self._reading_since = time.monotonic()
        try:
            if job.is_cancelled:
                self._finish(job)
            elif job.plan is None:
                job.plan = self._plan(job)
                job.expected_s = sum(self._expected_s(each) for each in job.plan)
            elif job.plan:
                self._load_batch(job, job.plan)
            if not job.plan:
                self._finish(job)
        except Exception:
            log.exception("blocks could not be loaded from a tier")
            self._finish(job)
        finally:
            self._reading_since = None
            job.progress_at = time.monotonic()
            job.news.set()

    def _finish(self, job: ReadJob) -> None:
        job.is_done = True
        with self._wakes_reader:
            if job in self._reads:
                self._reads.remove(job)

    def _expected_s(self, segment: Segment) -> float:
        return segment.tier.load_seconds(segment.count * self._shapes[segment.group].num_bytes)

    def _plan(self, job: ReadJob) -> list[Segment]:
        """The blocks to load. None are loaded if computing them would take less time."""
        full = self._find(job.places, job.first)
        end = full[-1].first + full[-1].count if full else job.first
        if not job.sides:
            return self._worthwhile(job, full)
        sides: list[Segment] = []
        columns: list[tuple[int, list[int]]] = []
        for group, reach, entries in job.sides:
            has = (entries + [0] * end)[:end]
            found = self._find_any(group, job.places, [i for i in range(end) if not has[i]])
            for each in found:
                has[each.first] = 1
            sides += found
            columns.append((reach, has))
        end = resumable(end, columns)
        reaches = {group: reach for group, reach, _ in job.sides}
        needed = [each for each in sides if end - reaches[each.group] <= each.first < end]
        if end <= job.first and not needed:
            return []
        full = [cut(each, end) for each in full if each.first < end]
        # Entries of side columns come last, because they belong to blocks of the prefix cache.
        return self._worthwhile(job, full + needed)

    def _worthwhile(self, job: ReadJob, plan: list[Segment]) -> list[Segment]:
        count = sum(each.count for each in plan if each.group == "full")
        if job.block_s is None or not plan:
            return plan
        load_s = sum(self._expected_s(each) for each in plan)
        if load_s < job.block_s * count:
            return plan
        first = plan[0]
        if first.group != "full" or job.sides or not first.tier.must_probe:
            return []
        return [cut(first, first.first + PROBE_BLOCKS)]

    def _find(self, places: Sequence[BlockKey], start: int) -> list[Segment]:
        """The consecutive full blocks from `start` on that tiers have, each in the first tier that
        has it.
        """
        shape, found = self._shapes["full"], list[Segment]()
        names = [record_name(shape, place.key) for place in places]
        answers: dict[WatchedTier, tuple[int, list[bool]]] = {}  # first block, which blocks it has
        while start < len(names):
            for tier in self.tiers:
                if tier not in answers and tier.is_readable:
                    with tier.reading():
                        answers[tier] = start, tier.tier.find(names[start:])
                since, has = answers.get(tier, (0, []))
                if count := run_length(has, start - since):
                    found.append(Segment(tier, "full", start, count))
                    start += count
                    break
                tier.num_misses += tier in answers
            else:
                break
        return found

    def _find_any(
        self, group: Group, places: Sequence[BlockKey], indices: list[int]
    ) -> list[Segment]:
        """The given blocks that tiers have, each as a segment of one block."""
        shape, found = self._shapes[group], list[Segment]()
        for tier in self.tiers:
            if not indices or not tier.is_readable:
                continue
            has: list[bool] = []
            with tier.reading():
                has = tier.tier.find([record_name(shape, places[i].key) for i in indices])
            found += [
                Segment(tier, group, index, 1)
                for index, is_there in zip(indices, has, strict=False)
                if is_there
            ]
            known = {each.first for each in found}
            indices = [index for index in indices if index not in known]
        return found

    def _load_batch(self, job: ReadJob, plan: list[Segment]) -> None:
        segment = plan[0]
        shape = self._shapes[segment.group]
        most = LENT_BYTES if segment.tier.lends else BATCH_BYTES
        count = min(segment.count, max(1, most // max(1, shape.num_bytes)))
        places = job.places[segment.first : segment.first + count]
        began = time.monotonic()
        rows, num_bad = _load(segment.tier, Wanted(shape, self._identity, places))
        good = len(rows)
        segment.tier.loaded(good, good * shape.num_bytes, num_bad, time.monotonic() - began)
        if good:
            job.ready.append(LoadedBlocks(segment.group, segment.first, rows, segment.tier.name))
        segment.first += count
        segment.count -= count
        if good < count and segment.group == "full":
            plan.clear()  # blocks after a missing one are of no use
        elif not segment.count:
            plan.pop(0)

    def _run_writer(self) -> None:
        tidied_at = 0.0
        while True:
            with self._wakes_writer:
                self._wakes_writer.wait_for(
                    lambda: self._closing or bool(self._writes), TIDY_INTERVAL_S
                )
                job = self._writes.popleft() if self._writes else None
            if job is not None:
                self.write_one(job)
            now = time.monotonic()
            if now - tidied_at >= TIDY_INTERVAL_S:
                tidied_at = now
                self.tidy_up()
            if self._closing and not self._writes:
                break
        for tier in self.tiers:
            with tier.writing():
                tier.tier.close()

    def write_one(self, job: WriteJob) -> None:
        try:
            rows = job.rows()
            records = [
                Record(job.shape, self._identity, place, row)
                for place, row in zip(job.places, rows, strict=True)
            ]
            if not self._store(records):
                self.on_lost([place.key for place in job.places])
        except Exception:
            log.exception("blocks could not be written to a tier")
            self.on_lost([place.key for place in job.places])
        finally:
            with self._wakes_writer:
                self._queued_bytes -= job.num_bytes

    def _store(self, records: list[Record]) -> bool:
        """Store blocks in all tiers. Returns whether one of them has them now."""
        is_stored = False
        for tier in self.tiers:
            began, count = time.monotonic(), -1
            if tier.is_writable:
                with tier.writing():
                    count = tier.tier.store(records)
            if count >= 0:
                is_stored = True
                tier.stored(count, count * records[0].num_bytes, time.monotonic() - began)
        return is_stored

    def tidy_up(self) -> None:
        used = [self._used.popleft() for _ in range(len(self._used))]
        for tier in self.tiers:
            if used and tier.is_readable:
                with tier.writing():
                    tier.tier.use(used)
            tier.tidy_up()


def _load(tier: WatchedTier, wanted: Wanted) -> tuple["Bytes | list[Bytes]", int]:
    """The blocks before the first one that is missing or bad, and how many are bad."""
    rows: Bytes | list[Bytes] = []
    results: list[Loaded] = []
    with tier.reading():
        if isinstance(tier.tier, HostTier) and tier.lends:
            rows = tier.tier.lend(wanted)
            return rows, 0
        rows = np.empty((len(wanted.places), wanted.shape.num_bytes), np.uint8)
        results = tier.tier.load(wanted, rows)
    good = next((i for i, each in enumerate(results) if each is not Loaded.OK), len(results))
    return rows[:good], sum(each is Loaded.BAD for each in results)
