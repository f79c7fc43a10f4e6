"""The engine loop's side of the tiers: asks for the blocks of waiting sequences, puts loaded blocks
into the KV pool, and hands published blocks to the writing thread.

A waiting sequence is held in the queue while its blocks are loaded. Other sequences go on. A
sequence never waits for longer than computing its blocks would take.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from engine.core.interfaces.request import UNSHARED
from engine.core.interfaces.stats import TierStats
from engine.runtime.model_runner import NULL_BLOCK, Bytes, Group, RunnerSpec
from engine.runtime.tiers.base import Tier, record_name
from engine.runtime.tiers.health import WatchedTier
from engine.runtime.tiers.jobs import LoadedBlocks, ReadJob, WriteJob
from engine.runtime.tiers.offload_worker import MAX_ALL_AHEAD_BYTES, OffloadWorker
from engine.runtime.tiers.peers import PeerTier
from engine.runtime.tiers.record import BlockKey, RecordShape, chain, root_key

if TYPE_CHECKING:
    from engine.runtime.kv_cache import KVCache
    from engine.runtime.sequence import Sequence as Seq
    from engine.runtime.tiers.block_server import BlockServer

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


class KVTiers:
    """`prompt_s` returns the time to compute a number of prompt tokens, or None if it is unknown.
    `first_state` is the index of checkpoint 0 among the states of the runner.
    """

    def __init__(
        self,
        kv: "KVCache",
        runner: BlockMover,
        mover: OffloadWorker,
        identity: bytes,
        shapes: dict[Group, RecordShape],
        prompt_s: Callable[[int], float | None],
        first_state: int = 0,
    ) -> None:
        self._kv = kv
        self._runner = runner
        self._mover = mover
        self.identity = identity
        self._shapes = shapes
        self._prompt_s = prompt_s
        self._first_state = first_state
        self._jobs: dict[ReadJob, Seq] = {}  # the sequence for which each job was started
        # The records that were handed to the tiers or came from them, and when.
        self._known: OrderedDict[tuple[Group, bytes], float] = OrderedDict()
        columns: list[Group] = []
        columns += ["window"] if kv.windows is not None else []
        columns += ["state"] if kv.states is not None else []
        self._columns = columns
        tiers = [each.tier for each in mover.tiers]
        self._peers = next((tier for tier in tiers if isinstance(tier, PeerTier)), None)
        self._has_own = any(tier is not self._peers for tier in tiers)
        self.block_server: BlockServer | None = None  # of a prefill engine

    def read_ahead(self, seq: "Seq") -> None:
        """Start to load the blocks that a waiting sequence lacks."""
        if seq.starts_over or seq.namespace.startswith(UNSHARED):
            return
        if not self._kv.sharing or not self._mover.has_readable:
            return
        if not self._has_own and not self._is_at_peer(seq):
            return
        if self._mover.ahead_bytes < MAX_ALL_AHEAD_BYTES:
            self._ask(seq)

    def is_loading(self, seq: "Seq") -> bool:
        """Whether a sequence should wait for blocks that are being loaded. Blocks that have arrived
        are put into the KV pool.
        """
        if seq.load is None and not seq.num_asked:
            self.read_ahead(seq)
        job = seq.load
        if job is None:
            return False
        self._install(job)
        if not job.is_done and not self._is_late(job) and not self._kv.pool.num_referenced:
            # Nothing runs. The loop waits instead of spinning.
            if self._mover.is_next(job):
                job.news.wait(WAIT_S)
            job.news.clear()
            self._install(job)
        # Nobody takes the blocks of a job whose own sequence has ended or starts without them.
        is_taken = job in self._jobs
        if is_taken and (job.ready or not (job.is_done or self._is_late(job))):
            return True
        self._end(seq, job)
        return seq.load is not None

    def forget(self, seq: "Seq") -> None:
        """Stop loading for a sequence that has ended."""
        job, seq.load = seq.load, None
        if job is not None and self._jobs.get(job) is seq:
            del self._jobs[job]
            self._mover.drop(job)

    def publish(self, seq: "Seq", count: int, is_end: bool) -> None:
        """Hand those of the first `count` blocks of a sequence to the tiers that are new to them.
        `is_end` says that the sequence does not run any longer.
        """
        if seq.namespace.startswith(UNSHARED):
            return
        self._extend_keys(seq, count)
        kv, now = self._kv, time.monotonic()
        ids: dict[Group, list[int]] = {"full": seq.blocks[:count]}
        if kv.windows is not None:
            ids["window"] = seq.window_blocks[:count]
        if kv.states is not None:
            ids["state"] = kv.states.entries(seq, count)
        for group, blocks in ids.items():
            self._offer(seq, group, blocks, now)
        if is_end and seq.num_matched:
            shape = self._shapes["full"]
            self._mover.use([record_name(shape, key) for key in seq.keys[: seq.num_matched]])

    def stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self._mover.tiers)

    def lost(self, keys: Sequence[bytes]) -> None:
        """Forget that tiers have these blocks. The writing thread calls this as well, if no tier
        could store them.
        """
        for key in keys:
            for group in self._shapes:
                self._known.pop((group, key), None)

    def close(self, gives_up: bool = False) -> None:
        if self.block_server is not None:
            self.block_server.close()
        self._mover.close(gives_up)

    def _is_at_peer(self, seq: "Seq") -> bool:
        """Whether a prefill node has the blocks of a sequence."""
        is_handed_over = seq.handover is not None and seq.handover.source is not None
        return is_handed_over and self._peers is not None

    def _ask(self, seq: "Seq") -> None:
        seq.num_asked += 1
        kv, tokens = self._kv, seq.tokens[:-1]
        num_blocks = len(tokens) // kv.block_size
        missing = num_blocks - len(kv.match(seq).blocks)
        is_at_peer = self._is_at_peer(seq)
        # The router has weighed the costs of a handover.
        block_s = None if is_at_peer else self._prompt_s(kv.block_size)
        if not missing or (block_s is not None and missing * block_s < MIN_GAIN_S):
            return
        self._extend_keys(seq, num_blocks)
        path = kv.radix.path(seq.namespace, tokens)
        first = len(path.blocks)
        if is_at_peer and seq.num_own is None:
            seq.num_own = first * kv.block_size
        wanted = seq.keys[min(first, num_blocks - 1)]
        for job in self._jobs:
            if first < len(job.places) and job.places[first].key == wanted:
                seq.load = job  # another sequence loads the same blocks
                return
        if is_at_peer:
            assert self._peers is not None and seq.handover is not None
            assert seq.handover.source is not None
            self._peers.expect(seq.keys[:num_blocks], seq.handover.source)
        self.lost(seq.keys[first:])  # blocks that do not come are computed, and offered again
        reaches = [column.reach for column in kv.radix.columns]
        seq.load = ReadJob(
            places=self._places(seq, num_blocks),
            first=first,
            sides=list(zip(self._columns, reaches, path.sides, strict=True)),
            block_s=block_s,
            asked_at=time.monotonic(),
            wait_s=PEER_WAIT_S if is_at_peer else FIRST_WAIT_S,
            stall_s=PEER_STALL_S if is_at_peer else STALL_S,
        )
        self._jobs[seq.load] = seq
        self._mover.read(seq.load)

    def _end(self, seq: "Seq", job: ReadJob) -> None:
        """Let a sequence start with the blocks that have come."""
        seq.load = None
        if self._jobs.get(job) is seq:
            del self._jobs[job]
            self._mover.drop(job)
        elif seq.num_asked < MAX_ASKED and self._mover.has_readable:
            self._ask(seq)  # what another sequence has loaded may be only a part of the prefix

    def _is_late(self, job: ReadJob) -> bool:
        now = time.monotonic()
        waited = now - job.asked_at
        if job.block_s is not None:
            worth_s = MAX_SHARE * job.block_s * (len(job.places) - job.first)
            if waited > max(worth_s, MIN_GAIN_S):
                return True
        if job.progress_at is None:
            return waited > job.wait_s + 2 * self._mover.backlog_s(job)
        return now - job.progress_at > job.stall_s

    def _install(self, job: ReadJob) -> None:
        """Copy loaded blocks into the KV pool, and publish them in the prefix cache."""
        room = MAX_STEP_BYTES
        seq = self._jobs.get(job)
        while seq is not None and room > 0 and job.ready:
            batch = job.ready.popleft()
            room -= batch.num_bytes
            self._mover.taken()
            if self._put(seq, batch):
                self._remember(seq, batch)
            elif batch.group == "full":
                self._mover.drop(job)  # the pool is full, or an earlier block was evicted
                job.ready.clear()

    def _put(self, seq: "Seq", batch: LoadedBlocks) -> bool:
        end = batch.first + len(batch.rows)
        rows = cast(Bytes, batch.rows)  # a list only if the runner is a `PinnedMover`
        if batch.group == "full":

            def fill(blocks: list[int]) -> None:
                if blocks:
                    self._runner.write_blocks("full", blocks, rows[-len(blocks) :])

            return self._kv.adopt(seq, batch.first, end, fill)
        first = self._first_state if batch.group == "state" else 0

        def fill_entries(entries: list[int]) -> None:
            ids = [first + entry for entry in entries]
            self._runner.write_blocks(batch.group, ids, rows)

        column = self._columns.index(batch.group)
        return self._kv.adopt_entries(seq, column, batch.first, end, fill_entries)

    def _remember(self, seq: "Seq", batch: LoadedBlocks) -> None:
        """Note where blocks came from."""
        now = time.monotonic()
        for key in seq.keys[batch.first : batch.first + len(batch.rows)]:
            self._known[batch.group, key] = now
        if batch.group == "full":
            count = len(batch.rows) * self._kv.block_size
            seq.loaded_from[batch.tier] = seq.loaded_from.get(batch.tier, 0) + count
            for tier in self._mover.tiers:
                tier.saved_tokens += count if tier.name == batch.tier else 0

    def _offer(self, seq: "Seq", group: Group, blocks: list[int], now: float) -> None:
        shape, known = self._shapes[group], self._known
        # If another engine will fetch the blocks, the tiers must have them now.
        since = seq.submitted_at if seq.keeps_blocks else now - OFFER_AGAIN_S
        new = [
            index
            for index, block in enumerate(blocks)
            if block != NULL_BLOCK and known.get((group, seq.keys[index]), since) <= since
        ]
        # Blocks that do not fit in the queue are offered again with the next ones.
        del new[max(0, self._mover.room() // max(1, shape.num_bytes)) :]
        if not new:
            return
        first = self._first_state if group == "state" else 0
        rows = self._runner.read_blocks(group, [first + blocks[index] for index in new])
        places = [self._place(seq, index) for index in new]
        for place in places:
            known[group, place.key] = now
        while len(known) > MAX_KNOWN:
            known.popitem(last=False)
        self._mover.write(WriteJob(shape, places, rows))  # after this, `lost` may be called

    def _extend_keys(self, seq: "Seq", count: int) -> None:
        if len(seq.keys) < count:
            size = self._kv.block_size
            root = root_key(self.identity, seq.namespace)
            chain(root, seq.tokens[: count * size], size, seq.keys)

    def _places(self, seq: "Seq", count: int) -> list[BlockKey]:
        return [self._place(seq, index) for index in range(count)]

    def _place(self, seq: "Seq", index: int) -> BlockKey:
        size = self._kv.block_size
        parent = seq.keys[index - 1] if index else root_key(self.identity, seq.namespace)
        tokens = seq.tokens[index * size : (index + 1) * size]
        return BlockKey(seq.keys[index], parent, tokens.tobytes())


def attach_tiers(
    kv: "KVCache",
    runner: BlockMover,
    spec: RunnerSpec,
    tiers: Sequence[Tier],
    identity: bytes,
    prompt_s: Callable[[int], float | None],
    kind: str = "full",
    make_mover: Callable[..., OffloadWorker] = OffloadWorker,
) -> OffloadWorker:
    """Give a KV cache its tiers, fastest first. `kind` is the kind of the records of full blocks.
    The caller starts the mover.
    """
    groups: dict[Group, str] = {"full": kind}
    if kv.windows is not None:
        groups["window"] = "window"
    if kv.states is not None:
        groups["state"] = "state"
    shapes = {
        group: RecordShape(group, each, spec.block_size, runner.bytes_per_block(group))
        for group, each in groups.items()
    }
    mover = make_mover([WatchedTier(tier) for tier in tiers], identity, shapes)
    kv.tiers = KVTiers(kv, runner, mover, identity, shapes, prompt_s, spec.max_slots)
    mover.on_lost = kv.tiers.lost
    return mover
