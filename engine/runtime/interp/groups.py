"""The taps of a step in groups of fixed size, for frameworks that compile or capture their steps.

Taps of the same kind at the same site are one group, unless they change the same token: the edits
of a token are applied in order, so each is in a later group. Groups are padded to powers of two. A
step with the same `shape` runs the same compiled program, whatever its tokens and vectors are.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.runtime.interp.taps import ADD, CAPTURE, CLAMP, TapInputs
from engine.runtime.model_runner import F32, I32


class GroupShape(NamedTuple):
    """What is compiled: the site, the kind of tap, and the padded number of taps."""

    site: int
    kind: int
    size: int


@dataclass(frozen=True, slots=True)
class TapGroup:
    shape: GroupShape
    tokens: I32  # (size,) padding repeats the first token
    scales: F32  # (size,) padding of ADD has scale 0
    vectors: F32  # (size, W + EXTRA_COLUMNS); of CAPTURE (0, ...)
    decoders: F32  # of CLAMP (size, W + EXTRA_COLUMNS), otherwise (0, ...)
    rows: I32  # of CAPTURE: the rows of the result that the group's first rows are


@lru_cache(maxsize=4)
def grouped(taps: TapInputs) -> tuple[TapGroup, ...]:
    """In the order in which they are applied."""
    count = len(taps.sites)
    starts = np.flatnonzero(np.r_[True, (np.diff(taps.sites) != 0) | (np.diff(taps.tokens) != 0)])
    turn = np.arange(count) - np.repeat(starts, np.diff(np.r_[starts, count]))
    order = np.lexsort((taps.kinds, turn, taps.sites))
    keys = np.stack([taps.sites, turn, taps.kinds])[:, order]
    edges = np.flatnonzero(np.r_[True, (np.diff(keys) != 0).any(axis=0), True])
    spans = zip(edges[:-1], edges[1:], strict=True)
    return tuple(_group(taps, order[first:last]) for first, last in spans)


def _group(taps: TapInputs, members: np.ndarray) -> TapGroup:
    count = len(members)
    size = 1 << (count - 1).bit_length()
    padded = np.r_[members, np.full(size - count, members[0])]
    kind = int(taps.kinds[members[0]])
    scales = taps.scales[padded].copy()
    if kind == ADD:
        scales[count:] = 0
    none = taps.vectors[:0]
    rows = taps.rows[padded]
    return TapGroup(
        GroupShape(int(taps.sites[members[0]]), kind, size),
        taps.tokens[padded],
        scales,
        none if kind == CAPTURE else taps.vectors[rows],
        taps.vectors[rows + 1] if kind == CLAMP else none,
        taps.rows[members] if kind == CAPTURE else rows[:0],
    )
