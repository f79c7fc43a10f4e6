"""The token budget of a step, which bounds the inter-token latency of running sequences.

The limit is the duration of a step, not a token count. A cost model is fitted to finished steps:
the time of a pure decode step is linear in the number of sequences, and each prefill token adds a
constant time. The limit applies only while sequences decode. Otherwise a step may be as large as
memory allows.
"""

from bisect import bisect_left

from engine.backends.custom.runtime.model_runner import PROMPT_TOKENS
from engine.core.interfaces.request import STEP_SECONDS, STEP_TOKENS, StepCounts

TARGET_STEP_S = 0.025
PROMPT_SHARE = 1.0  # max prefill time of a slow step, relative to its decode time
SMOOTHING = 0.2  # decay of older steps with prefill, when a new one is recorded
MEMORY = 0.99  # older pure decode steps are multiplied by this when a new one is recorded
# A measured step counts as at most this many times its expected cost. One interrupted step then
# hardly moves the model, while a lasting slowdown is learned over a few steps.
MAX_SURPRISE = 4.0


class CostLine:
    """seconds = base + slope * count: a least-squares fit with exponential decay."""

    def __init__(self) -> None:
        self._weight = self._counts = self._squares = self._seconds = self._products = 0.0

    def add(self, count: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._counts = MEMORY * self._counts + count
        self._squares = MEMORY * self._squares + count * count
        self._seconds = MEMORY * self._seconds + seconds
        self._products = MEMORY * self._products + count * seconds

    def at(self, count: int) -> float:
        """The fitted seconds at `count`; 0.0 without data. If all data have the same count, the
        line goes through zero.
        """
        if not self._weight:
            return 0.0
        mean, mean_s = self._counts / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread > 0.01:
            slope = (self._products / self._weight - mean * mean_s) / spread
        else:
            slope = mean_s / mean
        # A larger count never costs less, and at most proportionally more.
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s + slope * (count - mean)


class StepBudget:
    """Decides the token budget of each step. It learns only from the steps passed to `record`."""

    def __init__(
        self,
        max_tokens: int,
        max_slots: int,
        target_s: float = TARGET_STEP_S,
        min_tokens: int = PROMPT_TOKENS,
    ) -> None:
        """`min_tokens`: number of prefill tokens that every step may compute, however long they
        take.
        """
        self._max_slots = max_slots
        self._min_tokens = min_tokens
        self._max_tokens = max(max_tokens, max_slots)
        self._target_s = target_s
        self._continuing = CostLine()
        # Decayed sums over recent steps with prefill: the time that prefill added, and its tokens.
        self._prompt_s = 0.0
        self._prompt_tokens = 0.0

    def tokens(self, num_decoding: int, num_running: int) -> int:
        """The next step's token budget: at least one token for each running sequence.

        If decode alone takes more than half of the target time, prefill may still take as long as
        decode does. Decode may then run at half speed for a while, but waiting requests get their
        first token.
        """
        if not num_decoding:
            return self._max_tokens
        continuing_s = self._continuing.at(num_decoding)
        spare_s = max(self._target_s - continuing_s, PROMPT_SHARE * continuing_s)
        affordable = 0.0
        if self._prompt_s:
            affordable = min(spare_s * self._prompt_tokens / self._prompt_s, self._max_tokens)
        wanted = max(num_running + self._min_tokens, num_decoding + int(affordable))
        return min(self._max_tokens, wanted)

    def record(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a finished step with `num_decoding` decode rows and `num_prompt_tokens` of
        prefill.
        """
        known = self._continuing.at(num_decoding) if num_decoding else 0.0
        if num_prompt_tokens:
            expected = known + self._prompt_cost(num_prompt_tokens)
            added = max(0.0, _believable(seconds, expected) - known)
            self._prompt_s += added - SMOOTHING * self._prompt_s
            self._prompt_tokens += num_prompt_tokens - SMOOTHING * self._prompt_tokens
        else:
            self._continuing.add(num_decoding, _believable(seconds, known))

    def shrink(self) -> None:
        """Halve the max step size for good, after a step ran out of memory."""
        self._max_tokens = max(self._max_slots, self._max_tokens // 2)

    def step_s(self, num_rows: int, num_tokens: int) -> float | None:
        """The expected seconds of a step with these numbers of rows and tokens; None before any
        prefill was measured.
        """
        if not self._prompt_tokens:
            return None
        return self._continuing.at(num_rows) + self._prompt_cost(num_tokens - num_rows)

    def _prompt_cost(self, num_tokens: int) -> float:
        return num_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0


def _believable(seconds: float, expected: float) -> float:
    return min(seconds, MAX_SURPRISE * expected) if expected else seconds


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
