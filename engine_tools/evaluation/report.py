"""The figures of an evaluation: the share of right answers with its interval, and whether two
models differ by more than chance.

Answers are untrusted text: they are shown without control characters and never as markup.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from engine_tools.evaluation.items import Item, expected
from engine_tools.evaluation.run import EvaluatedModel

if TYPE_CHECKING:
    from rich.table import Table

_Z = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True, slots=True)
class Share:
    num_right: int
    total: int

    @property
    def value(self) -> float:
        return self.num_right / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, which holds for few questions and for shares near 0 and 1."""
        if not self.total:
            return 0.0, 1.0
        n, p = self.total, self.value
        center = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        return max(0.0, center - half), min(1.0, center + half)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two models on the questions that both answered."""

    first: str
    second: str
    only_first: int  # questions that only the first answered right
    only_second: int

    @property
    def chance(self) -> float:
        """McNemar's exact test: how likely equally good models differ at least this much."""
        total, fewer = self.only_first + self.only_second, min(self.only_first, self.only_second)
        tail = sum(math.comb(total, k) for k in range(fewer + 1))
        return float(min(Fraction(1), Fraction(2 * tail, 1 << total)))


def shares(evaluated: EvaluatedModel) -> dict[str, Share]:
    """Each measure's share of right answers. Questions that failed do not count."""
    found: dict[str, list[bool]] = {}
    for result in evaluated.results:
        for measure, is_right in ({} if result is None else result.scores).items():
            found.setdefault(measure, []).append(is_right)
    return {measure: Share(sum(each), len(each)) for measure, each in found.items()}


def overall(evaluated: EvaluatedModel) -> Share:
    """The share over all questions, each by the measure of its own check."""
    decided = [each for each in map(_is_right, evaluated.results) if each is not None]
    return Share(sum(decided), len(decided))


def _is_right(result: Any) -> bool | None:
    return next(iter(result.scores.values()), None) if result is not None else None


def differences(models: Sequence[EvaluatedModel]) -> list[Difference]:
    """Every later model against the first one."""
    first, *others = models
    return [_difference(first, other) for other in others]


def _difference(first: EvaluatedModel, second: EvaluatedModel) -> Difference:
    pairs = [
        (_is_right(a), _is_right(b)) for a, b in zip(first.results, second.results, strict=True)
    ]
    return Difference(
        first.name, second.name, pairs.count((True, False)), pairs.count((False, True))
    )


def as_table(models: Sequence[EvaluatedModel]) -> "Table":
    """A row for each model, and one for each measure if there are several."""
    from rich.table import Column, Table

    name = Column("model", overflow="fold")
    table = Table(name, "measure", "right", "share", "95 % interval", "tok/s")
    for each in models:
        by_measure = shares(each)
        rate = f"{each.num_tokens / each.wall_s:.0f}" if each.num_tokens else "-"
        whole = "all" if len(by_measure) > 1 else next(iter(by_measure), "-")
        table.add_row(_plain(each.name), whole, *_cells(overall(each)), rate)
        for measure, share in by_measure.items() if len(by_measure) > 1 else ():
            table.add_row("", measure, *_cells(share), "")
    return table


def _cells(share: Share) -> tuple[str, str, str]:
    low, high = share.interval
    return f"{share.num_right} of {share.total}", f"{share.value:.1%}", f"{low:.1%} - {high:.1%}"


def difference_lines(models: Sequence[EvaluatedModel]) -> list[str]:
    lines = []
    for each in differences(models):
        lines.append(
            f"only {_plain(each.second)} right: {each.only_second}; only {_plain(each.first)}"
            f" right: {each.only_first}; chance that equal models differ so: {each.chance:.3f}"
        )
    return lines


def wrong_table(
    models: Sequence[EvaluatedModel], items: Sequence[Item], limit: int
) -> "Table | None":
    """The first wrong answers, or None if there are none."""
    from rich.table import Table
    from rich.text import Text

    table = Table("question", "model", "wrong answer", "expected")
    for index, item in enumerate(items):
        for each in models:
            result = each.results[index]
            if table.row_count < limit and result is not None and _is_right(result) is False:
                asked = f"{item.id}: {item.question}"
                shown = [asked, each.name, result.answer, expected(item.check)]
                table.add_row(*(Text(_plain(text)[:120]) for text in shown))
    return table if table.row_count else None


def as_json(models: Sequence[EvaluatedModel]) -> dict[str, Any]:
    return {
        "models": [
            {
                "model": each.name,
                "right": overall(each).num_right,
                "answered": overall(each).total,
                "share": overall(each).value,
                "interval_95": overall(each).interval,
                "measures": {name: share.value for name, share in shares(each).items()},
                "errors": list(each.errors),
            }
            for each in models
        ],
        "differences": [
            {
                "first": each.first,
                "second": each.second,
                "only_first": each.only_first,
                "only_second": each.only_second,
                "chance": each.chance,
            }
            for each in differences(models)
        ],
    }


def _plain(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)
