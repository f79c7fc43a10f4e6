"""Computes figures from samples. Times are kept in seconds and reported in milliseconds.

A figure of one batch is a number; over repeats it is given as median, min and max. Latency
percentiles are pooled over all requests of all repeats (nearest rank).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.client import Failure, Outcome, Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """One repeat of a scenario: its duration, every outcome, and the cores that were busy."""

    wall: float
    outcomes: tuple[Outcome, ...]
    cores: dict[str, float]
    accepted_drafts: int = 0  # tokens that arrived with another token, as a draft of their step

    @property
    def samples(self) -> list[Sample]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Sample)]

    @property
    def failures(self) -> list[Failure]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Failure)]


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Nearest-rank percentile: the smallest value that is >= at least `percent` % of all values."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(values: Iterable[float | None], digits: int = 2) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "median": round(statistics.median(known), digits),
        "min": round(min(known), digits),
        "max": round(max(known), digits),
    }


def output_rate(batch: Batch) -> float:
    """Output tokens of all requests, per second of the whole batch."""
    return sum(sample.output_tokens for sample in batch.samples) / batch.wall


def total_rate(batch: Batch) -> float:
    tokens = sum(sample.output_tokens + (sample.prompt_tokens or 0) for sample in batch.samples)
    return tokens / batch.wall


def decode_rate(batch: Batch) -> float | None:
    """Decode tokens per second of the median request, after its first token."""
    rates = [1 / sample.tpot for sample in batch.samples if sample.tpot]
    return statistics.median(rates) if rates else None


def prefill_rate(batch: Batch) -> float | None:
    """Prompt tokens per second of the median request, until its first token."""
    known = [(sample.prompt_tokens, sample.ttft) for sample in batch.samples]
    if not known or any(tokens is None for tokens, _ in known):
        return None
    return statistics.median(tokens / ttft for tokens, ttft in known if tokens is not None)


def summarize(batches: Sequence[Batch], output_tokens: int) -> dict[str, Any]:
    """The figures of one scenario on one server."""
    samples = [sample for batch in batches for sample in batch.samples]
    failures = [failure for batch in batches for failure in batch.failures]
    figures: dict[str, Any] = {
        "ok": len(samples),
        "failed": len(failures),
        "wall_s": spread((batch.wall for batch in batches), 3),
        "output_tps": spread(map(output_rate, batches)),
        "total_tps": spread(map(total_rate, batches)),
        "decode_tps": spread(map(decode_rate, batches)),
        "prefill_tps": spread(map(prefill_rate, batches)),
        "ttft_ms": _milliseconds(sample.ttft for sample in samples),
        "itl_ms": _milliseconds(gap for sample in samples for gap in sample.gaps),
        "tpot_ms": _milliseconds(sample.tpot for sample in samples if sample.tpot),
        "e2e_ms": _milliseconds(sample.e2e for sample in samples),
        "prompt_tokens_mean": _mean(sample.prompt_tokens or 0 for sample in samples),
        "output_tokens_mean": _mean(sample.output_tokens for sample in samples),
        "cached_tokens_mean": _mean(sample.cached_tokens or 0 for sample in samples),
        "short_outputs": sum(sample.output_tokens < output_tokens for sample in samples),
        "chunks_per_step": chunks_per_step(batches),
        "counted_by": sorted(
            {"usage" if sample.counted_by_usage else "chunks" for sample in samples}
        ),
        "cores": {
            name: spread(batch.cores[name] for batch in batches)
            for name in (batches[0].cores if batches else ())
        },
    }
    if failures:
        figures["first_error"] = failures[0].reason
    return figures


def prefix_figures(batches: Sequence[Batch]) -> dict[str, Any]:
    """The first request of each batch has a cold prefix; the later ones should hit the prefix
    cache.
    """
    whole = [batch for batch in batches if len(batch.samples) == len(batch.outcomes) > 1]
    cold = [batch.samples[0].ttft for batch in whole]
    later = [[sample.ttft for sample in batch.samples[1:]] for batch in whole]
    medians = [statistics.median(ttfts) for ttfts in later]
    return {
        "ttft_cold_ms": spread(1e3 * ttft for ttft in cold),
        "ttft_later_ms": spread(1e3 * ttft for ttft in medians),
        "cold_over_later": spread(a / b for a, b in zip(cold, medians, strict=True)),
        "cached_tokens_later": _mean(
            sample.cached_tokens or 0 for batch in whole for sample in batch.samples[1:]
        ),
    }


def turn_figures(conversations: Sequence[Sequence[Sample]]) -> list[dict[str, Any]]:
    """For each turn of a replayed conversation: TTFT, and the cached share of the prompt."""
    turns = zip(*conversations, strict=False)
    return [
        {
            "turn": number,
            "ttft_ms": spread(1e3 * sample.ttft for sample in samples),
            "prompt_tokens": _mean(sample.prompt_tokens or 0 for sample in samples),
            "cached_tokens": _mean(sample.cached_tokens or 0 for sample in samples),
            "computed_tokens": _mean(
                (sample.prompt_tokens or 0) - (sample.cached_tokens or 0) for sample in samples
            ),
        }
        for number, samples in enumerate(turns, start=1)
    ]


def grammar_figures(free: Sequence[Batch], constrained: Sequence[Batch]) -> dict[str, Any]:
    """Decode under a grammar compared with decode without one; each pair ran back to back."""
    rates = [
        (decode_rate(one), decode_rate(two)) for one, two in zip(free, constrained, strict=True)
    ]
    return {
        "free_failed": sum(len(batch.failures) for batch in free),
        "free_decode_tps": spread(one for one, _ in rates),
        "constrained_decode_tps": spread(two for _, two in rates),
        "constrained_over_free": spread((two / one for one, two in rates if one and two), 3),
    }


def chunks_per_step(batches: Sequence[Batch]) -> float:
    """Chunks over decode steps of all streams: a step gives a token and its accepted drafts."""
    samples = [sample for batch in batches for sample in batch.samples]
    drafts = sum(batch.accepted_drafts for batch in batches)
    steps = sum(sample.output_tokens for sample in samples) - drafts
    return round(sum(sample.chunks for sample in samples) / max(1, steps), 3)


def _milliseconds(seconds: Iterable[float]) -> dict[str, float | None]:
    values = list(seconds)
    points = {f"p{percent}": percentile(values, percent) for percent in (50, 99)}
    return {
        name: None if value is None else round(1e3 * value, 2) for name, value in points.items()
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return round(statistics.mean(known), 1) if known else None
