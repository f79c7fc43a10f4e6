"""The real runtime with the toy model, driven one iteration at a time. Every delta is collected and
checked.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from engine.core.interfaces.request import Deltas, GenerateRequest, SamplingParams, TokenDelta
from engine.runtime.block_pool import BlockPool
from engine.runtime.budget import StepBudget
from engine.runtime.groups.states import state_group
from engine.runtime.groups.windows import WindowTable, min_window_blocks, window_group
from engine.runtime.kv_cache import KVCache
from engine.runtime.loop import EngineLoop
from engine.runtime.model_runner import RunnerSpec
from engine.runtime.radix_cache import RadixCache
from engine.runtime.requests.grammar import Grammars
from engine.runtime.scheduler import Scheduler
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts
from tests.support.toy_engine.alone import generate_alone
from tests.support.toy_engine.grammar import new_matcher
from tests.support.toy_engine.invariants import (
    WatchedScheduling,
    check_invariants,
    check_writes,
    noted,
)
from tests.support.toy_engine.runner import NAN_TOKEN, VOCAB, Pending, ToyRunner, mix


class ListChannel:
    """A channel made of two lists."""

    def __init__(self) -> None:
        self.inbox: list = []
        self.outbox: list = []

    def poll(self, timeout_s: float) -> list:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message) -> None:
        self.outbox.append(message)


def free_blocks(pool: BlockPool) -> list[int]:
    return [block for block in range(1, pool.num_blocks) if not pool.refs(block)]


@dataclass
class Outcome:
    """The result of one choice so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    finish_reason: str | None = None
    error_code: str | None = None
    num_cached: int = 0
    prompt_logprobs: tuple | None = None
    vector: bytes | None = None


@dataclass(eq=False)
class Hostages:
    """Holds blocks like a sequence."""

    request_id: str
    blocks: list[int]
    num_computed: int = 0
    num_confirmed: int = 0


class FixedPrice:
    """Makes drafts cheap, and independent of the time that steps take."""

    def price(self, num_decoding: int) -> float:
        return 0.01

    def draft_tokens(self, num_decoding: int, num_prompt_tokens: int) -> int:
        return 1000

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        return 1000.0


def is_wrong_guess(place: int, share: float) -> bool:
    """Whether a toy draft model guesses the token at this place of a sequence wrong."""
    return mix(place) % 100 >= 100 * share


class GuessingRunner(ToyRunner):
    """A toy model as a draft model. This share of its tokens is right."""

    def __init__(self, spec: RunnerSpec, share: float) -> None:
        super().__init__(spec)
        self._share = share

    def sample(self, handle, sampling):
        pending = super().sample(handle, sampling)
        output = pending.wait()
        is_wrong = [is_wrong_guess(at, self._share) for at in sampling.position.tolist()]
        tokens = np.where(is_wrong, (output.tokens + 1) % NAN_TOKEN, output.tokens)
        for slot, token in zip(sampling.slots.tolist(), tokens.tolist(), strict=True):
            self._last_token[slot] = token
        return Pending(replace(output, tokens=tokens.astype(np.int32)))


def toy_drafts(spec: RunnerSpec, share: float, num_blocks: int = 24) -> ModelDrafts:
    """A draft model with room for two sequences."""
    own = RunnerSpec(spec.block_size, num_blocks + 1, 2, spec.max_seq_len, VOCAB, spec.depth)
    return ModelDrafts(DraftModel(GuessingRunner(own, share), max_tokens=64), FixedPrice())


