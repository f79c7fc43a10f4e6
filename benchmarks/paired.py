"""What one way of asking adds to another, from times that were taken in turn.

The rounds are divided into parts, and each part has a figure. The result is the median of these
figures, so a disturbance of a few seconds does not change it. Their range says how well two runs
agree. Times are in seconds, and results in milliseconds.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

NUM_PARTS = 5


def added_median(base: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """The median difference between times of the same round."""
    pairs = list(zip(base, other, strict=True))
    return _over_parts(
        lambda part: statistics.median(b - a for a, b in pairs[part::NUM_PARTS]),
    )


def added_p99(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The difference between the 99th percentiles. Each round has several times."""
    return _over_parts(lambda part: _p99(other[part::NUM_PARTS]) - _p99(base[part::NUM_PARTS]))


def _p99(rounds: Sequence[Sequence[float]]) -> float:
    times = sorted(each for times in rounds for each in times)
    return times[len(times) * 99 // 100]


def _over_parts(figure: Callable[[int], float]) -> dict[str, Any]:
    parts = [figure(part) * 1e3 for part in range(NUM_PARTS)]
    return {
        "added_ms": round(statistics.median(parts), 2),
        "from_to_ms": [round(min(parts), 2), round(max(parts), 2)],
    }
