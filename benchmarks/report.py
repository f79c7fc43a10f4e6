"""Tables of several servers' figures: one line per figure, with the ratio to the best peer.

The ratio is the engine's figure divided by the best peer's: rates should be above 1, times below. A
bar is a limit on that ratio, or on the engine's figure itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.peers import OURS, OURS_FAST

MIN_CHUNKS_PER_STEP = 0.95  # below this, tokens arrive in bursts, and latencies mean little
MIN_REUSE_RATIO = 5.0  # min speedup of the first token for a cached prefix
MAX_OTHERS_CORES = 0.2  # if other processes use more cores than this, distrust the figures

Figures = dict[str, Any]
Results = dict[str, dict[str, Figures]]  # server -> scenario label -> figures


@dataclass(frozen=True, slots=True)
class Bar:
    limit: float
    times_best: bool = True  # the bar limits the ratio to the best peer; else the figure itself

    def text(self, higher_is_better: bool) -> str:
        sign = ">=" if higher_is_better else "<="
        return f"{sign} {self.limit:g}{'x best' if self.times_best else ''}"


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    scenario: str  # label of the scenario
    path: tuple[str, ...]  # keys down to a number, or to a spread whose median is used
    higher_is_better: bool
    digits: int = 1
    bar: Bar | None = None
    server: str = OURS  # the server whose figure is compared with the peers'

    def meets(self, own: float | None, best: float | None) -> bool | None:
        """Whether the bar is met; None if there is no bar, or no figure to judge."""
        if self.bar is None or own is None:
            return None
        value = own if not self.bar.times_best else own / best if best else None
        if value is None:
            return None
        return value >= self.bar.limit if self.higher_is_better else value <= self.bar.limit


_COLD = ("first_completion_s",)
# vLLM computes on AMX tiles where a CPU has them, which raises the best peer's prefill and batches.
AMX_BARS = {
    ("prefill", OURS): Bar(1.2),
    ("conc 32", OURS): Bar(2),
    ("conc 32", OURS_FAST): Bar(2.8),
}
HEADLINE = (
    Row("single stream decode, tok/s", "single", ("decode_tps",), True, bar=Bar(2)),
    Row("prefill of 1,024 tokens, tok/s", "prefill", ("prefill_tps",), True, 0, Bar(1.5)),
    Row("8 concurrent, output tok/s", "conc 8", ("output_tps",), True, bar=Bar(3)),
    Row("32 concurrent, output tok/s", "conc 32", ("output_tps",), True, bar=Bar(2.5)),
    Row(
        "32 concurrent, --numerics fast",
        "conc 32",
        ("output_tps",),
        True,
        bar=Bar(3.5),
        server=OURS_FAST,
    ),
    Row("32 sharing 1,024 tokens, 16 at once, s", "prefix", ("wall_s",), False, 2, Bar(0.5)),
    Row("p99 ITL at 8 concurrent, ms", "conc 8", ("itl_ms", "p99"), False, bar=Bar(0.6)),
    Row(
        "start to first completion, no cache, s", "cold unpacked", _COLD, False, 2, Bar(1.2, False)
    ),
    Row("start to first completion, packed, s", "cold", _COLD, False, 2, Bar(0.8, False)),
    Row("peak RSS, MB", "whole run", ("peak_rss_mb",), False, 0, Bar(600, False)),
    Row(
        "fewest chunks per step",
        "whole run",
        ("chunks_per_step",),
        True,
        2,
        Bar(MIN_CHUNKS_PER_STEP, False),
    ),
)
# Lines for scenarios without one above, by the first word of the scenario's label.
MORE_ROWS = {
    "conc": (
        Row("output tok/s", "", ("output_tps",), True),
        Row("TTFT p50, ms", "", ("ttft_ms", "p50"), False),
        Row("ITL p50, ms", "", ("itl_ms", "p50"), False),
    ),
    "reuse": (
        Row("TTFT cold, ms", "", ("ttft_cold_ms",), False),
        Row("TTFT later, ms", "", ("ttft_later_ms",), False),
        Row("cold / later", "", ("cold_over_later",), True),
    ),
    "chat": (
        Row("TTFT first turn, ms", "", ("turns", "first", "ttft_ms"), False),
        Row("TTFT last turn, ms", "", ("turns", "last", "ttft_ms"), False),
        Row("computed tokens, last turn", "", ("turns", "last", "computed_tokens"), False, 0),
    ),
    "grammar": (
        Row("decode tok/s, free", "", ("free_decode_tps",), True),
        Row("decode tok/s, JSON schema", "", ("constrained_decode_tps",), True),
    ),
}


def rows_of(results: Results, has_amx: bool) -> list[Row]:
    """The lines that the engine has figures for."""
    bars = AMX_BARS if has_amx else {}
    rows = [
        replace(row, bar=bars.get((row.scenario, row.server), row.bar))
        for row in HEADLINE
        if row.scenario in results.get(row.server, {})
    ]
    shown = {row.scenario for row in HEADLINE}
    for label in results[OURS]:
        if label not in shown:
            more = MORE_ROWS.get(label.split()[0], ())
            rows += [replace(row, label=f"{label}: {row.label}", scenario=label) for row in more]
    return rows


def value_at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    """The number at a path: "first" and "last" index a list, and a spread gives its median."""
    found = _found(figures, path)
    return found.get("median") if isinstance(found, dict) else found


def best_peer(results: Results, row: Row) -> float | None:
    values = [
        value_at(figures, row.path)
        for name, scenarios in results.items()
        if name not in (OURS, OURS_FAST) and (figures := _whole(scenarios, row.scenario))
    ]
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if row.higher_is_better else min(known)


def bars_table(results: Results, has_amx: bool = False) -> Table:
    """One line per figure: each server's, the engine's ratio to the best peer, and the bar."""
    names = [OURS, *(name for name in results if name not in (OURS, OURS_FAST))]
    table = Table("figure")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for title in ("to best", "bar", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows_of(results, has_amx):
        columns = [row.server, *names[1:]]
        cells = [_cell(results[name], row) for name in columns]
        own = value_at(_whole(results[row.server], row.scenario), row.path)
        best = best_peer(results, row)
        ratio = f"{own / best:.2f}x" if own is not None and best else "-"
        bar = row.bar.text(row.higher_is_better) if row.bar else ""
        verdict = {True: "met", False: "missed", None: ""}[row.meets(own, best)]
        table.add_row(row.label, *cells, ratio, bar, verdict)
    return table


def whole_run(scenarios: Iterable[Figures], peak_rss_mb: float) -> Figures:
    """Figures of a whole run: peak memory, and the worst scenario's chunks per step."""
    chunks = [figures["chunks_per_step"] for figures in scenarios if figures.get("ok")]
    return {"peak_rss_mb": peak_rss_mb, "chunks_per_step": min(chunks, default=None)}


