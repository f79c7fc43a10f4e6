"""The waiting line: first come first served within a priority, with aging between priorities.

A sequence gains one priority for every AGING_STEPS steps since it was submitted, so that a stream
of urgent requests delays an unimportant one for a bounded time only.
"""

import heapq
from bisect import insort
from collections.abc import Iterator

from engine.backends.custom.runtime.sequence import Sequence

AGING_STEPS = 1024


class WaitingLine:
    """One line per priority, each sorted by arrival, so that a preempted sequence keeps its
    seniority.
    """

    def __init__(self) -> None:
        self._lines: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def add(self, seq: Sequence) -> None:
        insort(self._lines.setdefault(seq.priority, []), seq, key=lambda s: s.arrival)

    def remove(self, seq: Sequence) -> None:
        line = self._lines[seq.priority]
        line.remove(seq)
        if not line:
            del self._lines[seq.priority]

    def in_order(self, step: int) -> Iterator[Sequence]:
        """Everybody, in the order of admission at this step; who is taken may leave meanwhile."""

        def aged(seq: Sequence) -> tuple[int, int]:
            return (seq.priority - (step - seq.submitted_step) // AGING_STEPS, seq.arrival)

        # Within a line whoever came earlier has aged at least as much, so each is in order already.
        return heapq.merge(*(list(line) for line in self._lines.values()), key=aged)