class ToyEngine:
    """An `EngineLoop` with helpers to submit requests, iterate, and compare with the oracle."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 2,
        max_slots: int = 4,
        max_seq_len: int = 64,
        depth: int = 0,
        budget: int = 16,
        max_queued: int = 1000,
        grammars: Grammars | None = None,
        has_state: bool = False,
        num_checkpoints: int = 0,
        window: int | None = None,
        num_window_blocks: int | None = None,  # None: as few as possible
        speculates: bool = False,
        guessed: float | None = None,  # the share of right guesses of a draft model, if any
        paces: bool = False,
        **kv_options,
    ) -> None:
        self.spec = RunnerSpec(
            *(block_size, num_blocks + 1, max_slots, max_seq_len, VOCAB, depth),
            has_state=has_state,
            num_checkpoints=num_checkpoints,
            paces=paces,
        )
        if window is not None:
            least = min_window_blocks(window, block_size, 1)
            count = max(num_window_blocks or 0, least) + 1
            self.spec = replace(self.spec, window=window, num_window_blocks=count)
        self.channel = ListChannel()
        self.violations: list[str] = []  # failed checks from within a step
        self.runner = ToyRunner(self.spec, self._check_writes)
        self.pool = BlockPool(self.spec.num_blocks)
        policy = {k: kv_options.pop(k) for k in ("policy", "ttl_s", "clock") if k in kv_options}
        self.windows = window_group(self.spec, budget)
        self.states = state_group(self.spec)
        groups = [group for group in (self.windows, self.states) if group is not None]
        columns = [group.column for group in groups]
        radix = RadixCache(self.pool, block_size, columns=columns, **policy)
        self.kv = KVCache(self.pool, radix, block_size, groups=groups, **kv_options)
        self.scheduler = Scheduler(self.kv, max_slots)
        self.scheduler.schedule = WatchedScheduling(self.scheduler, self.violations)
        if speculates:
            model = None if guessed is None else toy_drafts(self.spec, guessed)
            self.scheduler.attach(Speculation(self.kv, FixedPrice(), model))
        # Blocks removed from the pools by `shrink`.
        self.hostages: list[int] = []
        self.window_hostages: list[int] = []
        self.num_pardons = 0  # choices that an injected fault may have failed
        self.kv.check = self._check_kv
        budget = StepBudget(budget, max_slots)
        self.loop = EngineLoop(
            self.scheduler, self.runner, self.channel, budget, max_queued, grammars=grammars
        )
        self.requests: dict[str, GenerateRequest] = {}
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self._expected: dict[tuple[str, int], tuple[list[int], str]] = {}

    def submit(
        self,
        request_id: str,
        prompt,
        *,
        salt="",
        tenant="",
        priority=0,
        eos=(),
        grammar=None,
        pools=False,
        bad_ids=(),
        breaker_ids=(),
        expects: int | None = None,
        **params,
    ) -> None:
        """With `expects`, the client expects the right output, except that every so many tokens are
        wrong. 0: all tokens are right.
        """
        params.setdefault("seed", 7)
        params.setdefault("temperature", 0.0)
        request = GenerateRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            params=SamplingParams(**params),
            eos_ids=tuple(eos),
            salt=salt,
            tenant=tenant,
            priority=priority,
            timeout_s=None,
            grammar=grammar,
            pools=pools,
            bad_words=bad_ids,
            dry_breakers=breaker_ids,
        )
        self.requests[request_id] = request
        if expects is not None:
            tokens = self.expected(request_id, 0)[0]
            tokens = [0 if expects and not i % expects else token for i, token in enumerate(tokens)]
            self.requests[request_id] = request = structs.replace(request, expected=tuple(tokens))
        for choice in range(request.params.n):
            self.outcomes[request_id, choice] = Outcome()
        self.channel.inbox.append(request)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn(0.0)
            self._collect()
            self.runner.poison(free_blocks(self.pool), self.runner.cells)
            if self.windows is not None:
                self.runner.poison(free_blocks(self.windows.pool), self.runner.window_cells)

    def run(self, most: int = 2000) -> None:
        """Iterate until every outcome is final."""
        for _ in range(most):
            if all(o.finish_reason for o in self.outcomes.values()):
                self.turn(2)  # a step may still be in flight
                return
            self.turn()
        raise AssertionError(f"no end after {most} turns: {self.outcomes}")

    def expected(self, request_id: str, choice: int) -> tuple[list[int], str]:
        known = self._expected.get((request_id, choice))
        if known is not None:
            return known
        request = self.requests[request_id]
        stop = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop |= frozenset(request.eos_ids)
        matcher = None if request.grammar is None else new_matcher(request.grammar)
        words = request.bad_words, request.dry_breakers
        alone = generate_alone(
            request.prompt, request.params, choice, stop, self.spec.max_seq_len, matcher, *words
        )
        if request.pools and alone[1] != "error":
            alone = ([], "stop")
        self._expected[request_id, choice] = alone
        return alone

    def shrink(self, count: int) -> None:
        """Remove blocks from the pool, evicting cached ones if necessary."""
        short = count - self.pool.num_free
        if short > 0:
            self.kv.radix.evict(short)
        self.hostages += self.pool.take(min(count, self.pool.num_free))
        if self.windows is not None:
            pool = self.windows.pool
            left = min(count, pool.num_free + pool.num_evictable)
            self.window_hostages += self.windows.column.take(left)

    def grow(self) -> None:
        """Return all removed blocks to the pools."""
        self.pool.drop(self.hostages)
        self.hostages.clear()
        if self.windows is not None:
            self.windows.pool.drop(self.window_hostages)
            self.window_hostages.clear()

    def check(self) -> None:
        """Check all invariants, and that all delivered tokens equal the oracle's."""
        self.scheduler.check()
        check_invariants(self)
        assert not self.violations
        assert self.loop.stats().num_invariant_failures == 0
        assert self.num_unforeseen() <= self.num_pardons, "somebody failed for no reason"
        for (request_id, choice), outcome in self.outcomes.items():
            tokens, reason = self.expected(request_id, choice)
            assert outcome.tokens == tokens[: len(outcome.tokens)], (request_id, choice)
            if outcome.finish_reason in ("stop", "length"):
                assert (outcome.tokens, outcome.finish_reason) == (tokens, reason)

    def _collect(self) -> None:
        for message in self.channel.outbox:
            if isinstance(message, Deltas):
                for delta in message.deltas:
                    self._take(delta)
        self.channel.outbox.clear()

    def _take(self, delta: TokenDelta) -> None:
        outcome = self.outcomes[delta.request_id, delta.choice]
        assert outcome.finish_reason is None, f"an event after the end of {delta.request_id}"
        outcome.tokens.extend(delta.token_ids)
        outcome.logprobs.extend(delta.logprobs or ())
        outcome.num_cached += delta.num_cached
        if delta.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is None
            outcome.prompt_logprobs = delta.prompt_logprobs
        outcome.vector = delta.vector
        outcome.finish_reason = delta.finish_reason
        outcome.error_code = delta.error_code

    def num_unforeseen(self) -> int:
        """Number of choices that failed although their requests were valid."""
        failed = [key for key, o in self.outcomes.items() if o.error_code == "inference_error"]
        return sum(self.expected(*key)[1] != "error" for key in failed)

    def _check_writes(self, inputs) -> None:
        with noted(self.violations):
            check_writes(self, inputs)

    def _check_kv(self, sequences) -> None:
        taken = Hostages("hostages", self.hostages)
        if self.windows is not None:
            self.windows.tables[taken] = WindowTable(self.window_hostages)
        try:
            KVCache.check(self.kv, [*sequences, taken])
        finally:
            if self.windows is not None:
                del self.windows.tables[taken]
