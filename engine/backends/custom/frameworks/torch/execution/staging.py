"""Pinned buffers for a step's arrays and for its results, with one copy each.

The host never waits: it writes only to pinned memory that no copy in flight is reading. Buffers are
reused, and a buffer still in use is skipped.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.backends.custom.runtime.model_runner import I32


@dataclass(slots=True)
class Pinned:
    """Page-locked memory as tensor and array, and the event of its last copy."""

    tensor: Tensor
    array: I32 = field(init=False)
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def __post_init__(self) -> None:
        self.array = self.tensor.numpy()


class PinnedRing:
    """A pool of reusable buffers; a buffer that was taken is out of the pool until given back."""

    def __init__(self) -> None:
        self._free: list[Pinned] = []

    def take(self, size: int) -> Pinned:
        """A buffer of at least `size` values that no copy is reading."""
        for index, pinned in enumerate(self._free):
            if len(pinned.array) >= size and pinned.copied.query():
                return self._free.pop(index)
        rounded = 1 << max(size - 1, 1023).bit_length()
        return Pinned(_page_locked(rounded))

    def give_back(self, pinned: Pinned) -> None:
        self._free.append(pinned)


def _page_locked(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)
