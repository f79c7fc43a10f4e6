"""Assigns memory to a plan's buffers. Buffers whose lifetimes do not overlap share memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.custom.ir.plan import (
    AttentionStep,
    EmbedStep,
    ExpertsStep,
    GateRowsStep,
    GatherStep,
    LinearStep,
    NormStep,
    RopeWriteStep,
    RouteStep,
    RowKind,
    Step,
)


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer's lifetime: the first and the last plan step that read or write it, by index."""

    first: int
    last: int

    def overlaps(self, other: "Life") -> bool:
        """Whether any plan step needs both buffers. One step may read the first and write the
        second, so lifetimes that meet in one step overlap.
        """
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True, slots=True)
class ArenaPlace:
    """The space that a buffer needs in the arena."""

    width: int
    per: RowKind


def touched(step: Step) -> tuple[int, ...]:
    """The buffers that a plan step reads or writes."""
    match step:
        case EmbedStep():
            return (step.out,)
        case LinearStep() | NormStep() | RouteStep() | GateRowsStep() | GatherStep():
            return (step.source, step.out)
        case ExpertsStep():
            return (step.source, step.weights, step.out)
        case RopeWriteStep():
            return (step.qkv,)
        case AttentionStep():
            return (step.qkv, step.out)


def lives(steps: Sequence[Step], num_buffers: int, output: int) -> tuple[Life, ...]:
    """The lifetime of each buffer. The output buffer lives until the last step."""
    first, last = [len(steps)] * num_buffers, [0] * num_buffers
    for index, step in enumerate(steps):
        for buffer in touched(step):
            first[buffer] = min(first[buffer], index)
            last[buffer] = index
    last[output] = len(steps) - 1
    return tuple(map(Life, first, last))


def assign_places(
    rooms: Sequence[ArenaPlace], spans: Sequence[Life]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the index of each buffer's place in the arena, and the width of each place.

    Buffers are placed in the order of their first use. A buffer takes the free place that has to
    grow the least; among equals, the place with the least unused width. Buffers with a row per
    token and buffers with a row per logit never share a place.
    """
    widths: list[int] = []
    kinds: list[RowKind] = []
    free_from: list[int] = []  # per place: the first plan step at which it is free
    chosen = [0] * len(rooms)
    for index in sorted(range(len(rooms)), key=lambda each: spans[each].first):
        room, span = rooms[index], spans[index]
        free = [
            place
            for place, when in enumerate(free_from)
            if when <= span.first and kinds[place] == room.per
        ]
        if not free:
            free = [len(widths)]
            widths.append(0)
            kinds.append(room.per)
            free_from.append(0)
        place = min(free, key=lambda each: _fit(room.width, widths[each]))
        widths[place] = max(widths[place], room.width)
        free_from[place] = span.last + 1
        chosen[index] = place
    return tuple(chosen), tuple(widths)


def _fit(needed: int, width: int) -> tuple[int, int]:
    return max(0, needed - width), max(0, width - needed)
