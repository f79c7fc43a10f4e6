"""Figures of several servers side by side: one row per figure, the ratio to the first server last.

A ratio above 1 says that the first server is better, whichever way the figure points.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.figures import spread

Rounds = list[dict[str, Any]]  # one server's figures of one scenario, per round


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    path: tuple[str, ...]  # keys down to a number, or to a spread whose median counts
    higher_is_better: bool
    digits: int = 1


COLD_ROWS = (
    Row("process start to ready, s", ("ready_s",), False, 2),
    Row("process start to first completion, s", ("first_completion_s",), False, 2),
)
LOAD_ROWS = (
    Row("output tok/s", ("output_tps",), True),
    Row("TTFT p50, ms", ("ttft_ms", "p50"), False),
    Row("ITL p50, ms", ("itl_ms", "p50"), False),
    Row("peak RSS, MB", ("peak_rss_mb",), False, 0),
)
SCENARIO_ROWS = {
    "cold": COLD_ROWS,
    "single": (Row("decode tok/s", ("decode_tps",), True), *LOAD_ROWS[1:]),
    "prefill": (Row("prefill tok/s", ("prefill_tps",), True),),
    "conc": LOAD_ROWS,
    "prefix": (
        Row("TTFT cold, ms", ("ttft_cold_ms",), False),
        Row("TTFT later, ms", ("ttft_later_ms",), False),
        Row("cold / later", ("cold_over_later",), True),
        Row("cached tokens, later", ("cached_tokens_later",), True, 0),
        Row("output tok/s", ("output_tps",), True),
    ),
    "chat": (
        Row("TTFT first turn, ms", ("turns", "first", "ttft_ms"), False),
        Row("TTFT last turn, ms", ("turns", "last", "ttft_ms"), False),
        Row("cached tokens, last turn", ("turns", "last", "cached_tokens"), True, 0),
        Row("computed tokens, last turn", ("turns", "last", "computed_tokens"), False, 0),
        Row("output tok/s", ("output_tps",), True),
    ),
    "grammar": (
        Row("decode tok/s, free", ("free_decode_tps",), True),
        Row("decode tok/s, JSON schema", ("constrained_decode_tps",), True),
        Row("JSON schema / free", ("constrained_over_free",), True, 3),
    ),
}


def value_at(figures: dict[str, Any], path: tuple[str, ...]) -> float | None:
    """The number at a path; a list is entered by "first" or "last", a spread by its median."""
    found: Any = figures
    for key in path:
        if isinstance(found, list):
            found = found[0 if key == "first" else -1] if found else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found.get("median") if isinstance(found, dict) else found


def row_spread(rounds: Rounds, row: Row) -> dict[str, float] | None:
    return spread((value_at(figures, row.path) for figures in rounds), 3)


def ratio(first: Rounds, other: Rounds, row: Row) -> float | None:
    """How many times better the first server is: the median of the rounds' own ratios."""
    pairs = [
        (value_at(one, row.path), value_at(two, row.path))
        for one, two in zip(first, other, strict=False)
    ]
    ratios = [one / two if row.higher_is_better else two / one for one, two in pairs if one and two]
    return statistics.median(ratios) if ratios else None


def comparison_table(results: dict[str, dict[str, Rounds]]) -> Table:
    """`results` maps server -> scenario label -> rounds; every server has every scenario."""
    names = list(results)
    table = Table("scenario", "figure")
    for name in names:
        table.add_column(name, justify="right")
    for name in names[1:]:
        table.add_column(f"{names[0]} vs {name}", justify="right")
    for label in results[names[0]]:
        table.add_section()
        for position, row in enumerate(SCENARIO_ROWS[label.split()[0]]):
            per_server = [results[name][label] for name in names]
            cells = [_cell(row_spread(rounds, row), row.digits) for rounds in per_server]
            ratios = [ratio(per_server[0], rounds, row) for rounds in per_server[1:]]
            shown = ["-" if value is None else f"{value:.2f}x" for value in ratios]
            table.add_row(label if position == 0 else "", row.label, *cells, *shown)
    return table


def _cell(values: dict[str, float] | None, digits: int) -> str:
    if values is None:
        return "-"
    low, middle, high = (f"{values[key]:,.{digits}f}" for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"
