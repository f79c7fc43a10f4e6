"""Writes GGUF files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import pack
from typing import Any

import numpy as np

from engine.backends.custom.conversion.stored import Bytes, StoredTensor
from engine.backends.custom.weights.quants import traits_of

_GGUF_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_ELEMENTS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}
_ELEMENTS |= {"f8": 12, "b1": _BOOL}


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> Iterator[Bytes]:
    """Yields the content of a GGUF file, in chunks."""
    stated = {key: value for key, value in metadata.items() if not _is_of_old_file(key)}
    head = bytearray(b"GGUF" + pack("<IQQ", 3, len(tensors), len(stated)))
    for key, value in stated.items():
        head += _string(key) + _value(value)
    offset = 0
    for tensor in tensors:
        dims = pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        head += _string(tensor.name) + dims
        head += pack("<IQ", traits_of(tensor.dtype).type_id, offset)
        offset += _aligned(tensor.nbytes)
    head += bytes(_aligned(len(head)) - len(head))
    yield np.frombuffer(bytes(head), np.uint8)
    for tensor in tensors:
        yield from tensor.pieces()
        yield np.zeros(_aligned(tensor.nbytes) - tensor.nbytes, np.uint8)


def gguf_size(tensors: Iterable[StoredTensor]) -> int:
    """The approximate size of a GGUF file in bytes. The header is small, so it is not counted."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _is_of_old_file(key: str) -> bool:
    return key.startswith("split.") or key == "general.alignment"


def _aligned(size: int) -> int:
    return -(-size // _GGUF_ALIGNMENT) * _GGUF_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode()
    return pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, np.generic):
        value = value.item()
    match value:
        case bool():
            return pack("<I?", _BOOL, value)
        case str():
            return pack("<I", _STRING) + _string(value)
        case float():
            return pack("<If", _FLOAT32, value)
        case int() if value < 0:
            return pack("<Ii", _INT32, value)
        case int():
            return pack("<II", _UINT32, value) if value < 2**32 else pack("<IQ", _UINT64, value)
        case np.ndarray():
            flat = np.ascontiguousarray(value)
            flat = flat.astype(flat.dtype.newbyteorder("<"))
            return pack("<IIQ", _ARRAY, _ELEMENTS[flat.dtype.str[1:]], flat.size) + flat.tobytes()
        case list():
            strings = b"".join(map(_string, value))
            return pack("<IIQ", _ARRAY, _STRING, len(value)) + strings
        case _:
            raise AssertionError(f"{type(value).__name__} is no type of metadata")
