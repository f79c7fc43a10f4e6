"""The positions of a sequence that a capture or an edit is for, and the captured values."""

from dataclasses import dataclass

import numpy as np

from engine.core.interfaces.interp import Span
from engine.runtime.interp.taps import CAPTURE
from engine.runtime.model_runner import F32, I32, Bools


@dataclass(frozen=True, slots=True)
class Placed:
    """A capture or an edit with its site's number and its positions in the sequence."""

    site: int
    first: int
    end: int
    places: I32 | None  # sorted; None: all from `first` to `end` - 1
    kind: int = CAPTURE
    scale: float = 1.0
    first_vector: int = 0
    num_vectors: int = 0
    # The vector of each position, if positions have vectors of their own
    vector_of: dict[int, int] | None = None

    def among(self, start: int, end: int) -> tuple[int, int]:
        """The range of indices in `places` whose positions are from `start` to `end` - 1."""
        if self.places is None:
            low = min(max(start, self.first), self.end)
            return low - self.first, max(low, min(end, self.end)) - self.first
        low, high = np.searchsorted(self.places, (start, max(start, end))).tolist()
        return low, high

    def wanted(self, start: int, end: int) -> I32:
        """The positions from `start` to `end` - 1 at which it applies."""
        low, high = self.among(start, end)
        if self.places is None:
            return np.arange(self.first + low, self.first + high, dtype=np.int32)
        return self.places[low:high]

    def __len__(self) -> int:
        return self.end - self.first if self.places is None else len(self.places)


def placed(site: int, span: Span, num_prompt: int, num_tokens: int) -> Placed:
    """The positions of a span in a sequence of at most `num_tokens`."""
    first = num_prompt if span.phase == "decode" else 0
    end = min(num_prompt, num_tokens) if span.phase == "prompt" else num_tokens
    chosen = span.resolved(num_prompt)
    if chosen is None:
        return Placed(site, first, max(first, end), None)
    places = np.array(sorted(each for each in chosen if first <= each < end), np.int32)
    return Placed(site, first, end, places)


def joined(parts: list[Placed], num_tokens: int) -> Placed:
    """All positions of captures of one site, each once."""
    first = parts[0]
    if len(parts) == 1:
        return first
    is_wanted = np.zeros(num_tokens, np.bool_)
    for each in parts:
        is_wanted[slice(each.first, each.end) if each.places is None else each.places] = True
    if is_wanted.all():
        return Placed(first.site, 0, num_tokens, None)
    return Placed(first.site, 0, num_tokens, np.flatnonzero(is_wanted).astype(np.int32))


class Kept:
    """What was captured at a site. `is_known` says which of its positions have values."""

    def __init__(self, where: Placed, width: int) -> None:
        self.where = where
        self.is_known: Bools = np.zeros(len(where), np.bool_)
        self._width = width
        self._rows: F32 | None = None  # made when the first value arrives

    def lacks(self, start: int, end: int) -> bool:
        """Whether a position from `start` to `end` - 1 has no value yet."""
        low, high = self.where.among(start, end)
        return not self.is_known[low:high].all()

    def keep(self, start: int, end: int, rows: F32, is_computed: Bools | None) -> None:
        """Keep the values of positions from `start` to `end` - 1 that are not known. A value that
        is computed again after a preemption is the same. `is_computed` says which positions of the
        step have values at all; None: all of them.
        """
        low, high = self.where.among(start, end)
        if low == high:
            return
        if self._rows is None:
            self._rows = np.empty((len(self.where), self._width), np.float32)
        is_new = ~self.is_known[low:high]
        if is_computed is not None:
            is_new &= is_computed[self.where.wanted(start, end) - start]
        self._rows[low:high][is_new] = rows[is_new, : self._width]
        self.is_known[low:high] |= is_new

    def values(self, places: I32) -> F32 | None:
        """The values at positions, which are sorted. None if one of them was not captured."""
        where = self.where
        if where.places is None:
            index = places - np.int32(where.first)
        else:
            index = np.searchsorted(where.places, places).astype(np.int32)
        if self._rows is None or not self.is_known[index].all():
            return None
        first, last = int(index[0]), int(index[-1])
        is_run = last - first + 1 == len(index)
        found: F32 = self._rows[first : last + 1] if is_run else self._rows[index]
        return found