def complaints(results: Results) -> list[str]:
    """Why the engine's own figures are invalid; empty for a good run."""
    found = []
    for name in (OURS, OURS_FAST):
        for label, figures in results.get(name, {}).items():
            if figures.get("failed"):
                reason = figures["first_error"]
                found.append(f"{label}: {figures['failed']} requests to {name} failed: {reason}")
        chunks = results.get(name, {}).get("whole run", {}).get("chunks_per_step")
        if chunks is not None and chunks < MIN_CHUNKS_PER_STEP:
            found.append(f"{name} sent {chunks} chunks per step, below {MIN_CHUNKS_PER_STEP}")
    reuse = results[OURS].get("reuse")
    if reuse is not None:
        times = value_at(reuse, ("cold_over_later",))
        if times is None or times < MIN_REUSE_RATIO:
            found.append(f"reuse: cold / later is {times}, below {MIN_REUSE_RATIO}")
    return found


def remarks(results: Results) -> list[str]:
    """Notes that a reader needs to judge the figures."""
    found = []
    for name, scenarios in results.items():
        for label, figures in scenarios.items():
            others = ((figures.get("cores") or {}).get("others") or {}).get("max", 0.0)
            if others > MAX_OTHERS_CORES:
                found.append(f"{label} on {name}: other work used up to {others} cores")
            if figures.get("short_outputs"):
                found.append(f"{label} on {name}: {figures['short_outputs']} answers were short")
            if figures.get("failed") and name not in (OURS, OURS_FAST):
                found.append(f"{label} on {name}: {figures['failed']} requests failed")
    return found


def _found(figures: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = figures
    for key in path:
        if isinstance(found, list):
            found = found[0 if key == "first" else -1] if found else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def _whole(scenarios: Mapping[str, Figures], label: str) -> Figures:
    """The scenario's figures; empty if requests failed, because the rates of the others mislead."""
    figures = scenarios.get(label, {})
    return {} if figures.get("failed") else figures


def _cell(scenarios: Mapping[str, Figures], row: Row) -> str:
    if scenarios.get(row.scenario, {}).get("failed"):
        return "failed"
    found = _found(_whole(scenarios, row.scenario), row.path)
    if isinstance(found, dict):
        low, middle, high = (f"{found[key]:,.{row.digits}f}" for key in ("min", "median", "max"))
        return middle if low == high else f"{middle} ({low}-{high})"
    return "-" if found is None else f"{found:,.{row.digits}f}"
