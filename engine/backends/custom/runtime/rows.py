"""What a step consists of."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.backends.custom.runtime.sequence import Sequence


class Row(NamedTuple):
    """Tokens start .. start + length - 1 of a sequence; `life` tells a row of an earlier admission
    apart. A tuple, because hundreds are made and taken apart in every step.
    """

    seq: Sequence
    start: int
    length: int
    samples: bool
    slot: int
    life: int
    num_scored: int = 0  # of its tokens: the next one is known, and its probability wanted


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)
