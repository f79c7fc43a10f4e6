"""The token budget of a step, which bounds the inter-token latency of running sequences, and the
parts of it that sequences get.

The budget is the number of tokens that can be computed within a target duration. A cost model,
fitted to finished steps, predicts the duration. In this model, the time of a pure decode step is
linear in the number of sequences, and so is what prefill adds in the number of its tokens. The
target applies only while sequences decode. Otherwise a step may be as large as memory allows.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Listed

from engine.core.interfaces.stats import STEP_SECONDS, STEP_TOKENS, StepCounts
from engine.core.sandbox.liveness import UNKNOWN_STEP_TIMEOUT_S
from engine.runtime.model_runner import PROMPT_TOKENS, RunnerSpec
from engine.runtime.sequence import Sequence

TARGET_STEP_S = 0.020
# If decode alone exceeds half of the target duration, prefill may take this much of decode's time.
PROMPT_SHARE = 1.0
MAX_STRETCH = 3.0  # drafts make a step at most this many times as long
# The weight of older steps is multiplied by this with each new one.
DECODE_MEMORY, PROMPT_MEMORY = 0.99, 0.9
# A measured duration is limited to this many times the expected duration. So a single interrupted
# step hardly changes the cost model, but a lasting slowdown is learned within a few steps.
MAX_SURPRISE = 2.0
# The time of a step that does not depend on its tokens, as a number of tokens that would take as
# long. FIXED_TOKENS is assumed until steps of different sizes were measured.
FIXED_TOKENS = 4
MAX_FIXED_TOKENS = 32
# The deviation of counts, as a part of their mean, at which measurements count as much as what is
# assumed about the fixed time.
USUAL_SPREAD = 0.2
# A step counts as hung after PATIENCE times its expected duration, but not before MIN_PATIENCE_S.
MIN_PATIENCE_S = 10.0
PATIENCE = 20.0
# The number of prefill tokens per step that are reserved for tenants without running sequences. It
# is enough for a short question about a cached text.
NEW_TENANT_TOKENS = 64


class CostLine:
    """The line seconds = base + slope * count, fitted to measurements by least squares. Older
    measurements have exponentially less weight.
    """

    def __init__(self, memory: float = DECODE_MEMORY, fixed: float = 0.0) -> None:
        """With each measurement, the weight of older ones is multiplied by `memory`. `fixed` is the
        base of the line that is assumed at first, as a count.
        """
        self._memory, self._fixed = memory, fixed
        self._weight = self._counts = self._squares = self._seconds = self._products = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def add(self, count: int, seconds: float) -> None:
        memory = self._memory
        self._weight = memory * self._weight + 1
        self._counts = memory * self._counts + count
        self._squares = memory * self._squares + count * count
        self._seconds = memory * self._seconds + seconds
        self._products = memory * self._products + count * seconds

    def at(self, count: int) -> float:
        """The seconds that the line predicts for `count`, or 0.0 before the first measurement."""
        if not self._weight:
            return 0.0
        mean, mean_s = self._counts / self._weight, self._seconds / self._weight
        return mean_s + self._slope(mean, mean_s) * (count - mean)

    def share(self, count: int) -> float | None:
        """The part of the predicted seconds for `count` that grows with the count. None before the
        first measurement, or if the line predicts no time.
        """
        predicted = self.at(count)
        if predicted <= 0:
            return None
        slope = self._slope(self._counts / self._weight, self._seconds / self._weight)
        return slope * count / predicted

    def count(self, seconds: float, most: int) -> int:
        """The largest count, up to `most`, for which the line predicts at most these seconds. 0
        before the first measurement.
        """
        if not self._weight:
            return 0
        mean, mean_s = self._counts / self._weight, self._seconds / self._weight
        above = seconds - mean_s
        slope = self._slope(mean, mean_s)
        if above >= slope * (most - mean):
            return most
        return max(0, int(mean + above / slope)) if slope else 0

    def _slope(self, mean: float, mean_s: float) -> float:
        spread = self._squares / self._weight - mean * mean
        product = self._products / self._weight - mean * mean_s
        # Counts that hardly differ tell nothing about the slope, only about the noise.
        usual, weight = mean_s / (mean + self._fixed), (USUAL_SPREAD * mean) ** 2
        slope = (product + weight * usual) / (spread + weight)
        # The slope is limited: a larger count never costs less, and at most proportionally more.
        return min(max(slope, 0.0), mean_s / mean)


class StepBudget:
    """Decides the token budget of each step. It learns from the finished steps that are passed to
    `record`.
    """

    def __init__(
        self,
        max_tokens: int,
        max_slots: int,
        target_s: float = TARGET_STEP_S,
        min_tokens: int = PROMPT_TOKENS,
        grain: int = 1,
    ) -> None:
        """`min_tokens` is the number of prefill tokens that every step may compute, however long
        they take. `target_s` is the target duration of a step, in seconds. A number of prefill
        tokens takes as long as the next multiple of `grain`.
        """
        self._max_slots = max_slots
        self._min_tokens = min_tokens
        self._max_tokens = max(max_tokens, max_slots)
        self._target_s = target_s
        self._grain = grain
        self._continuing = CostLine(DECODE_MEMORY, FIXED_TOKENS)
        self._prompt = CostLine(PROMPT_MEMORY)  # the time that prefill adds to a step

    @classmethod
    def of(cls, spec: RunnerSpec, max_tokens: int) -> "StepBudget":
        """The budget for a runner whose steps have at most `max_tokens` tokens."""
        target_s = spec.target_step_s or TARGET_STEP_S
        grain = spec.prompt_grain
        return cls(max_tokens, spec.max_slots, target_s, spec.min_prompt_tokens, grain)

    def tokens(self, num_decoding: int, num_running: int) -> int:
        """The token budget of the next step, which is at least one token for each running sequence.

        If decode alone takes more than half of the target duration, prefill may still take as long
        as decode. Decode may then run at half speed for a while, but waiting requests get their
        first token.
        """
        if not num_decoding:
            return self._max_tokens
        spare_s = self.limit_s(num_decoding) - self._continuing.at(num_decoding)
        affordable = self.prompt_tokens(spare_s) // self._grain * self._grain
        # Of several sequences in prefill, all but the first get at least one token more.
        others = max(0, num_running - num_decoding - 1)
        wanted = num_decoding + others + max(self._min_tokens, affordable)
        return min(self._max_tokens, wanted)

    def limit_s(self, num_decoding: int) -> float:
        """The seconds that a step with this many decode rows may take, with prefill and drafts."""
        return max(self._target_s, (1 + PROMPT_SHARE) * self._continuing.at(num_decoding))

    def least(self, num_running: int) -> int:
        """The tokens that every step may have: one for each running sequence, and some prefill."""
        return min(self._max_tokens, num_running + self._min_tokens)

    def decode_s(self, num_decoding: int) -> float:
        """The expected seconds of a pure decode step, or 0.0 before the first one."""
        return self._continuing.at(num_decoding)

    def draft_tokens(self, num_decoding: int, num_prompt_tokens: int) -> int:
        """The number of draft tokens that a step with these decode rows and prompt tokens can
        verify within its limit.
        """
        decode_s = self._continuing.at(num_decoding)
        each_s = self.price(num_decoding) * decode_s / num_decoding
        limit_s = min(self.limit_s(num_decoding), MAX_STRETCH * decode_s)
        left_s = limit_s - decode_s - self._prompt_cost(num_prompt_tokens)
        return max(0, int(min(left_s / each_s, self._max_tokens))) if each_s else self._max_tokens

    def prompt_tokens(self, seconds: float) -> int:
        """The number of prompt tokens that can be computed in this time."""
        return self._prompt.count(seconds, self._max_tokens)

    def record(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a finished step that had `num_decoding` decode rows and `num_prompt_tokens`
        prefill tokens.
        """
        known = self._continuing.at(num_decoding) if num_decoding else 0.0
        if num_prompt_tokens:
            expected = known + self._prompt_cost(num_prompt_tokens)
            added = max(0.0, _believable(seconds, expected) - known)
            self._prompt.add(num_prompt_tokens, added)
        else:
            self._continuing.add(num_decoding, _believable(seconds, known))

    def price(self, num_decoding: int) -> float:
        """The cost of one more decode token in a step with `num_decoding` of them, divided by the
        mean cost of these. At 1, larger steps do not increase the throughput.
        """
        share = self._continuing.share(num_decoding)
        if share is None:
            return num_decoding / (num_decoding + FIXED_TOKENS)
        return max(share, num_decoding / (num_decoding + MAX_FIXED_TOKENS))

    def shrink(self) -> None:
        """Halve the max number of tokens per step, because a step ran out of memory. The limit is
        never raised again.
        """
        self._max_tokens = max(self._max_slots, self._max_tokens // 2)

    def step_s(self, num_rows: int, num_tokens: int) -> float | None:
        """The expected seconds of a step with these numbers of rows and tokens. None before the
        first prefill was measured.
        """
        if not self._prompt.is_known:
            return None
        return self._continuing.at(num_rows) + self._prompt_cost(num_tokens - num_rows)

    def prompt_s(self, num_tokens: int) -> float | None:
        """The expected seconds to compute this many prompt tokens. None before the first prefill
        was measured.
        """
        return self._prompt_cost(num_tokens) if self._prompt.is_known else None

    def step_timeout_s(self, num_rows: int, num_tokens: int) -> float:
        """The seconds after which a step with these numbers of rows and tokens counts as hung."""
        expected_s = self.step_s(num_rows, num_tokens)
        if expected_s is None:
            return UNKNOWN_STEP_TIMEOUT_S
        return max(MIN_PATIENCE_S, PATIENCE * expected_s)

    def _prompt_cost(self, num_tokens: int) -> float:
        return self._prompt.at(num_tokens) if num_tokens else 0.0


def _believable(seconds: float, expected: float) -> float:
    return min(seconds, MAX_SURPRISE * expected) if expected else seconds


class NewTenantReserve:
    """Reserves part of each step for new tenants, which are tenants without running sequences.

    Without this, new tenants would wait until all prefill in progress is done. While a new tenant
    waits, every second step computes no prefill of running sequences, so that the step is short.
    Prefill in progress continues in the steps between.
    """

    def __init__(self) -> None:
        self._was_short = False

    def room(
        self, budget: int, waiting: Collection[str], running: Listed[Sequence]
    ) -> tuple[int, int]:
        """Returns the token budget of the step, and how many of these tokens are reserved for
        new tenants. Running sequences must not use the reserved tokens for prefill.

        `waiting` are the tenants that have a sequence to admit.
        """
        if not waiting or not self._has_new_tenants(waiting, running):
            self._was_short = False
            return budget, 0
        self._was_short = not self._was_short
        num_spare = max(0, budget - len(running))
        if not self._was_short:
            return budget, min(NEW_TENANT_TOKENS, num_spare // 2)
        kept = min(NEW_TENANT_TOKENS, num_spare)
        return min(budget, len(running) + kept), kept

    def _has_new_tenants(self, waiting: Collection[str], running: Listed[Sequence]) -> bool:
        """Whether new tenants wait, and others would use up the step."""
        present = {seq.tenant for seq in running}
        has_new_tenants = any(tenant not in present for tenant in waiting)
        has_rivals = any(tenant in present for tenant in waiting) or any(
            seq.num_uncomputed > 1 for seq in running
        )
        return has_new_tenants and has_rivals


def prompts_due(
    running: Listed[Sequence], budget: int
) -> tuple[list[Sequence], dict[Sequence, int]]:
    """The prompts in progress, which are the running sequences with several tokens to compute. And
    how many tokens, beside one for each sequence, some of them get first, because their tenants
    have less than an equal part of the step.
    """
    # `num_uncomputed` is written out, because every step asks this of every sequence.
    prompts = [seq for seq in running if len(seq.tokens) + seq.num_sampling > seq.num_computed + 1]
    return prompts, _tenants_due(prompts, running, budget) if prompts else {}


def _tenants_due(
    prompts: Listed[Sequence], running: Listed[Sequence], budget: int
) -> dict[Sequence, int]:
    """The shortest prompts of a tenant go first."""
    num_spare = budget - len(running)
    if num_spare <= 0:
        return {}
    rows = Counter(seq.tenant for seq in running)
    if len(rows) < 2:
        return {}
    due: dict[Sequence, int] = {}
    for seq in sorted(prompts, key=lambda seq: seq.num_uncomputed):
        part = budget // len(rows) - rows[seq.tenant]
        more = min(seq.num_uncomputed - 1, part, num_spare)
        if more > 0:
            due[seq] = more
            rows[seq.tenant] += more
            num_spare -= more
    return due


def prefill_shares(
    prompts: Listed[Sequence], num_running: int, budget: int, due: Mapping[Sequence, int]
) -> dict[Sequence, int]:
    """How many tokens each of the prompts in progress gets, if there are several. Each gets one,
    and what is `due` to its tenant. Half of the rest is for prompts that have less left than the
    most senior one, the shortest first. What these do not need goes to the most senior one, and
    then to the next.
    """
    left = {seq: seq.num_uncomputed for seq in prompts}
    num_spare = budget - num_running - sum(due.values())
    if len(left) < 2 or num_spare < 0 or (num_spare == 0 and not due):
        return {}
    most = next(iter(left.values()))
    shorter = sorted((seq for seq in left if left[seq] < most), key=lambda seq: left[seq])
    shares = {seq: 1 + due.get(seq, 0) for seq in left}
    num_half = num_spare // 2
    for seq in shorter:
        more = min(left[seq] - shares[seq], num_half)
        shares[seq] += more
        num_half -= more
        num_spare -= more
    for seq in left:
        more = min(left[seq] - shares[seq], num_spare)
        shares[seq] += more
        num_spare -= more
    return shares


class StepCounter:
    """Counts the engine's steps in two histograms: by duration and by token count."""

    def __init__(self) -> None:
        self._by_seconds = [0] * (len(STEP_SECONDS) + 1)
        self._by_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._seconds, self._tokens = 0.0, 0

    def add(self, tokens: int, seconds: float) -> None:
        self._by_seconds[bisect_left(STEP_SECONDS, seconds)] += 1
        self._by_tokens[bisect_left(STEP_TOKENS, tokens)] += 1
        self._seconds += seconds
        self._tokens += tokens

    def counts(self) -> StepCounts:
        return StepCounts(
            tuple(self._by_seconds), tuple(self._by_tokens), self._seconds, self._tokens
        )
