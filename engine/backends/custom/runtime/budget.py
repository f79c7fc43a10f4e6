"""How many tokens a step may compute, so that nobody who is streaming waits too long for the next
one.

The limit is time, not a count. A small model of cost is learned from the steps themselves: what a
step costs that only continues, as a line over the number of sequences, and what each token of a
prompt adds to it. It applies only while somebody streams; otherwise a step may be as large as
memory allows.
"""

from bisect import bisect_left

from engine.backends.custom.runtime.model_runner import PROMPT_TOKENS
from engine.core.interfaces.request import STEP_SECONDS, STEP_TOKENS, StepCounts

TARGET_STEP_S = 0.025
PROMPT_SHARE = 1.0  # of what continuing takes
SMOOTHING = 0.2  # what the newest step with prompts counts
MEMORY = 0.99  # how much of a step that only continued is left when the next one is noted
# A step that was interrupted tells nothing; one that is slower for good is believed step by step.
MAX_SURPRISE = 4.0


class Line:
    """seconds = base + slope * count, fitted to what was seen, older points fading."""

    def __init__(self) -> None:
        self._weight = self._counts = self._squares = self._seconds = self._products = 0.0

    def add(self, count: int, seconds: float) -> None:
        self._weight = MEMORY * self._weight + 1
        self._counts = MEMORY * self._counts + count
        self._squares = MEMORY * self._squares + count * count
        self._seconds = MEMORY * self._seconds + seconds
        self._products = MEMORY * self._products + count * seconds

    def at(self, count: int) -> float:
        """0.0 before anything was seen. Points of one count only give a line through zero."""
        if not self._weight:
            return 0.0
        mean, mean_s = self._counts / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean * mean
        if spread > 0.01:
            slope = (self._products / self._weight - mean * mean_s) / spread
        else:
            slope = mean_s / mean
        # More sequences never cost less, nor more than their share.
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s + slope * (count - mean)


class StepBudget:
    """Knows no more than what it was told of finished steps."""

    def __init__(
        self,
        max_tokens: int,
        max_slots: int,
        target_s: float = TARGET_STEP_S,
        least_tokens: int = PROMPT_TOKENS,
    ) -> None:
        """`least_tokens`: of prompts, in every step."""
        self._max_slots = max_slots
        self._least_tokens = least_tokens
        self._max_tokens = max(max_tokens, max_slots)
        self._target_s = target_s
        self._continuing = Line()
        # Of recent steps with prompts, older ones fading: what prompts added, and their tokens.
        self._prompt_s = 0.0
        self._prompt_tokens = 0.0

    def tokens(self, num_decoding: int, num_running: int) -> int:
        """The budget of the next step, at least one token for each running sequence.

        Where continuing alone takes long, prompts may take as long again: half the speed for a
        while, for those who stream, is better than no first token for the others.
        """
        if not num_decoding:
            return self._max_tokens
        continuing_s = self._continuing.at(num_decoding)
        spare_s = max(self._target_s - continuing_s, PROMPT_SHARE * continuing_s)
        affordable = 0.0
        if self._prompt_s:
            affordable = min(spare_s * self._prompt_tokens / self._prompt_s, self._max_tokens)
        wanted = max(num_running + self._least_tokens, num_decoding + int(affordable))
        return min(self._max_tokens, wanted)

    def record(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step continued `num_decoding` sequences and computed so many tokens of prompts."""
        known = self._continuing.at(num_decoding) if num_decoding else 0.0
        if num_prompt_tokens:
            expected = known + self._prompt_cost(num_prompt_tokens)
            added = max(0.0, _believable(seconds, expected) - known)
            self._prompt_s += added - SMOOTHING * self._prompt_s
            self._prompt_tokens += num_prompt_tokens - SMOOTHING * self._prompt_tokens
        else:
            self._continuing.add(num_decoding, _believable(seconds, known))

    def shrink(self) -> None:
        """A step was too large for memory: none is allowed half of that again."""
        self._max_tokens = max(self._max_slots, self._max_tokens // 2)

    def step_s(self, num_rows: int, num_tokens: int) -> float | None:
        """What such a step would take, by all that is known; None before any prompt was."""
        if not self._prompt_tokens:
            return None
        return self._continuing.at(num_rows) + self._prompt_cost(num_tokens - num_rows)

    def _prompt_cost(self, num_tokens: int) -> float:
        return num_tokens * self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0


def _believable(seconds: float, expected: float) -> float:
    return min(seconds, MAX_SURPRISE * expected) if expected else seconds


class StepCounter:
    """Counts the steps of a running engine by their duration and size."""

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
