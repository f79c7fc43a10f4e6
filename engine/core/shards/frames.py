"""Frames: plain values and arrays as bytes, without pickle. A frame carries a step to the ranks.

A frame begins with the length of its header, which is msgpack: the plain values, then the dtype and
the shape of each array. The bytes of the arrays follow, each at a multiple of 8.
"""

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import EngineError

Array = NDArray[Any]
_LENGTH = struct.Struct("<Q")
_ALIGN = 8
_DTYPES = {
    name: np.dtype(name)
    for name in ("|b1", "|u1", "|i1", "<u4", "<i4", "<i8", "<f2", "<f4", "<u2", "<f8")
}
_decode = msgspec.msgpack.Decoder(tuple[list[Any], list[tuple[str, list[int]] | None]]).decode
_encode = msgspec.msgpack.Encoder().encode


class FrameError(EngineError):
    """The bytes are no frame."""


def encode_frame(values: Sequence[Any], arrays: Sequence[Array | None] = ()) -> bytes:
    """A frame with plain values, such as its kind and the step's number, and with arrays."""
    shapes = [None if each is None else (each.dtype.str, each.shape) for each in arrays]
    header = _encode((values, shapes))
    parts: list[Any] = [_LENGTH.pack(len(header)), header, _padding(len(header))]
    for each in arrays:
        if each is not None and each.size:
            parts += (np.ascontiguousarray(each), _padding(each.nbytes))
    return b"".join(parts)


def decode_frame(frame: bytearray | bytes) -> tuple[list[Any], list[Array | None]]:
    """The plain values and the arrays, which share the frame's memory."""
    try:
        (length,) = _LENGTH.unpack_from(frame)
        start = _LENGTH.size + length
        values, shapes = _decode(memoryview(frame)[_LENGTH.size : start])
        start += len(_padding(length))
        arrays: list[Array | None] = []
        for each in shapes:
            if each is None:
                arrays.append(None)
                continue
            dtype, shape = _DTYPES[each[0]], each[1]
            count = prod(shape)
            arrays.append(np.frombuffer(frame, dtype, count, start).reshape(shape))
            start += count * dtype.itemsize
            start += -start % _ALIGN
    except (struct.error, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise FrameError(f"a frame of {len(frame)} bytes cannot be read: {error}") from error
    return values, arrays


def _padding(length: int) -> bytes:
    return bytes(-length % _ALIGN)
