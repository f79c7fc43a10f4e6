"""Packs tensors into the bytes of a safetensors file and unpacks them, without numpy."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine.core.errors import InvalidRequestError

SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4, "I64": 8}
MAX_HEADER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    dtype: str  # as safetensors names it: "F32", "I32", ...
    shape: tuple[int, ...]
    data: bytes | memoryview


def pack_tensors(tensors: list[StoredTensor], metadata: dict[str, str]) -> bytes:
    described = [(each.name, each.dtype, each.shape) for each in tensors]
    return b"".join([packed_header(described, metadata), *(each.data for each in tensors)])


def packed_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """What precedes the values of tensors, each given by its name, dtype and shape."""
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, dtype, shape in tensors:
        end = start + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def unpack_tensors(data: bytes) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors share the memory of `data`. Raises `InvalidRequestError` if `data` is no
    safetensors file.
    """
    try:
        size = _header_size(data[:8], len(data))
        described, metadata = _described(data[8 : 8 + size], len(data) - 8 - size)
    except _BROKEN as error:
        raise InvalidRequestError(f"This is no safetensors file: {error}.") from None
    body = memoryview(data)[8 + size :]
    tensors = [
        StoredTensor(name, dtype, shape, body[start:end])
        for name, dtype, shape, start, end in described
    ]
    return tensors, metadata


def num_value_bytes(data: bytes) -> int:
    """The bytes of the values of all tensors in a sound safetensors file."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file. Its values are read when they are asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    num_bytes: int

    @property
    def data(self) -> bytes:
        return self.read(0, self.num_bytes)

    def read(self, first: int, num_bytes: int) -> bytes:
        """A part of the values, from byte `first` on."""
        if first + num_bytes > self.num_bytes:
            raise InvalidRequestError(f"Tensor '{self.name}' of {self.path.name} is too short.")
        with self.path.open("rb") as file:
            file.seek(self.start + first)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise InvalidRequestError(f"The file {self.path.name} is shorter than its header says.")
        return data


def open_tensors(path: Path) -> tuple[list[FileTensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. Only its header is read."""
    try:
        with path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            size = _header_size(file.read(8), total)
            described, metadata = _described(file.read(size), total - 8 - size)
    except _BROKEN as error:
        raise InvalidRequestError(f"{path.name} is no safetensors file: {error}.") from None
    tensors = [
        FileTensor(name, dtype, shape, path, 8 + size + start, end - start)
        for name, dtype, shape, start, end in described
    ]
    return tensors, metadata


_BROKEN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_Described = tuple[str, str, tuple[int, ...], int, int]


def _header_size(first: bytes, total: int) -> int:
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > min(MAX_HEADER_BYTES, total - 8):
        raise ValueError("the header is cut")
    return size


def _described(text: bytes, num_bytes: int) -> tuple[list[_Described], dict[str, str]]:
    """The name, dtype, shape, begin and end of each tensor, and the metadata."""
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    return [_checked(name, entry, num_bytes) for name, entry in header.items()], metadata


def _checked(name: str, entry: dict[str, Any], num_bytes: int) -> _Described:
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    start, end = entry["data_offsets"]
    is_sound = all(isinstance(each, int) and each >= 0 for each in (*shape, start, end))
    if not is_sound or not start <= end <= num_bytes or dtype not in SIZES:
        raise ValueError(f"tensor '{name}' has no place in it")
    if end - start != prod(shape) * SIZES[dtype]:
        raise ValueError(f"tensor '{name}' has another size than its shape")
    return name, dtype, shape, start, end
