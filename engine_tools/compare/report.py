"""Shows the comparison as tables: the figures of each backend, and every difference from the
reference backend.

A backend's output is untrusted text: it is shown without control characters and is never
interpreted as markup.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.routing.shadow.agreement import Agreement, Divergence, compare_answers
from engine_tools.compare.prompts import ComparedPrompt
from engine_tools.compare.run import ComparedOutcome, CompareTrial

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_MAX_ERROR = 100  # max characters of an error in a table


@dataclass(frozen=True, slots=True)
class ComparedBackend:
    """One backend's results. `agreements` has an entry for each prompt. It is None if this backend
    or the reference had an error.
    """

    trial: CompareTrial
    agreements: tuple[Agreement | None, ...]
    is_reference: bool

    def count(self, verdict: str) -> int:
        return sum(each is not None and each.verdict == verdict for each in self.agreements)

    @property
    def num_errors(self) -> int:
        return sum(each.error is not None for each in self.trial.outcomes)

    @property
    def agreement(self) -> float:
        """Share of prompts whose answer equals the reference's or differs by a near tie."""
        if not self.agreements:
            return 0.0
        return (self.count("identical") + self.count("tie")) / len(self.agreements)

    @property
    def distances(self) -> list[float]:
        return [nats for each in self.agreements if each is not None for nats in each.distances]

    @property
    def positions(self) -> list[int]:
        found = [each.divergence for each in self.agreements if each is not None]
        return [each.position for each in found if each is not None]

    def ttft(self, percent: float) -> float | None:
        times = [each.ttft_s for each in self.trial.outcomes if each.ttft_s is not None]
        return percentile(times, percent)

    @property
    def tokens_per_s(self) -> float | None:
        return self.trial.num_tokens / self.trial.wall_s if self.trial.wall_s else None


def rows_of(trials: Sequence[CompareTrial], tie_nats: float) -> list[ComparedBackend]:
    """One row per trial. The first trial is the reference, with which all trials are compared."""
    reference = trials[0].outcomes
    return [
        ComparedBackend(
            trial,
            tuple(
                _agreement(ours, theirs, tie_nats)
                for ours, theirs in zip(reference, trial.outcomes, strict=False)
            ),
            is_reference=index == 0,
        )
        for index, trial in enumerate(trials)
    ]


