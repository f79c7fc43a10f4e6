"""The engines of a history: the real loop, scheduler and cache over a level's model, one turn at a
time.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from engine.core.interfaces.request import Deltas, FromEngine, ToEngine
from engine.ipc import transport
from engine.ipc.transport import LENGTH, FrameDecoder, encode_frame, frames_of
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.groups.states import state_group
from engine.runtime.groups.windows import WindowTable, window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import ALL_ALLOWED, U32, BatchInputs, ModelRunner
from engine.runtime.prefill_throttle import PrefillThrottle
from engine.runtime.radix_cache import RadixCache
from engine.runtime.requests.grammar import Grammars, MaskJob, MaskRow, MaskWriter
from engine.runtime.requests.images import ImageStore
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import Row
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts
from engine.runtime.tiers.base import Loaded, Record, Tier, Wanted
from engine.runtime.tiers.disk import DiskTier
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import BlockMover, KVTiers, attach_tiers
from engine.runtime.tiers.record import identity_of
from engine.runtime.tiers.redis_tier import RedisTier
from tests.oracle.histories import Shape
from tests.support.toy_engine.engine import FixedPrice
from tests.support.toy_engine.tiers import InlineMover

TIER_BYTES = 2**20
_ENCODE = msgspec.msgpack.Encoder().encode


@dataclass
class Work:
    """What engines did, or have to do at most."""

    prompt_tokens: int = 0  # computed, not cached
    tokens: int = 0
    steps: int = 0
    messages: int = 0  # with deltas
    loaded_blocks: int = 0

    def add(self, inputs: BatchInputs) -> None:
        """A step runs."""
        self.steps += 1
        self.tokens += len(inputs.token_ids)
        starts, positions = inputs.query_start.tolist(), inputs.positions.tolist()
        for row, num_prompt in enumerate(inputs.num_prompt.tolist()):
            of_row = positions[starts[row] : starts[row + 1]]
            self.prompt_tokens += sum(each < num_prompt for each in of_row)


class WireChannel:
    """A channel whose messages cross as bytes, as between two processes. With `limits` "exact",
    each message has as many bytes as a frame may have, and with "least" so has the longest delta,
    so that most deltas cross apart.
    """

    def __init__(self, limits: str = "") -> None:
        self._limits = limits
        self.inbox: list[bytes] = []
        self.outbox: list[bytes] = []
        self._from_wire: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)
        self._to_wire: FrameDecoder[ToEngine] = FrameDecoder(ToEngine)
        self.num_deltas = 0  # messages with deltas
        self.begun: Counter[str] = Counter()  # how often requests were told that they begin

    def put(self, message: ToEngine) -> None:
        self.inbox += self._frames(message)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return self._read(messages, self._to_wire)

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self.num_deltas += 1
            self.begun.update(each.request_id for each in message.deltas if each.begins)
        self.outbox += self._frames(message)

    def take(self) -> list[FromEngine]:
        messages, self.outbox = self.outbox, []
        return self._read(messages, self._from_wire)

    def _frames(self, message: Any) -> list[bytes]:
        if not self._limits:
            return [encode_frame(message)]
        most = len(_ENCODE(message))
        if self._limits == "least" and isinstance(message, Deltas):
            most = max(len(_ENCODE(Deltas((each,)))) for each in message.deltas)
        with mock.patch.object(transport, "MAX_FRAME_BYTES", most):
            return frames_of(message)

    def _read(self, frames: list[bytes], decoder: FrameDecoder[Any]) -> list[Any]:
        if not self._limits:
            return decoder.feed(b"".join(frames))
        found = []
        for frame in frames:
            with mock.patch.object(transport, "MAX_FRAME_BYTES", len(frame) - LENGTH.size):
                for part in (frame[: len(frame) // 2], frame[len(frame) // 2 :]):
                    found += decoder.feed(part)
        return found


def no_redis() -> Any:
    raise AssertionError("these histories have no Redis server")


class Storage:
    """Where the tiers of a history keep their blocks. Host memory outlives its engine here, so that
    revived requests can load from it.
    """

    def __init__(self, names: str, policy: Any, redis: Callable[[], Any]) -> None:
        """`names` are the kinds of tiers. `redis` connects to a server whose data is lost."""
        self._names, self._policy, self._redis = names.split(), policy, redis
        if "redis" in self._names:
            redis().flushall()
        self._kept = ExitStack()
        self._host = HostTier(TIER_BYTES, policy, None)
        self._folder: Path | None = None
        self._tiers: list[Tier] = []
        self.num_failures = 0  # this many calls are going to fail

    def tiers(self) -> list[Tier]:
        """The tiers of a new engine."""
        self._tiers = [self._tier(name) for name in self._names]
        return [BrittleTier(each, self) for each in self._tiers]

    def _tier(self, name: str) -> Tier:
        if name == "host":
            return self._host
        if name == "redis":
            return RedisTier(self._redis(), TIER_BYTES, self._policy, None)
        if self._folder is None:
            self._folder = Path(self._kept.enter_context(tempfile.TemporaryDirectory()))
        return DiskTier(self._folder, TIER_BYTES, self._policy, None)

    def lose(self) -> None:
        """All blocks are gone."""
        for each in self._tiers:
            if isinstance(each, DiskTier | RedisTier):
                each.clear()
        self._host.close()

    def strike(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the tier fails")

    def close(self) -> None:
        self._kept.close()


class BrittleTier:
    """A tier whose calls fail as its storage says."""

    takes_blocks = True

    def __init__(self, tier: Tier, storage: Storage) -> None:
        self._tier, self._storage, self.name = tier, storage, tier.name

    @property
    def num_bytes(self) -> int:
        return self._tier.num_bytes

    @property
    def num_records(self) -> int:
        return self._tier.num_records

    def find(self, names: Sequence[str]) -> list[bool]:
        self._storage.strike()
        return self._tier.find(names)

    def load(self, wanted: Wanted, rows: Any) -> list[Loaded]:
        self._storage.strike()
        return self._tier.load(wanted, rows)

    def store(self, records: Sequence[Record]) -> int:
        self._storage.strike()
        return self._tier.store(records)

    def use(self, names: Sequence[str]) -> None:
        self._tier.use(names)

    def tidy_up(self) -> None:
        self._tier.tidy_up()

    def close(self) -> None:
        """It outlives the engine."""


class GivenGrammars(Grammars):
    """Compiles at once, or a few turns later, and is shared by all engines of a level."""

    def __init__(self, compile_now: "Callable[[str], Future[Any]]", delay: int) -> None:
        self._now, self._delay = compile_now, delay
        self._late: list[tuple[int, str, Future[Any]]] = []

    def compile(self, grammar: str) -> "Future[Any]":
        if not self._delay:
            return self._now(grammar)
        self._late.append((self._delay, grammar, Future()))
        return self._late[-1][2]

    def tick(self) -> None:
        late, self._late = self._late, []
        for turns, grammar, future in late:
            if turns > 1:
                self._late.append((turns - 1, grammar, future))
                continue
            made = self._now(grammar)
            if (error := made.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(made.result())

    def close(self) -> None:
        """The grammars belong to the level."""


@dataclass
class Parts:
    """What an engine is made of beside its shape."""

    runner: ModelRunner
    grammars: GivenGrammars
    num_blocks: int  # of the pool
    speculates: bool = False
    draft: ModelRunner | None = None
    images: ImageStore | None = None
    adapters: "Callable[[], AdapterSlots] | None" = None


@dataclass(eq=False)
class Hostages:
    """Holds blocks like a sequence."""

    request_id: str = "hostages"
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_confirmed: int = 0


class InlineMasks(MaskWriter):
    """Computes masks in this thread, because a history is driven by one."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)

    def begin(self, num_rows: int, known: list[MaskRow]) -> MaskJob:
        mask = np.full((num_rows, self._num_words), ALL_ALLOWED, np.uint32)
        self.fill(mask, known)
        return MaskJob(mask, frozenset(index for _, index in known), None, self)

    def fill(self, mask: U32, rows: list[MaskRow]) -> None:
        for matcher, index in rows:
            matcher.unsafe_compute_mask_ptr(mask[index].ctypes.data, mask[index].nbytes)

    def close(self) -> None:
        """There is no thread."""


