"""The engines of a history: the real loop, scheduler and cache over a level's model, one turn at a
time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from engine.core.interfaces.request import Deltas, FromEngine, ToEngine
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
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts
from engine.runtime.tiers.base import Loaded, Record, Wanted
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import BlockMover, KVTiers, attach_tiers
from engine.runtime.tiers.record import identity_of
from tests.oracle.histories import Shape
from tests.support.toy_engine.engine import FixedPrice
from tests.support.toy_engine.tiers import InlineMover

TIER_BYTES = 2**20
_FROM_WIRE = msgspec.msgpack.Decoder(FromEngine)
_TO_WIRE = msgspec.msgpack.Decoder(ToEngine)
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
        prompts = np.repeat(inputs.num_prompt, np.diff(inputs.query_start))
        self.prompt_tokens += int((inputs.positions < prompts).sum())


class WireChannel:
    """A channel whose messages cross as bytes, as between two processes."""

    def __init__(self) -> None:
        self.inbox: list[bytes] = []
        self.outbox: list[bytes] = []
        self.num_deltas = 0  # messages with deltas

    def put(self, message: ToEngine) -> None:
        self.inbox.append(_ENCODE(message))

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return [_TO_WIRE.decode(each) for each in messages]

    def send(self, message: FromEngine) -> None:
        self.num_deltas += isinstance(message, Deltas)
        self.outbox.append(_ENCODE(message))

    def take(self) -> list[FromEngine]:
        messages, self.outbox = self.outbox, []
        return [_FROM_WIRE.decode(each) for each in messages]


class BrittleTier(HostTier):
    """A tier that outlives engines, loses records, and fails for a while."""

    def __init__(self) -> None:
        super().__init__(TIER_BYTES, "lru", None)
        self.num_failures = 0  # this many calls are going to fail
        self.lends = False

    def _strike(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the tier fails")

    def find(self, names: Sequence[str]) -> list[bool]:
        self._strike()
        return super().find(names)

    def load(self, wanted: Wanted, rows: Any) -> list[Loaded]:
        self._strike()
        return super().load(wanted, rows)

    def store(self, records: Sequence[Record]) -> int:
        self._strike()
        return super().store(records)


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
    tier: BrittleTier | None = None


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


class Engine:
    """One engine. `shape` has its options."""

    def __init__(self, parts: Parts, shape: Shape) -> None:
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
        if parts.tier is not None and shape["sharing"]:
            assert isinstance(runner, BlockMover)
            attach_tiers(
                *(self.kv, runner, self.spec, [parts.tier], identity_of(("oracle",))),
                lambda count: None,
                make_mover=InlineMover,
            )
        self.scheduler = Scheduler(self.kv, shape["max_slots"])
        if parts.speculates:
            model = None
            if parts.draft is not None:
                model = ModelDrafts(DraftModel(parts.draft, max_tokens=64), FixedPrice())
            self.scheduler.attach(Speculation(self.kv, FixedPrice(), model))
        self.channel = WireChannel()
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
        """What is wrong with an engine in which nothing runs."""
        try:
            self.scheduler.check()
        except AssertionError as error:
            yield f"an invariant is broken: {error}"
        held = self.pool.num_usable - self.pool.num_free - self.pool.num_evictable
        if held != len(self._taken.blocks):
            yield f"{held} blocks are held, and nothing runs"
        if self.loop.stats().num_invariant_failures:
            yield "the engine found a broken invariant"
        tiers = self.kv.find(KVTiers)
        if tiers is not None and tiers.has_failed:
            yield "the tiers were given up"
