"""The waiting line: first come first served within a priority, with aging between priorities.

A sequence gains one priority for every AGING_STEPS steps that it waits, so that a stream of urgent
requests delays an unimportant one for a bounded time only.
"""

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

    def add(self, seq: Sequence, step: int) -> None:
        seq.waiting_since = step
        insort(self._lines.setdefault(seq.priority, []), seq, key=lambda s: s.arrival)

    def remove(self, seq: Sequence) -> None:
        line = self._lines[seq.priority]
        line.remove(seq)
        if not line:
            del self._lines[seq.priority]

    def in_order(self, step: int) -> list[Sequence]:
        """Everybody, in the order of admission at this step."""
        if len(self._lines) == 1:
            return list(next(iter(self._lines.values())))
        aged = [
            (seq.priority - (step - seq.waiting_since) // AGING_STEPS, seq.arrival, seq)
            for seq in self
        ]
        return [seq for *_, seq in sorted(aged, key=lambda entry: entry[:2])]
