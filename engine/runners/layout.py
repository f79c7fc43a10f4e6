"""Packs many small arrays into one vector of 32-bit words. So a single copy moves all of the arrays
to a device.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runtime.model_runner import I32

ALIGNMENT = 4  # in words; arrays start at multiples of 16 bytes, because kernels load 16 at a time

Arrays = Mapping[str, NDArray[np.generic]]


class Layout:
    """The place of each array in the vector. `sizes` has the length of each place in words. If an
    array is shorter than its place, the rest is filled with the array's value in `pads`. The array
    `last`, if there is one, comes after all others and may have any length.
    """

    def __init__(
        self, sizes: Mapping[str, int], pads: Mapping[str, int], last: str | None = None
    ) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        self._pads, self._last = pads, last
        end = 0
        for name, size in sizes.items():
            self._places[name] = (end, size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.size = end  # size of the vector in words, without the last array

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def length(self, arrays: Arrays) -> int:
        return self.size if self._last is None else self.size + arrays[self._last].size

    def write(self, buffer: I32, arrays: Arrays) -> None:
        for name, (start, size) in self._places.items():
            values = arrays[name]
            end = start + values.size
            buffer[start:end] = values.reshape(-1)
            if values.size < size and name in self._pads:
                buffer[end : start + size] = self._pads[name]
        if self._last is not None:
            last = arrays[self._last]
            buffer[self.size : self.size + last.size] = last.reshape(-1)

    def packed(self, arrays: Arrays) -> I32:
        vector = np.empty(self.length(arrays), np.int32)
        self.write(vector, arrays)
        return vector

    def views(self, buffer: Any, fields: Mapping[str, int]) -> dict[str, Any]:
        """The arrays as slices of the vector, which may be a tensor of any library. An array that
        is named in `fields` is reshaped to that many columns.
        """
        found = {name: buffer[start : start + size] for name, (start, size) in self._places.items()}
        if self._last is not None:
            found[self._last] = buffer[self.size :]
        for name, width in fields.items():
            found[name] = found[name].reshape(-1, width)
        return found