def _agreement(
    reference: ComparedOutcome, other: ComparedOutcome, tie_nats: float
) -> Agreement | None:
    if reference.error is not None or other.error is not None:
        return None
    return compare_answers(reference.answer, other.answer, tie_nats)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Nearest-rank percentile: the smallest value that is >= at least `percent` % of all values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def as_table(rows: Sequence[ComparedBackend]) -> "Table":
    """The figures as a table. It has one column per backend, so that a comparison of a few backends
    fits into a narrow terminal.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(pad_edge=False)
    table.add_column("")
    for row in rows:
        label = "reference" if row.is_reference else row.trial.contender.kind
        header = Text(plain(row.trial.contender.name))
        table.add_column(header.append(f"\n{plain(label)}", "dim"), justify="right")
    columns = [_figures(row) for row in rows]
    for title in _TITLES:
        table.add_row(title, *[column.get(title, "") for column in columns])
    return table


_TITLES = (
    "identical",
    "near tie",
    "different",
    "errors",
    "first divergence, token",
    "  median",
    "logprob distance, mean",
    "  max",
    "TTFT p50, ms",
    "  p99",
    "tokens/s",
    "start, s",
)


def _figures(row: ComparedBackend) -> dict[str, "str | Text"]:
    from rich.text import Text

    if row.trial.failure is not None:
        return {"errors": Text("did not run", style="bold red")}
    figures: dict[str, str | Text] = {
        "errors": _alarming(row.num_errors),
        "TTFT p50, ms": _number(row.ttft(50), 1000, 0),
        "  p99": _number(row.ttft(99), 1000, 0),
        "tokens/s": _number(row.tokens_per_s, 1, 1),
        "start, s": _number(row.trial.start_s, 1, 1),
    }
    if row.is_reference:
        return figures
    positions, distances = row.positions, row.distances
    return figures | {
        "identical": f"{row.count('identical')} of {len(row.agreements)}",
        "near tie": str(row.count("tie")),
        "different": _alarming(row.count("different")),
        "first divergence, token": _number(min(positions, default=None), 1, 0),
        "  median": _number(statistics.median(positions) if positions else None, 1, 0),
        "logprob distance, mean": _number(statistics.fmean(distances) if distances else None, 1, 4),
        "  max": _number(max(distances, default=None), 1, 4),
    }


def _alarming(count: int) -> "Text":
    from rich.text import Text

    return Text(str(count), style="bold red" if count else "")


def _number(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def differences_table(
    rows: Sequence[ComparedBackend], prompts: Sequence[ComparedPrompt], max_shown: int
) -> "Table | None":
    """A table of the places where answers differ, with real differences before near ties. None if
    all answers agree.
    """
    from rich.table import Table
    from rich.text import Text

    found = [
        (each.verdict, row.trial.contender.name, prompt.id, each.divergence)
        for row in rows
        for prompt, each in zip(prompts, row.agreements, strict=False)
        if each is not None and each.divergence is not None
    ]
    if not found:
        return None
    found.sort(key=lambda each: each[0])  # "different" sorts before "tie"
    title = f"{len(found)} answers part from the reference"
    if len(found) > max_shown:
        title += f"; {max_shown} of them"
    table = Table(pad_edge=False, title=title, title_justify="left")
    for name in ("backend", "prompt", "token", "reference says", "it says", "gap", ""):
        table.add_column(name, overflow="fold")
    for verdict, backend, prompt_id, parting in found[:max_shown]:
        label = Text("near tie") if verdict == "tie" else Text("different", style="red")
        table.add_row(
            Text(plain(backend)),
            Text(plain(prompt_id)),
            str(parting.position),
            Text(repr(parting.reference)),
            Text(repr(parting.other)),
            _gap(parting),
            label,
        )
    return table


def _gap(divergence: Divergence) -> str:
    if divergence.gap is None:
        return "unknown"
    return f"{'> ' if divergence.gap.is_bound else ''}{divergence.gap.nats:.3f}"


def error_lines(rows: Sequence[ComparedBackend]) -> list[str]:
    """Errors and notes of the backends, without duplicates."""
    lines = []
    for row in rows:
        name = plain(row.trial.contender.name)
        if row.trial.failure is not None:
            lines.append(f"{name} did not run: {plain(str(row.trial.failure))}")
        lines += [f"{name}: {note}" for note in row.trial.notes]
        errors = Counter(each.error for each in row.trial.outcomes if each.error is not None)
        for error, count in errors.most_common(3):
            lines.append(f"{name}: {count} x {plain(error)[:_MAX_ERROR]}")
    return lines


def as_json(rows: Sequence[ComparedBackend], prompts: Sequence[ComparedPrompt]) -> dict[str, Any]:
    return {
        "reference": rows[0].trial.contender.name,
        "num_prompts": len(prompts),
        "backends": [_row_json(row, prompts) for row in rows],
    }


def _row_json(row: ComparedBackend, prompts: Sequence[ComparedPrompt]) -> dict[str, Any]:
    trial, distances = row.trial, row.distances
    return {
        "name": trial.contender.name,
        "kind": trial.contender.kind,
        "model": trial.card.id if trial.card is not None else trial.contender.model,
        "failure": None if trial.failure is None else str(trial.failure),
        "notes": list(trial.notes),
        "agreement": row.agreement,
        "identical": row.count("identical"),
        "near_ties": row.count("tie"),
        "different": row.count("different"),
        "errors": row.num_errors,
        "first_divergence_min": min(row.positions, default=None),
        "first_divergence_median": statistics.median(row.positions) if row.positions else None,
        "logprob_distance_mean": statistics.fmean(distances) if distances else None,
        "logprob_distance_max": max(distances, default=None),
        "ttft_p50_s": row.ttft(50),
        "ttft_p99_s": row.ttft(99),
        "tokens": trial.num_tokens,
        "tokens_per_s": row.tokens_per_s,
        "start_s": trial.start_s,
        "prompts": [
            _prompt_json(prompt, outcome, agreement)
            for prompt, outcome, agreement in zip(
                prompts, trial.outcomes, row.agreements, strict=False
            )
        ],
    }


def _prompt_json(
    prompt: ComparedPrompt, outcome: ComparedOutcome, agreement: Agreement | None
) -> dict[str, Any]:
    parting = None if agreement is None else agreement.divergence
    gap = None if parting is None else parting.gap
    return {
        "id": prompt.id,
        "answer": outcome.answer.said,
        "finish_reason": outcome.answer.finish_reason,
        "same_finish_reason": None if agreement is None else agreement.same_finish,
        "tokens": outcome.answer.num_tokens,
        "ttft_s": outcome.ttft_s,
        "error": outcome.error,
        "verdict": "error" if agreement is None else agreement.verdict,
        "divergence": None
        if parting is None
        else {
            "token": parting.position,
            "reference": parting.reference,
            "other": parting.other,
            "gap_nats": None if gap is None else gap.nats,
            "gap_is_lower_bound": None if gap is None else gap.is_bound,
        },
    }


def plain(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)
