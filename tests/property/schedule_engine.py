"""The engine of a random schedule: a loop that is driven one iteration at a time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.core.interfaces.request import (
    Deltas,
    GenerateRequest,
    Resumed,
)
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import ModelRunner
from engine.runtime.prefill_throttle import PrefillThrottle
from engine.runtime.radix_cache import RadixCache
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import ScheduledBatch
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts
from engine.runtime.tiers.base import Tier
from engine.runtime.tiers.kv_tiers import BlockMover, KVTiers, attach_tiers
from engine.runtime.tiers.record import identity_of
from tests.support.toy_engine.engine import FixedPrice
from tests.support.toy_engine.tiers import InlineMover

RETRIED = ("schedule", "forward", "sample", "wait", "publish")

MOST_TURNS = 5000
TIER_BYTES = 2**20


@dataclass
class ListChannel:
    inbox: list = field(default_factory=list)
    outbox: list = field(default_factory=list)

    def poll(self, timeout_s: float) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message) -> None:
        self.outbox.append(message)


@dataclass(frozen=True)
class Shape:
    """The settings of a schedule's engine."""

    num_blocks: int
    max_slots: int
    budget: int
    sharing: bool = True
    speculates: bool = False
    has_draft_model: bool = False
    paces: bool = False


class Engine:
    """A loop over `runner` with its own pool, driven one iteration at a time. `tier` has the blocks
    that the engines of this schedule have stored.
    """

    def __init__(
        self,
        runner: ModelRunner,
        shape: Shape,
        tier: Tier | None = None,
        draft: ModelRunner | None = None,
        places: "Callable[[], AdapterSlots] | None" = None,
    ) -> None:
        size = runner.spec.block_size
        self.pool = BlockPool(shape.num_blocks + 1)
        self.kv = KVCache(self.pool, RadixCache(self.pool, size), size, sharing=shape.sharing)
        if tier is not None:
            assert isinstance(runner, BlockMover)
            identity = identity_of(("schedules",))
            attach_tiers(
                *(self.kv, runner, runner.spec, [tier], identity, lambda count: None),
                make_mover=InlineMover,
            )
        self.scheduler = Scheduler(self.kv, shape.max_slots)
        self.seen: Counter[str] = Counter()
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self._watched_schedule
        self.channel = ListChannel()
        budget = StepBudget(shape.budget, shape.max_slots)
        if shape.speculates:
            model = None
            if draft is not None and shape.has_draft_model:
                model = ModelDrafts(DraftModel(draft, max_tokens=64), FixedPrice())
            self.scheduler.attach(Speculation(self.kv, FixedPrice(), model))
        self._loop = EngineLoop(
            *(self.scheduler, runner, self.channel, budget, 1000), adapters=places
        )
        if shape.paces:
            self._loop._throttle = PrefillThrottle(budget)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], str] = {}

    def _watched_schedule(
        self, budget: int, now: float, *, pauses: bool = False
    ) -> ScheduledBatch | None:
        batch = self._schedule(budget, now, pauses=pauses)
        if batch is not None:
            owners: dict[int, str] = {}
            for row in batch.rows:
                for block in row.seq.blocks:
                    root = owners.setdefault(block, row.seq.namespace)
                    assert root == row.seq.namespace, "two roots share a block"
            adapters = self.scheduler.find(AdapterSlots)
            places = {} if adapters is None else adapters.used
            self.seen["mixes"] += len({places.get(row.seq, 0) for row in batch.rows}) > 1
            self.seen["adapter_returns"] += sum(
                row.seq in places and row.seq.queue.num_preemptions > 0 for row in batch.rows
            )
            self.seen["batches"] += len(batch.rows) > 1
            self.seen["chunks"] += sum(
                row.start + row.length < row.seq.num_prompt for row in batch.rows
            )
        return batch

    def turn(self) -> None:
        self._loop.turn(0.0)
        for message in self.channel.outbox:
            for delta in message.deltas if isinstance(message, Deltas) else ():
                key = delta.request_id, delta.choice
                assert key not in self.endings, "an event after the end"
                self.tokens.setdefault(key, []).extend(delta.token_ids)
                if delta.finish_reason is not None:
                    self.endings[key] = delta.finish_reason
        self.channel.outbox.clear()

    def counts(self) -> Counter[str]:
        """How often each kind of event was met."""
        found = Counter(self.seen)
        found["preemptions"] += self.scheduler.num_preemptions
        found["hits"] += self.kv.num_hit
        if (tiers := self.kv.find(KVTiers)) is not None:
            found["loads"] += sum(each.hits for each in tiers.tier_stats())
        if (drafts := self.scheduler.find(Speculation)) is not None:
            found["drafted"] += drafts.num_drafted
            found["accepted"] += drafts.num_accepted
            found["by_model"] += drafts.num_model_accepted
        return found

    def take_over(self, dead: "Engine", requests: dict[str, GenerateRequest]) -> None:
        """Continue the requests of an engine that died, each with the tokens that it had."""
        self.tokens, self.endings = dead.tokens, dead.endings
        for request_id, request in requests.items():
            left = [n for n in range(request.params.n) if (request_id, n) not in self.endings]
            if left:
                before = [tuple(self.tokens.get((request_id, choice), ())) for choice in left]
                resumed = tuple(map(Resumed, left, before))
                self.channel.inbox.append(msgspec.structs.replace(request, resumed=resumed))
                self.seen["revivals"] += any(before)

    def finish(self) -> None:
        for _ in range(MOST_TURNS):
            self.turn()
            if not self.scheduler.has_work and not self._loop._admission.num_pending:
                break
        self.turn()
        self.scheduler.check()
        assert self.pool.num_free + self.pool.num_evictable == self.pool.num_usable
