"""Writes GGUF and safetensors files, as streams of bytes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import pack
from typing import Any

import numpy as np

from engine.backends.custom.conversion.stored import Bytes, StoredTensor, most_bytes
from engine.backends.custom.weights.quants import traits_of

_GGUF_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_ELEMENTS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}
_ELEMENTS |= {"f8": 12, "b1": _BOOL}
# GGUF's file type numbers, named after the type of most tensors.
_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30},
}


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[StoredTensor]) -> Iterator[Bytes]:
    """The content of the whole file, in chunks."""
    stated = {key: value for key, value in metadata.items() if not _is_of_old_file(key)}
    stated["general.file_type"] = _FILE_TYPES[most_bytes(tensors)]
    stated["general.quantization_version"] = 2
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
    """The approximate file size: the tensors' bytes, which are nearly all of it."""
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


_SAFETENSORS_ALIGNMENT = 8


def safetensors_bytes(
    tensors: Sequence[StoredTensor], metadata: Mapping[str, str]
) -> Iterator[Bytes]:
    """The content of the whole file, in chunks. `metadata` goes into the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _SAFETENSORS_ALIGNMENT)
    yield np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    for tensor in tensors:
        yield from tensor.pieces()
