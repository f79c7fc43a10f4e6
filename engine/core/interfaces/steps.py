"""How many steps an engine has made, by their time and by their size.

The engine counts every one and tells the counts, as a frontend sees only some of the steps.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEP_TOKENS = tuple(2**power for power in range(15))


class StepCounts(msgspec.Struct, frozen=True, array_like=True):
    """Steps up to each edge and above the one before it, the last ones above every edge; and what
    their times and sizes come to.
    """

    by_seconds: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)
    by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    seconds: float = 0.0
    tokens: int = 0

    def __add__(self, other: "StepCounts") -> "StepCounts":
        return self._with(other, 1)

    def __sub__(self, other: "StepCounts") -> "StepCounts":
        return self._with(other, -1)

    def _with(self, other: "StepCounts", sign: int) -> "StepCounts":
        def each(own: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
            return tuple(a + sign * b for a, b in zip(own, others, strict=True))

        return StepCounts(
            each(self.by_seconds, other.by_seconds),
            each(self.by_tokens, other.by_tokens),
            self.seconds + sign * other.seconds,
            self.tokens + sign * other.tokens,
        )


class StepCounter:
    """Counts of an engine that runs."""

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
