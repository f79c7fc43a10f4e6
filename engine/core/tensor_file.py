"""Packs tensors into the bytes of a safetensors file and unpacks them, without numpy."""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from engine.core.errors import InvalidRequestError

_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "I64": 8}
MAX_HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    dtype: str  # as safetensors names it: "F32", "I32", ...
    shape: tuple[int, ...]
    data: bytes


def pack_tensors(tensors: list[StoredTensor], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for each in tensors:
        end = start + len(each.data)
        header[each.name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(each.data for each in tensors)])


def unpack_tensors(data: bytes) -> tuple[list[StoredTensor], dict[str, str]]:
    """Raises `InvalidRequestError` if `data` is no safetensors file."""
    try:
        size = int.from_bytes(data[:8], "little")
        if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
            raise ValueError("the header is cut")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__", {})
        body = memoryview(data)[8 + size :]
        return [_unpacked(name, entry, body) for name, entry in header.items()], metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"This is no safetensors file: {error}.") from None


def _unpacked(name: str, entry: dict[str, Any], body: memoryview) -> StoredTensor:
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    start, end = entry["data_offsets"]
    is_sound = all(isinstance(each, int) and each >= 0 for each in (*shape, start, end))
    if not is_sound or not start <= end <= len(body) or dtype not in _SIZES:
        raise ValueError(f"tensor '{name}' has no place in it")
    if end - start != prod(shape) * _SIZES[dtype]:
        raise ValueError(f"tensor '{name}' has another size than its shape")
    return StoredTensor(name, dtype, shape, bytes(body[start:end]))
