"""The engine loop's side of the tiers: asks for the blocks of waiting sequences, puts loaded blocks
into the KV pool, and hands published blocks to the writing thread.

A waiting sequence is held in the queue while its blocks are loaded. Other sequences go on. A
sequence never waits for longer than computing its blocks would take.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from msgspec.structs import replace

from engine.core.interfaces.handover import Handover
from engine.core.interfaces.request import UNSHARED, GenerateRequest, TokenDelta
from engine.core.interfaces.stats import EngineStats, TierStats
from engine.runtime.groups.states import StateGroup
from engine.runtime.groups.windows import WindowGroup
from engine.runtime.kv_cache import KVCache
from engine.runtime.model_runner import NULL_BLOCK, Bytes, Group, RunnerSpec
from engine.runtime.sequence import CacheExtension
from engine.runtime.sequence import Sequence as Seq
from engine.runtime.tiers.base import Tier, record_name
from engine.runtime.tiers.health import WatchedTier
from engine.runtime.tiers.jobs import LoadedBlocks, ReadJob, WriteJob
from engine.runtime.tiers.offload_worker import MAX_ALL_AHEAD_BYTES, OffloadWorker
from engine.runtime.tiers.peers import PeerTier
from engine.runtime.tiers.record import BlockKey, RecordShape, chain, root_key

if TYPE_CHECKING:
    from engine.runtime.tiers.block_server import BlockServer

log = logging.getLogger(__name__)

MAX_STEP_BYTES = 16 * 2**20  # bytes that are copied to the KV pool between two steps
MIN_GAIN_S = 0.005  # tiers are not asked for blocks that can be computed within this time
# A sequence waits for its blocks no longer than this part of the time to compute them.
MAX_SHARE = 0.8
FIRST_WAIT_S, STALL_S = 0.25, 0.15  # the waits of a `ReadJob`
# The same for blocks of a prefill node: a decode node should not compute prompts.
PEER_WAIT_S, PEER_STALL_S = 5.0, 2.0
WAIT_S = 0.001  # the loop waits this long for blocks at a time, if nothing else runs
MAX_ASKED = 3
# A block that was stored is offered to the tiers again after this time, if it is used again. A tier
# may have evicted it.
OFFER_AGAIN_S = 600.0
MAX_KNOWN = 2**17


@runtime_checkable
class BlockMover(Protocol):
    """A runner that can copy blocks between the memory of its device and the host."""

    @property
    def kv_identity(self) -> str:
        """Describes whatever changes the bytes of a block besides the weights."""
        ...

    def bytes_per_block(self, group: Group) -> int:
        """Bytes of a block in all layers of a group. 0 if there are no such blocks."""
        ...

    def read_blocks(self, group: Group, blocks: Sequence[int]) -> Callable[[], Bytes]:
        """Copy blocks to the host. The returned function waits for the copy, and may be called in
        another thread. Later steps may overwrite the blocks.
        """
        ...

    def write_blocks(self, group: Group, blocks: Sequence[int], rows: Bytes) -> None:
        """Copy rows of bytes from the host to blocks. Later steps see them. A list of rows is given
        only to a `PinnedMover`.
        """
        ...


@runtime_checkable
class PinnedMover(Protocol):
    """A runner whose device reads pinned host memory by itself."""

    def row_maker(self) -> Callable[[int], Bytes] | None:
        """Makes memory for a block. None if the device reads any memory."""
        ...


@dataclass(slots=True)
class Loading:
    """What the tiers know of a sequence."""

    keys: list[bytes] = field(default_factory=list)  # the content keys of its first blocks
    job: ReadJob | None = None  # loads blocks while the sequence waits
    num_asked: int = 0  # how often tiers were asked
    loaded_from: dict[str, int] = field(default_factory=dict)  # tokens that came from each tier
    handover: Handover | None = None  # a prefill node has the blocks of the prompt
    num_own: int | None = None  # tokens that were cached here before blocks were fetched there
    # If another engine will fetch the blocks of the prompt: when the request came
    kept_since: float | None = None


class KVTiers(CacheExtension):
    """`prompt_s` returns the time to compute a number of prompt tokens, or None if it is unknown.
    `columns` are the side columns of the cache. `first_state` is the index of checkpoint 0 among
    the states of the runner. If the tiers raise, the engine goes on without them. No request
    depends on them.
    """

    def __init__(
        self,
        runner: BlockMover,
        mover: OffloadWorker,
        identity: bytes,
        shapes: dict[Group, RecordShape],
        prompt_s: Callable[[int], float | None],
        columns: list[Group],
        first_state: int = 0,
    ) -> None:
        self._runner = runner
        self.mover = mover
        self.identity = identity
        self._shapes = shapes
        self._prompt_s = prompt_s
        self._columns = columns
        self._first_state = first_state
        self._of: dict[Seq, Loading] = {}
        self._jobs: dict[ReadJob, Seq] = {}  # the sequence for which each job was started
        # The records that were handed to the tiers or came from them, and when.
        self._known: OrderedDict[tuple[Group, bytes], float] = OrderedDict()
        tiers = [each.tier for each in mover.tiers]
        self._peers = next((tier for tier in tiers if isinstance(tier, PeerTier)), None)
        self._has_own = any(tier is not self._peers for tier in tiers)
        self.has_failed = False
        self._last_stats: tuple[TierStats, ...] = ()  # if they have failed
        self.block_server: BlockServer | None = None  # of a prefill engine

    @contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("the cache tiers failed, and are not used any more")
            self._last_stats = tuple(replace(each, is_up=False) for each in self.tier_stats())
            self.has_failed = True
            self._end_all(gives_up=True)

    def queued(
        self, seq: Seq, request: GenerateRequest, submitted_at: float, queued_at: float
    ) -> None:
        kept_since = submitted_at if request.keeps_blocks else None
        self._of[seq] = Loading(handover=request.handover, kept_since=kept_since)

    def read_ahead(self, seq: Seq, cache: KVCache) -> None:
        """Start to load the blocks that a waiting sequence lacks."""
        if not self.has_failed:
            with self._giving_up_on_error():
                self._read_ahead(seq, cache)

    def is_loading(self, seq: Seq, cache: KVCache) -> bool:
        """Whether a sequence should wait for blocks that are being loaded. Blocks that have arrived
        are put into the KV pool.
        """
        if not self.has_failed:
            with self._giving_up_on_error():
                return self._is_loading(seq, cache)
        return False

    def published(self, seq: Seq, cache: KVCache, count: int, is_end: bool) -> None:
        """Hand those of the first `count` blocks to the tiers that are new to them."""
        if not self.has_failed:
            with self._giving_up_on_error():
                self._publish(seq, cache, count, is_end)

    def is_reading(self, seq: Seq) -> bool:
        return self._of[seq].job is not None if seq in self._of else False

    def num_reused(self, seq: Seq, num_found: int) -> int:
        """Tokens that a prefill node has computed for this request do not count as cached."""
        own = self._of[seq]
        if own.handover is None or own.num_own is None:
            return num_found
        return min(num_found, max(own.num_own, own.handover.prefilled.num_cached))

    def complete(self, seq: Seq, delta: TokenDelta, is_first: bool, now: float) -> TokenDelta:
        if delta.timeline is None:
            return delta
        own = self._of[seq]
        prefilled = None if own.handover is None else own.handover.prefilled
        timeline = replace(delta.timeline, loaded_from=own.loaded_from, prefilled=prefilled)
        return replace(delta, timeline=timeline)

    def ended(self, seq: Seq) -> None:
        """Stop loading for a sequence that has ended."""
        own = self._of.pop(seq, None)
        if own is not None and own.job is not None and self._jobs.get(own.job) is seq:
            del self._jobs[own.job]
            self.mover.drop(own.job)

    def tier_stats(self) -> tuple[TierStats, ...]:
        return self._last_stats or tuple(tier.stats() for tier in self.mover.tiers)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return replace(stats, tiers=self.tier_stats())

    def close(self) -> None:
        if not self.has_failed:
            self._end_all(gives_up=False)

    def _end_all(self, gives_up: bool) -> None:
        if self.block_server is not None:
            self.block_server.close()
        self.mover.close(gives_up)
        for own in self._of.values():
            own.job = None
        self._jobs.clear()

    def _read_ahead(self, seq: Seq, cache: KVCache) -> None:
        if seq.starts_over or seq.namespace.startswith(UNSHARED):
            return
        if not cache.sharing or not self.mover.has_readable:
            return
        if not self._has_own and not self._is_at_peer(seq):
            return
        if self.mover.ahead_bytes < MAX_ALL_AHEAD_BYTES:
            self._ask(seq, cache)

    def _is_loading(self, seq: Seq, cache: KVCache) -> bool:
        own = self._of[seq]
        if own.job is None and not own.num_asked:
            self._read_ahead(seq, cache)
        job = own.job
        if job is None:
            return False
        self._install(job, cache)
        if not job.is_done and not self._is_late(job) and not cache.pool.num_referenced:
            # Nothing runs. The loop waits instead of spinning.
            if self.mover.is_next(job):
                job.news.wait(WAIT_S)
            job.news.clear()
            self._install(job, cache)
        # Nobody takes the blocks of a job whose own sequence has ended or starts without them.
        is_taken = job in self._jobs
        if is_taken and (job.ready or not (job.is_done or self._is_late(job))):
            return True
        self._end(seq, job, cache)
        return own.job is not None

    def _publish(self, seq: Seq, cache: KVCache, count: int, is_end: bool) -> None:
        if seq.namespace.startswith(UNSHARED):
            return
        own = self._of[seq]
        self._extend_keys(seq, count, cache.block_size)
        now = time.monotonic()
        ids: dict[Group, list[int]] = {"full": seq.blocks[:count]}
        for name, group in zip(self._columns, cache.groups, strict=True):
            ids[name] = group.entries(seq, count)
        for name, blocks in ids.items():
            self._offer(seq, name, blocks, now, cache.block_size)
        if is_end and seq.num_matched:
            shape = self._shapes["full"]
            self.mover.use([record_name(shape, key) for key in own.keys[: seq.num_matched]])

    def lost(self, keys: Sequence[bytes]) -> None:
        """Forget that tiers have these blocks. The writing thread calls this as well, if no tier
        could store them.
        """
        for key in keys:
            for group in self._shapes:
                self._known.pop((group, key), None)

    def _is_at_peer(self, seq: Seq) -> bool:
        """Whether a prefill node has the blocks of a sequence."""
        handover = self._of[seq].handover
        is_handed_over = handover is not None and handover.source is not None
        return is_handed_over and self._peers is not None

    def _ask(self, seq: Seq, kv: KVCache) -> None:
        own, tokens = self._of[seq], seq.tokens[:-1]
        own.num_asked += 1
        num_blocks = len(tokens) // kv.block_size
        missing = num_blocks - len(kv.match(seq).blocks)
        is_at_peer = self._is_at_peer(seq)
        # The router has weighed the costs of a handover.
        block_s = None if is_at_peer else self._prompt_s(kv.block_size)
        if not missing or (block_s is not None and missing * block_s < MIN_GAIN_S):
            return
        self._extend_keys(seq, num_blocks, kv.block_size)
        path = kv.radix.path(seq.namespace, tokens)
        first = len(path.blocks)
        if is_at_peer and own.num_own is None:
            own.num_own = first * kv.block_size
        wanted = own.keys[min(first, num_blocks - 1)]
        for job in self._jobs:
            if first < len(job.places) and job.places[first].key == wanted:
                own.job = job  # another sequence loads the same blocks
                return
        if is_at_peer:
            assert self._peers is not None and own.handover is not None
            assert own.handover.source is not None
            self._peers.expect(own.keys[:num_blocks], own.handover.source)
        self.lost(own.keys[first:])  # blocks that do not come are computed, and offered again
        reaches = [column.reach for column in kv.radix.columns]
        own.job = job = ReadJob(
            places=[self._place(seq, index, kv.block_size) for index in range(num_blocks)],
            first=first,
            sides=list(zip(self._columns, reaches, path.sides, strict=True)),
            block_s=block_s,
            asked_at=time.monotonic(),
            wait_s=PEER_WAIT_S if is_at_peer else FIRST_WAIT_S,
            stall_s=PEER_STALL_S if is_at_peer else STALL_S,
        )
        self._jobs[job] = seq
        self.mover.read(job)

    def _end(self, seq: Seq, job: ReadJob, cache: KVCache) -> None:
        """Let a sequence start with the blocks that have come."""
        own = self._of[seq]
        own.job = None
        if self._jobs.get(job) is seq:
            del self._jobs[job]
            self.mover.drop(job)
        elif own.num_asked < MAX_ASKED and self.mover.has_readable:
            # What another sequence has loaded may be only a part of the prefix.
            self._ask(seq, cache)

    def _is_late(self, job: ReadJob) -> bool:
        now = time.monotonic()
        waited = now - job.asked_at
        if job.block_s is not None:
            worth_s = MAX_SHARE * job.block_s * (len(job.places) - job.first)
            if waited > max(worth_s, MIN_GAIN_S):
                return True
        if job.progress_at is None:
            return waited > job.wait_s + 2 * self.mover.backlog_s(job)
        return now - job.progress_at > job.stall_s

    def _install(self, job: ReadJob, cache: KVCache) -> None:
        """Copy loaded blocks into the KV pool, and publish them in the prefix cache."""
        room = MAX_STEP_BYTES
        seq = self._jobs.get(job)
        while seq is not None and room > 0 and job.ready:
            batch = job.ready.popleft()
            room -= batch.num_bytes
            self.mover.taken()
            if self._put(seq, batch, cache):
                self._remember(seq, batch, cache.block_size)
            elif batch.group == "full":
                self.mover.drop(job)  # the pool is full, or an earlier block was evicted
                job.ready.clear()

    def _put(self, seq: Seq, batch: LoadedBlocks, cache: KVCache) -> bool:
        end = batch.first + len(batch.rows)
        rows = cast(Bytes, batch.rows)  # a list only if the runner is a `PinnedMover`
        if batch.group == "full":

            def fill(blocks: list[int]) -> None:
                if blocks:
                    self._runner.write_blocks("full", blocks, rows[-len(blocks) :])

            return cache.adopt(seq, batch.first, end, fill)
        first = self._first_state if batch.group == "state" else 0

        def fill_entries(entries: list[int]) -> None:
            ids = [first + entry for entry in entries]
            self._runner.write_blocks(batch.group, ids, rows)

        column = self._columns.index(batch.group)
        return cache.adopt_entries(seq, column, batch.first, end, fill_entries)

    def _remember(self, seq: Seq, batch: LoadedBlocks, block_size: int) -> None:
        """Note where blocks came from."""
        now, own = time.monotonic(), self._of[seq]
        for key in own.keys[batch.first : batch.first + len(batch.rows)]:
            self._known[batch.group, key] = now
        if batch.group == "full":
            count = len(batch.rows) * block_size
            own.loaded_from[batch.tier] = own.loaded_from.get(batch.tier, 0) + count
            for tier in self.mover.tiers:
                tier.saved_tokens += count if tier.name == batch.tier else 0

    def _offer(
        self, seq: Seq, group: Group, blocks: list[int], now: float, block_size: int
    ) -> None:
        shape, known, own = self._shapes[group], self._known, self._of[seq]
        # If another engine will fetch the blocks, the tiers must have them now.
        since = now - OFFER_AGAIN_S if own.kept_since is None else own.kept_since
        new = [
            index
            for index, block in enumerate(blocks)
            if block != NULL_BLOCK and known.get((group, own.keys[index]), since) <= since
        ]
        # Blocks that do not fit in the queue are offered again with the next ones.
        del new[max(0, self.mover.room() // max(1, shape.num_bytes)) :]
        if not new:
            return
        first = self._first_state if group == "state" else 0
        rows = self._runner.read_blocks(group, [first + blocks[index] for index in new])
        places = [self._place(seq, index, block_size) for index in new]
        for place in places:
            known[group, place.key] = now
        while len(known) > MAX_KNOWN:
            known.popitem(last=False)
        self.mover.write(WriteJob(shape, places, rows))  # after this, `lost` may be called

    def _extend_keys(self, seq: Seq, count: int, size: int) -> None:
        keys = self._of[seq].keys
        if len(keys) < count:
            root = root_key(self.identity, seq.namespace)
            chain(root, seq.tokens[: count * size], size, keys)

    def _place(self, seq: Seq, index: int, size: int) -> BlockKey:
        keys = self._of[seq].keys
        parent = keys[index - 1] if index else root_key(self.identity, seq.namespace)
        tokens = seq.tokens[index * size : (index + 1) * size]
        return BlockKey(keys[index], parent, tokens.tobytes())


def attach_tiers(
    kv: KVCache,
    runner: BlockMover,
    spec: RunnerSpec,
    tiers: Sequence[Tier],
    identity: bytes,
    prompt_s: Callable[[int], float | None],
    kind: str = "full",
    make_mover: Callable[..., OffloadWorker] = OffloadWorker,
) -> KVTiers:
    """Give a KV cache its tiers, fastest first. `kind` is the kind of the records of full blocks.
    The caller starts their mover.
    """
    columns: list[Group] = ["window"] if kv.find(WindowGroup) is not None else []
    columns += ["state"] if kv.find(StateGroup) is not None else []
    groups: dict[Group, str] = {"full": kind, **{each: each for each in columns}}
    shapes = {
        group: RecordShape(group, each, spec.block_size, runner.bytes_per_block(group))
        for group, each in groups.items()
    }
    mover = make_mover([WatchedTier(tier) for tier in tiers], identity, shapes)
    attached = KVTiers(runner, mover, identity, shapes, prompt_s, columns, spec.max_slots)
    mover.on_lost = attached.lost
    kv.attach(attached)
    return attached
