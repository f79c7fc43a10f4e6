"""Tensors of the Open Inference Protocol: as JSON lists, and as bytes behind the JSON.

In the binary tensor extension, numbers are little-endian. An element of type BYTES is its length as
a uint32, then its bytes.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any

from engine.servers.http.errors import describe, problem

MAX_ELEMENTS = 2**20
# Data types as `struct` formats. BYTES has its own encoding.
FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_LENGTH = struct.Struct("<I")


def count_of(shape: Sequence[int], where: str) -> int:
    """The number of elements of a tensor."""
    count = math.prod(shape)
    if not 1 <= count <= MAX_ELEMENTS:
        raise problem(f"{where}.shape", f"should have 1 to {MAX_ELEMENTS} elements, has {count}")
    return count


def from_json(datatype: str, data: Any, count: int, where: str) -> list[Any]:
    """The elements of a tensor that was sent as JSON, nested by its shape or flat."""
    elements = _flat(data)
    _check_count(len(elements), count, where)
    for each in elements:
        if not _fits(datatype, each):
            raise problem(f"{where}.data", f"should have {datatype} values, got {describe(each)}")
    return elements


def _flat(data: Any) -> list[Any]:
    """The elements of nested lists. The nesting of JSON bodies is bounded."""
    if not isinstance(data, list):
        return [data]
    return [element for each in data for element in _flat(each)]


def _fits(datatype: str, value: Any) -> bool:
    if datatype == "BYTES":
        return isinstance(value, str)
    if datatype == "BOOL" or isinstance(value, bool):
        return datatype == "BOOL" and isinstance(value, bool)
    if datatype.startswith("FP"):
        return isinstance(value, int | float)
    return isinstance(value, int)


def from_raw(datatype: str, raw: bytes, count: int, where: str) -> list[Any]:
    """The elements of a tensor that was sent as bytes."""
    if datatype == "BYTES":
        return _texts(raw, count, where)
    if datatype not in FORMATS:
        raise problem(f"{where}.datatype", f"{describe(datatype)} is not supported")
    layout = struct.Struct(f"<{count}{FORMATS[datatype]}")
    if layout.size != len(raw):
        rule = f"{count} {datatype} elements are {layout.size} bytes, got {len(raw)}"
        raise problem(f"{where}.data", rule)
    return list(layout.unpack(raw))


def _texts(raw: bytes, count: int, where: str) -> list[str]:
    texts: list[str] = []
    start = 0
    while start < len(raw):
        if len(raw) - start < _LENGTH.size:
            raise problem(f"{where}.data", "ends in the length of an element")
        (length,) = _LENGTH.unpack_from(raw, start)
        start += _LENGTH.size
        if len(raw) - start < length:
            raise problem(f"{where}.data", "ends in an element")
        texts.append(text_of(raw[start : start + length], where))
        start += length
    _check_count(len(texts), count, where)
    return texts


def text_of(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise problem(f"{where}.data", "is not UTF-8") from None


def _check_count(found: int, count: int, where: str) -> None:
    if found != count:
        raise problem(f"{where}.data", f"should have {count} elements, as its shape says; {found}")


def to_raw(datatype: str, elements: Sequence[Any]) -> bytes:
    if datatype != "BYTES":
        return struct.pack(f"<{len(elements)}{FORMATS[datatype]}", *elements)
    encoded = [each.encode() for each in elements]
    return b"".join(part for each in encoded for part in (_LENGTH.pack(len(each)), each))
