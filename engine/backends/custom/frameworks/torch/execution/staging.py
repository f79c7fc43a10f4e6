"""Buffers for a step's arrays, and for its results, on their way in one copy each.

The host writes into pinned memory that no copy in flight is reading, so it never waits: buffers go
round, and one that is still in use is left alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.custom.runtime.model_runner import I32


@dataclass(slots=True)
class Pinned:
    """Page-locked memory, seen by both sides, and when its last copy was done."""

    tensor: Tensor
    array: I32 = field(init=False)
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def __post_init__(self) -> None:
        self.array = self.tensor.numpy()


class PinnedRing:
    """Buffers that are used in turn; `taken` ones are kept by whoever took them."""

    def __init__(self) -> None:
        self._free: list[Pinned] = []

    def take(self, size: int) -> Pinned:
        """A buffer of at least so many values that nothing is being copied from."""
        for index, pinned in enumerate(self._free):
            if len(pinned.array) >= size and pinned.copied.query():
                return self._free.pop(index)
        rounded = 1 << max(size - 1, 1023).bit_length()
        return Pinned(_page_locked(rounded))

    def give_back(self, pinned: Pinned) -> None:
        self._free.append(pinned)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)
