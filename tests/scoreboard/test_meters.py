"""Tests of the statistics that figures use."""

import random

import pytest

from tests.scoreboard.meters import mann_whitney_p, slope_per_minute, token_gaps
from tests.scoreboard.streams import Reply


def sample(mean: float, seed: int) -> list[float]:
    chooser = random.Random(seed)
    return [chooser.gauss(mean, 1.0) for _ in range(200)]


def test_mann_whitney_p_separates_different_distributions() -> None:
    same = [mann_whitney_p(sample(0, seed), sample(0, 1000 + seed)) for seed in range(200)]
    assert 0.02 < sum(p < 0.1 for p in same) / 200 < 0.2
    assert mann_whitney_p(sample(0, 1), sample(1, 2)) < 1e-6
    assert mann_whitney_p(sample(1, 1), sample(0, 2)) < 1e-6


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([1, 1, 1], [1, 1, 1], 1.0),
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 0.0122),
        ([1, 2, 2, 3], [2, 3, 4, 4], 0.1342),
    ],
)
def test_mann_whitney_p_of_known_samples(first: list[float], second: list[float], p: float) -> None:
    assert mann_whitney_p(first, second) == pytest.approx(p, abs=1e-4)


def test_slope_per_minute_needs_three_points() -> None:
    assert slope_per_minute([(0, 5.0), (30, 6.0), (60, 7.0)]) == pytest.approx(2.0)
    assert slope_per_minute([(0, 5.0), (30, 9.0)]) == 0.0


def test_token_gaps_are_measured_within_one_stream() -> None:
    replies = [Reply(0.0, times=[1.0, 5.0, 6.0, 8.0]), Reply(0.0, times=[2.0, 3.0, 3.5])]
    assert token_gaps(replies, 0.0, 10.0) == [1.0, 2.0, 0.5]
    assert token_gaps(replies, 4.0, 7.0) == [1.0]
