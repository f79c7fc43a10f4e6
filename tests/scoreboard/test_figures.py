"""Runs every figure with a few cases, and every case that ever failed."""

import json

import pytest

from tests.scoreboard.figure import Limit, Run, all_figures, at_least, at_most, figure
from tests.scoreboard.record import SEEDS, read_lines

FIGURES = all_figures()


@pytest.mark.parametrize("id", [each.id for each in FIGURES.values() if each.in_quick])
def test_scoreboard_figure_keeps_its_limits_on_a_quick_run(id: str) -> None:
    result = FIGURES[id].take(seed=1, quick=True)
    assert result["pass"], json.dumps(result)


def test_scoreboard_cases_that_once_failed_pass() -> None:
    for each in read_lines(SEEDS):
        case = FIGURES[each["id"]].case
        assert case is not None, each
        case(each["seed"])


@pytest.mark.parametrize(
    ("limit", "value", "holds"),
    [
        (at_most(0), 0, True),
        (at_most(0), 1, False),
        (at_most(5), float("nan"), False),
        (at_least(5), 5, True),
        (at_least(5), 4.9, False),
        (at_least(5), float("nan"), False),
    ],
)
def test_limit_holds_for_values_within_its_bound(limit: Limit, value: float, holds: bool) -> None:
    assert limit.holds(value) is holds


def test_a_scoreboard_figure_without_cases_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict = {}
    monkeypatch.setattr("tests.scoreboard.figure._FIGURES", registry)

    def measuring(values: dict[str, float], cases: int):
        def measure(run: Run) -> dict[str, float]:
            run.cases = cases
            return values

        return measure

    for id, values, cases in (("A", {"x": 0}, 0), ("B", {}, 1), ("C", {"x": 1}, 1)):
        figure(id, id, minutes=1, limits={"x": at_most(0)})(measuring(values, cases))
        assert not registry[id].take(seed=1)["pass"]
    figure("D", "D", minutes=1, limits={"x": at_most(0)})(measuring({"x": 0}, 1))
    assert registry["D"].take(seed=1)["pass"]


def test_a_failing_case_is_reported_with_its_seed() -> None:
    def case(seed: int) -> None:
        if seed % 3 == 0:
            raise ValueError("divisible")

    run = Run(seed=7)
    run.repeat(100, case)
    assert run.cases == 100
    assert run.failing_seeds
    assert all(seed % 3 == 0 for seed in run.failing_seeds)
    assert len(run.failures) == len(run.failing_seeds)
