"""The real scheduler, cache and loop over a runner, for the tests that every runner must pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.interfaces.request import (
    Deltas,
    FromEngine,
    GenerateRequest,
    ToEngine,
    TokenDelta,
    TokenLogprobs,
)
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.windows import window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import ModelRunner
from engine.runtime.radix_cache import RadixCache
from engine.runtime.scheduler import Scheduler

NUM_NEW = 12
MAX_TURNS = 2000


@dataclass(frozen=True, slots=True)
class Schedule:
    """How steps are cut, and how much memory there is; None: all that the runner has."""

    budget: int = 32  # tokens per step
    max_slots: int | None = None
    num_blocks: int | None = None
    shares: bool = True


@dataclass(slots=True)
class Outcome:
    """The result of one choice of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    scores: tuple[TokenLogprobs, ...] = ()
    vector: bytes | None = None
    finish_reason: str | None = None


class ListChannel:
    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outcomes: dict[tuple[str, int], Outcome] = {}

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        for delta in message.deltas if isinstance(message, Deltas) else ():
            self._take(delta)

    def _take(self, delta: TokenDelta) -> None:
        outcome = self.outcomes.setdefault((delta.request_id, delta.choice), Outcome())
        assert outcome.finish_reason is None, f"{delta.request_id}: an event after the end"
        outcome.tokens += delta.token_ids
        outcome.logprobs += delta.logprobs or ()
        outcome.num_cached += delta.num_cached
        outcome.scores += delta.prompt_logprobs or ()
        outcome.vector = delta.vector
        outcome.finish_reason = delta.finish_reason


class Bench:
    """A scheduler, a cache and a loop around a runner, driven one iteration at a time."""

    def __init__(self, runner: ModelRunner, schedule: Schedule) -> None:
        spec = runner.spec
        self.pool = BlockPool(schedule.num_blocks or spec.num_blocks)
        windows = window_group(spec, schedule.budget)
        groups = [] if windows is None else [windows]
        columns = [group.column for group in groups]
        radix = RadixCache(self.pool, spec.block_size, columns=columns)
        kv = KVCache(self.pool, radix, spec.block_size, sharing=schedule.shares, groups=groups)
        slots = schedule.max_slots or spec.max_slots
        self.scheduler = Scheduler(kv, slots)
        self.channel = ListChannel()
        budget = StepBudget(schedule.budget, slots)
        self._loop = EngineLoop(self.scheduler, runner, self.channel, budget, max_queued=1000)

    def turn(self, *messages: ToEngine) -> None:
        self.channel.inbox += messages
        self._loop.turn(0.0)
        self.scheduler.check()

    def run(self, requests: Sequence[GenerateRequest]) -> dict[tuple[str, int], Outcome]:
        """Run the requests to their end. Returns every outcome by request and choice."""
        self.turn(*requests)
        return self.finish()

    def finish(self) -> dict[tuple[str, int], Outcome]:
        for _ in range(MAX_TURNS):
            if not self.scheduler.has_work:
                break
            self.turn()
        self.turn()  # finish a step that was launched ahead and is not needed
        assert not self.scheduler.has_work, f"no end after {MAX_TURNS} turns"
        held = self.pool.num_usable - self.pool.num_free - self.pool.num_evictable
        assert held == 0, f"{held} blocks are held by nobody"
        return self.channel.outcomes