class NotedSpeculation(Speculation):
    """Keeps what became of each draft of the draft model: its request, the place of its first
    token, its length, and how many of its tokens were right.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.notes: list[tuple[str, int, int, int]] = []

    def verified(self, row: Row, num_accepted: int, is_finite: bool) -> None:
        drafter = self._drafters.get(row.seq)
        if drafter is not None and drafter.was_by_model and is_finite:
            where = row.seq.request_id, row.start + 1
            self.notes.append((*where, len(row.draft), num_accepted))
        super().verified(row, num_accepted, is_finite)


class Engine:
    """One engine. `shape` has its options. `tiers` are those of its prefix cache."""

    def __init__(self, parts: Parts, shape: Shape, tiers: Sequence[Tier] = ()) -> None:
        runner, size = parts.runner, parts.runner.spec.block_size
        self.parts, self.spec = parts, parts.runner.spec
        self.pool = BlockPool(parts.num_blocks + 1)
        self.windows = window_group(self.spec, shape["budget"])
        states = state_group(self.spec) if shape["sharing"] else None
        groups = [each for each in (self.windows, states) if each is not None]
        radix = RadixCache(
            self.pool, size, shape.get("policy", "lru"), columns=[each.column for each in groups]
        )
        self.kv = KVCache(self.pool, radix, size, sharing=shape["sharing"], groups=groups)
        if tiers and shape["sharing"]:
            assert isinstance(runner, BlockMover)
            attach_tiers(
                *(self.kv, runner, self.spec, tiers, identity_of((runner.kv_identity,))),
                lambda count: None,
                make_mover=InlineMover,
            )
        self.scheduler = Scheduler(self.kv, shape["max_slots"])
        if parts.speculates:
            model = None
            if parts.draft is not None:
                model = ModelDrafts(DraftModel(parts.draft, max_tokens=64), FixedPrice())
            self.scheduler.attach(NotedSpeculation(self.kv, FixedPrice(), model))
        self.channel = WireChannel(shape.get("frames", ""))
        budget = StepBudget(shape["budget"], shape["max_slots"])
        self.loop = EngineLoop(
            *(self.scheduler, runner, self.channel, budget, 1000),
            grammars=parts.grammars,
            images=parts.images,
            adapters=parts.adapters,
        )
        if shape.get("paces"):
            self.loop._throttle = PrefillThrottle(budget)
        self._work, self._step_runner = Work(), self.loop._step_runner
        self._step_runner._run_forward = self._run_forward
        self._step_runner._masks = InlineMasks(self.spec.vocab_size)
        self._taken = Hostages()
        self.violations: list[str] = []  # found after a turn
        self.kv.check = self._check_kv

    def _run_forward(self, inputs: BatchInputs) -> Any:
        self._work.add(inputs)
        # It is looked up in the class, where tests put faults.
        return type(self._step_runner)._run_forward(self._step_runner, inputs)

    @property
    def work(self) -> Work:
        """What the engine has done so far."""
        found = replace(self._work, messages=self.channel.num_deltas)
        if (tiers := self.kv.find(KVTiers)) is not None:
            found.loaded_blocks = sum(each.hits for each in tiers.tier_stats())
        return found

    def turn(self) -> None:
        self.parts.grammars.tick()
        self.loop.turn(0.0)
        self.violations += self._unconfirmed()

    def _unconfirmed(self) -> Iterator[str]:
        """Sequences of which more or fewer tokens wait for confirmation than the step in flight
        has.
        """
        launched = self.loop._launched
        rows = () if launched is None else launched.batch.rows
        flying = {row.life: row.length for row in rows}
        for seq in self.scheduler.table.running:
            waiting = seq.num_computed - seq.num_confirmed
            if waiting != flying.get(seq.life, 0):
                yield f"{seq.request_id}: {waiting} of {seq.num_computed} tokens are not confirmed"

    @property
    def is_idle(self) -> bool:
        idle = not self.scheduler.has_work and not self.loop._admission.num_pending
        return idle and self.loop._launched is None and not self.channel.inbox

    def shrink(self, count: int) -> None:
        """Take blocks out of the pool, which evicts cached ones if necessary."""
        short = count - self.pool.num_free
        if short > 0:
            self.kv.radix.evict(short)
        self._taken.blocks += self.pool.take(min(count, self.pool.num_free))

    def grow(self) -> None:
        self.pool.drop(self._taken.blocks)
        self._taken.blocks.clear()

    def _check_kv(self, sequences: Sequence[Any]) -> None:
        """The cache's own check, which must not miss the blocks that were taken out of the pool."""
        if self.windows is not None:
            self.windows.tables[self._taken] = WindowTable([])
        try:
            KVCache.check(self.kv, [*sequences, self._taken])
        finally:
            if self.windows is not None:
                del self.windows.tables[self._taken]

    def problems(self) -> Iterator[str]:
        """What is wrong with an engine in which nothing runs, or was wrong when something ran."""
        yield from self.violations[:1]
        try:
            self.scheduler.check()
        except AssertionError as error:
            yield f"an invariant is broken: {error}"
        held = self.pool.num_usable - self.pool.num_free - self.pool.num_evictable
        if held != len(self._taken.blocks):
            yield f"{held} blocks are held, and nothing runs"
        if self.loop.stats().num_invariant_failures:
            yield "the engine found a broken invariant"
        for name, count in self.channel.begun.items():
            if count > 1:
                yield f"{name} was told {count} times that it begins"
        tiers = self.kv.find(KVTiers)
        if tiers is not None and tiers.has_failed:
            yield "the tiers were given up"
