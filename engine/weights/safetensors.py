"""Safetensors checkpoints: a single file, or shards listed by an index.

The header is parsed here and not by the `safetensors` library. The library accepts duplicate keys
and headers of 100 MB, and does not limit the number of tensors. For numpy, it offers neither views
of the mapped file nor BF16. A file consists of 8 bytes that state the length of the header, the
header in JSON, and the data of the tensors without gaps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelFormatError
from engine.weights.files import (
    FileBytes,
    member,
    parse_json,
    read_json,
    refuse_code_formats,
)
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quants import TRAITS, dequantize

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_DIMS = 8
MAX_TENSOR = 2**48  # a tensor has fewer elements than this
# Max commas in the header. This limits the memory that parsing the JSON can allocate.
_MAX_COMMAS = 16 * MAX_TENSORS

_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor's dtype, shape and byte range. `begin` and `end` count from the header's end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsCheckpoint:
    """An opened safetensors model: one file or all shards."""

    format = "safetensors"

    def __init__(self, files: list[FileBytes], tensors: dict[str, LazyTensor]) -> None:
        self.files = files
        self.tensors = tensors

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_safetensors(
    path: Path, use_mmap: bool = True, quantization: Any = None
) -> SafetensorsCheckpoint:
    """Open a .safetensors file, or a directory that holds `model.safetensors` or an index.
    `quantization` is the content of `quantization_config` in config.json, if it has this key.
    """
    checkpoint = _open(path, use_mmap)
    if quantization is None:
        return checkpoint
    if not isinstance(quantization, dict):
        raise ModelFormatError("config.json: key 'quantization_config' must be an object")
    from engine.weights.schemes.gather import gather

    return SafetensorsCheckpoint(checkpoint.files, gather(checkpoint.tensors, quantization))


def _open(path: Path, use_mmap: bool) -> SafetensorsCheckpoint:
    if path.is_file():
        file, tensors = _open_file(path, use_mmap)
        return SafetensorsCheckpoint([file], tensors)
    if (path / INDEX_NAME).exists():
        return _open_sharded(path, use_mmap)
    if (path / SINGLE_NAME).exists():
        file, tensors = _open_file(member(path, SINGLE_NAME), use_mmap)
        return SafetensorsCheckpoint([file], tensors)
    raise ModelFormatError(f"{path.name} holds neither {SINGLE_NAME} nor {INDEX_NAME}")


def _open_sharded(directory: Path, use_mmap: bool) -> SafetensorsCheckpoint:
    weight_map = read_json(directory, INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{INDEX_NAME}: 'weight_map' must list the tensors")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelFormatError(f"{INDEX_NAME}: 'weight_map' must map names to file names")
    files: list[FileBytes] = []
    tensors: dict[str, LazyTensor] = {}
    for shard in sorted(set(weight_map.values())):
        file, found = _open_file(member(directory, shard), use_mmap)
        listed = {name for name, home in weight_map.items() if home == shard}
        if missing := sorted(listed - found.keys()):
            raise ModelFormatError(f"{INDEX_NAME}: {shard} lacks the tensor '{missing[0]}'")
        if unlisted := sorted(found.keys() - listed):
            raise ModelFormatError(
                f"{shard} holds the tensor '{unlisted[0]}', which {INDEX_NAME} does not place there"
            )
        files.append(file)
        tensors.update(found)
    return SafetensorsCheckpoint(files, tensors)


def _open_file(path: Path, use_mmap: bool) -> tuple[FileBytes, dict[str, LazyTensor]]:
    file = FileBytes(path, use_mmap=use_mmap)
    assert file.buffer is not None, "just opened"
    refuse_code_formats(path, file.buffer[:8])
    if path.suffix != ".safetensors":
        raise ModelFormatError(f"{path.name}: the name must end in .safetensors")
    data_start, header = _read_header(file)
    entries = [
        _read_entry(path.name, name, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    _check_layout(path.name, entries, file.size - data_start)
    return file, {
        entry.name: LazyTensor(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            nbytes=entry.end - entry.begin,
            _view=partial(file.view, data_start + entry.begin, entry.end - entry.begin),
            _dequantize=_decoder(path.name, entry),
        )
        for entry in entries
    }


def _read_header(file: FileBytes) -> tuple[int, dict[str, Any]]:
    assert file.buffer is not None, "just opened"
    where = file.path.name
    if file.size < 8:
        _fail(where, f"{file.size} bytes is too short for a header")
    length = int.from_bytes(file.buffer[:8], "little")
    if length > MAX_HEADER_BYTES:
        _fail(where, f"the header of {length} bytes exceeds the limit of {MAX_HEADER_BYTES}")
    if 8 + length > file.size:
        _fail(where, f"truncated: the header needs {length} bytes, {file.size - 8} remain")
    text = file.buffer[8 : 8 + length]
    if not text.startswith(b"{"):
        _fail(where, "the header is not a JSON object")
    # Each tensor is one JSON object. Braces and commas are counted before parsing, because parsing
    # a malicious header could take much memory.
    if text.count(b"{") > MAX_TENSORS + 2 or text.count(b",") > _MAX_COMMAS:
        _fail(where, f"the header lists more than {MAX_TENSORS} tensors")
    header = parse_json(text, f"{where} header")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(where, "'__metadata__' must map strings to strings")
    return 8 + length, header


def _read_entry(where: str, name: str, entry: Any) -> _Entry:
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(where, f"tensor '{name}' must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _fail(where, f"tensor '{name}' has the unknown dtype {str(dtype)[:32]!r}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        _fail(where, f"tensor '{name}': shape must be at most {MAX_DIMS} integers, none negative")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(where, f"tensor '{name}': data_offsets must be [begin, end], not negative")
    num_values = 1
    for dim in shape:
        num_values *= dim
        if num_values >= MAX_TENSOR:
            _fail(where, f"tensor '{name}' has more values than any file can hold")
    num_bits = num_values * _BITS[dtype]
    if num_bits != 8 * (offsets[1] - offsets[0]):
        _fail(
            where,
            f"tensor '{name}': {offsets[1] - offsets[0]} bytes do not match "
            f"dtype {dtype} and shape {shape}",
        )
    return _Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _check_layout(where: str, entries: list[_Entry], data_size: int) -> None:
    """Check that the tensors fill all bytes after the header, without overlaps or gaps."""
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.end > data_size:
            _fail(
                where,
                f"tensor '{entry.name}' ends at byte {entry.end} of the data, past its end "
                f"({data_size} bytes); the file is truncated or was not fully downloaded; "
                "copy or download it again",
            )
        if entry.begin != position:
            kind = "overlaps the one before it" if entry.begin < position else "leaves a gap"
            _fail(where, f"tensor '{entry.name}' at byte {entry.begin} of the data {kind}")
        position = entry.end
    if position != data_size:
        _fail(where, f"{data_size - position} bytes after the last tensor belong to nothing")


def _decoder(
    where: str, entry: _Entry
) -> Callable[[NDArray[np.uint8], tuple[int, ...]], NDArray[np.float32]]:
    if entry.dtype in TRAITS:
        return partial(dequantize, entry.dtype)

    def refuse(raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
        _fail(where, f"tensor '{entry.name}' has dtype {entry.dtype}; only F32, F16 and BF16 load")

    return refuse


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _fail(where: str, reason: str) -> NoReturn:
    raise ModelFormatError(f"{where}: {reason}")
