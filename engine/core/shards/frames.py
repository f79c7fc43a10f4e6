"""Frames: plain values and arrays as bytes, without pickle. A frame carries a step to the ranks.

A frame begins with the lengths of two parts in msgpack: the plain values, then the dtype and the
shape of each array. The bytes of the arrays follow, each at a multiple of 8.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import EngineError

Array = NDArray[Any]
_LENGTHS = struct.Struct("<II")
_ALIGN = 8
_PADDING = [bytes(length) for length in range(_ALIGN)]
_NAMES = ("|b1", "|u1", "|i1", "<u4", "<i4", "<i8", "<f2", "<f4", "<u2", "<f8")
_DTYPES = [np.dtype(name) for name in _NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_decode_values = msgspec.msgpack.Decoder(list[Any]).decode
_decode_shapes = msgspec.msgpack.Decoder(list[tuple[int, list[int]] | None]).decode
_encode = msgspec.msgpack.Encoder().encode


# What a decoder raises for bytes of any kind. Nested lists reach the limit of recursion.
_BAD_FRAME = (
    *(struct.error, msgspec.MsgspecError, IndexError, ValueError),
    *(OverflowError, RecursionError, TypeError),
)


class FrameError(EngineError):
    """The bytes are no frame."""


def encode_frame(values: Sequence[Any], arrays: Sequence[Array | None] = ()) -> bytes:
    """A frame with plain values, such as its kind and the step's number, and with arrays."""
    shapes: list[Any] = []
    parts: list[Any] = [b"", b"", b"", b""]
    for each in arrays:
        if each is None:
            shapes.append(None)
            continue
        shapes.append((_CODES[each.dtype], each.shape))
        parts.append(each if each.flags.c_contiguous else np.ascontiguousarray(each))
        if rest := each.nbytes % _ALIGN:
            parts.append(_PADDING[_ALIGN - rest])
    plain, described = _encode(values), _encode(shapes)
    length = _LENGTHS.size + len(plain) + len(described)
    parts[:4] = (
        _LENGTHS.pack(len(plain), len(described)),
        plain,
        described,
        _PADDING[-length % _ALIGN],
    )
    return b"".join(parts)


def decode_frame(frame: bytearray | bytes) -> tuple[list[Any], list[Array | None]]:
    """The plain values and the arrays, which share the frame's memory."""
    try:
        num_plain, num_described = _LENGTHS.unpack_from(frame)
        first = _LENGTHS.size + num_plain
        start = first + num_described
        values = _decode_values(frame[_LENGTHS.size : first])
        arrays: list[Array | None] = []
        start += -start % _ALIGN
        for each in _places(bytes(frame[first : first + num_described])):
            if each is None:
                arrays.append(None)
            else:
                dtype, count, shape, place = each
                array = np.frombuffer(frame, dtype, count, start + place)
                arrays.append(array.reshape(shape) if len(shape) != 1 else array)
    except _BAD_FRAME as error:
        raise FrameError(f"a frame of {len(frame)} bytes cannot be read: {error}") from error
    return values, arrays


# Steps of the same size have the same shapes.
@lru_cache(256)
def _places(described: bytes) -> list[tuple[np.dtype[Any], int, tuple[int, ...], int] | None]:
    """For each array: its dtype, number of values, shape, and place among the arrays' bytes."""
    found: list[tuple[np.dtype[Any], int, tuple[int, ...], int] | None] = []
    place = 0
    for each in _decode_shapes(described):
        if each is None:
            found.append(None)
            continue
        code, shape = each
        if code < 0 or min(shape, default=0) < 0:
            raise ValueError("a negative size")
        dtype, count = _DTYPES[code], prod(shape)
        found.append((dtype, count, tuple(shape), place))
        place += count * dtype.itemsize
        place += -place % _ALIGN
    return found
