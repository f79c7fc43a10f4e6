"""Assigns memory to a plan's buffers. Buffers whose lifetimes do not overlap share memory."""

from collections.abc import Sequence

import msgspec

from engine.ir import plan as ir


class Life(msgspec.Struct, frozen=True):
    """A buffer's lifetime: the indices of the first and the last plan step that read or write the
    buffer.
    """

    first: int
    last: int

    def overlaps(self, other: "Life") -> bool:
        """Whether there is a time at which both buffers are needed. This includes a single plan
        step that reads one buffer for the last time and writes the other for the first time.
        """
        return self.first <= other.last and other.first <= self.last


class ArenaPlace(msgspec.Struct, frozen=True):
    """The space that a buffer needs in the plan's memory: `width` floats per token, or per token
    whose logits are needed.
    """

    width: int
    per: ir.RowKind


def touched(step: ir.Step) -> tuple[int, ...]:
    """The buffers that a plan step reads or writes."""
    match step:
        case ir.EmbedStep():
            return (step.out,)
        case (
            ir.LinearStep()
            | ir.NormStep()
            | ir.RouteStep()
            | ir.GateRowsStep()
            | ir.GatherStep()
            | ir.MeanStep()
        ):
            return (step.source, step.out)
        case ir.RecurrentStep():
            return (step.source, step.out)
        case ir.HeadLinearStep():
            return (step.source, step.out)
        case ir.LatentWriteStep():
            return (step.source,)
        case ir.ExpertsStep():
            return (step.source, step.weights, step.out)
        case ir.RopeWriteStep():
            return (step.qkv,)
        case ir.AttentionStep():
            return (step.qkv, step.out)


def lives(steps: Sequence[ir.Step], num_buffers: int, output: int) -> tuple[Life, ...]:
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
    """Divides the plan's memory into places and assigns a place to each buffer. Returns the index
    of each buffer's place, and the width of each place.

    Buffers are placed in the order of their first use. A buffer takes the free place that has to
    grow the least. Among such places, it takes the one with the least unused width. A buffer for
    all tokens never shares a place with a buffer for only the tokens whose logits are needed.
    """
    widths: list[int] = []
    kinds: list[ir.RowKind] = []
    free_from: list[int] = []  # for each place: the index of the plan step from which it is free
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
