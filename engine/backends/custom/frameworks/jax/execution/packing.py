"""Many small arrays as one vector of 32-bit words, so that a step crosses to the device in one
copy.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from jax import Array

from engine.backends.custom.runtime.seam import I32

Shape = tuple[int, ...]
Words = Any  # numpy's array on the host, JAX's in a traced function


def pack(arrays: Sequence[Words]) -> I32:
    """Arrays of int32, uint32 or float32, bit by bit."""
    return np.concatenate([array.reshape(-1).view(np.int32) for array in arrays])


def unpack(packed: Array, shapes: Sequence[Shape]) -> list[Array]:
    """The arrays of the given shapes, all as int32."""
    found, start = [], 0
    for shape in shapes:
        size = prod(shape)
        found.append(packed[start : start + size].reshape(shape))
        start += size
    assert start == len(packed), (start, len(packed))
    return found


def padded(array: Words, size: int, value: float = 0) -> Words:
    """The array's first dimension filled up to `size`."""
    if len(array) == size:
        return array
    out = np.full((size, *array.shape[1:]), value, array.dtype)
    out[: len(array)] = array
    return out
