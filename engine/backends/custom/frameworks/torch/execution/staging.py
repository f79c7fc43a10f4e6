"""A step's arrays to the device in one copy, and its results back in another.

All of them are int32 and lie side by side in one buffer. The host writes into pinned memory that no
copy in flight is reading, so it never waits: buffers go round, and one that is still in use is left
alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.custom.runtime.seam import I32

ALIGNMENT = 4  # int32 values: kernels load 16 bytes at a time


class Layout:
    """Where each array lies in the buffer. `pads` fill what an array leaves of its room; the `last`
    array is as long as it needs to be.
    """

    def __init__(self, sizes: Mapping[str, int], pads: Mapping[str, int], last: str) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self._pads, self._last = pads, last
        end = 0
        for name, size in sizes.items():
            self._places[name] = (end, size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = end  # but for the last

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def length(self, arrays: Mapping[str, NDArray[np.generic]]) -> int:
        return self.size + arrays[self._last].size

    def write(self, buffer: I32, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        for name, (start, size) in self._places.items():
            values = arrays[name]
            end = start + values.size
            buffer[start:end] = values.reshape(-1)
            if values.size < size and name in self._pads:
                buffer[end : start + size] = self._pads[name]
        last = arrays[self._last]
        buffer[self.size : self.size + last.size] = last.reshape(-1)

    def views(self, buffer: Tensor, fields: Mapping[str, int]) -> dict[str, Tensor]:
        """The arrays as parts of the buffer; those of several `fields` are two-dimensional."""
        found = {name: buffer[start : start + size] for name, (start, size) in self._places.items()}
        found[self._last] = buffer[self.size :]
        for name, width in fields.items():
            found[name] = found[name].view(-1, width)
        return found


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
