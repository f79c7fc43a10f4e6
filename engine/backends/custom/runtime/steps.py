"""A step on its way: between its halves, launched, or failed."""

from dataclasses import dataclass
from typing import Any

from engine.backends.custom.runtime.grammar import MaskJob, MaskRow
from engine.backends.custom.runtime.rows import ScheduledBatch
from engine.backends.custom.runtime.seam import PendingTokens


@dataclass(frozen=True, slots=True)
class Launch:
    """A step on its way through the runner."""

    batch: ScheduledBatch
    pending: PendingTokens
    started_at: float


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A step between its halves."""

    handle: Any
    masks: MaskJob | None


def is_out_of_memory(error: Exception) -> bool:
    # A device's own kind of it has this name, in a library that is not known here.
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def constrained_rows(batch: ScheduledBatch, only_known: bool) -> list[MaskRow]:
    """Matchers, each with its row among those that draw; `only_known`: all tokens are."""
    drawing = (row for row in batch.rows if row.samples)
    return [
        (constraint.matcher, index)
        for index, row in enumerate(drawing)
        if (constraint := row.seq.constraint) is not None
        and row.seq.finish_reason is None
        and not (only_known and row.start + row.length > len(row.seq.tokens))
    ]
