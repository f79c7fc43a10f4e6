"""GGUF checkpoints: a single file, or a complete set of split files.

Opening reads only the headers. Tensor bytes are mapped and read on first use.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.errors import ModelFormatError
from engine.weights.files import FileBytes, member, refuse_code_formats
from engine.weights.gguf_header import GgufHeader, read_header
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quants import dequantize

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GgufCheckpoint:
    """An opened GGUF model. `metadata` is the metadata of the first file. Its arrays of strings are
    Python lists, and its arrays of numbers are numpy arrays.
    """

    format = "gguf"

    def __init__(self, parts: Sequence[tuple[FileBytes, GgufHeader]]) -> None:
        self.files = [file for file, _ in parts]
        self.metadata: dict[str, Any] = parts[0][1].metadata
        self.tensors: dict[str, LazyTensor] = {}
        for file, header in parts:
            for info in header.tensors:
                if info.name in self.tensors:
                    raise ModelFormatError(
                        f"{file.path.name}: tensor '{info.name}' is also in another part"
                    )
                self.tensors[info.name] = LazyTensor(
                    name=info.name,
                    shape=info.shape,
                    dtype=info.traits.name,
                    nbytes=info.num_bytes,
                    _view=partial(file.view, info.start, info.num_bytes),
                    _dequantize=partial(dequantize, info.traits.name),
                )

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_gguf(path: Path, use_mmap: bool = True) -> GgufCheckpoint:
    """Open a GGUF file and, if it is part of a split, all other files of the split."""
    first = _open_part(path, use_mmap)
    names = part_names(path.name)
    if len(names) > 1:
        parts = [
            first if name == path.name else _open_part(member(path.parent, name), use_mmap)
            for name in names
        ]
        _check_parts(names, [header for _, header in parts])
        return GgufCheckpoint(parts)
    if first[1].metadata.get("split.count", 1) not in (0, 1):
        raise ModelFormatError(
            f"{path.name} is a part of a set; its name must end in '-00001-of-00002.gguf' or alike "
            "so that the other parts can be found"
        )
    return GgufCheckpoint([first])


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of the split that `name` belongs to. If `name` has no split number,
    the result is only `name`.
    """
    match = _PART_NAME.fullmatch(name)
    if match is None:
        return (name,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise ModelFormatError(f"{name}: part {number} of {count} cannot be")
    return tuple(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1))


def _open_part(path: Path, use_mmap: bool) -> tuple[FileBytes, GgufHeader]:
    file = FileBytes(path, use_mmap=use_mmap)
    assert file.buffer is not None, "just opened"
    refuse_code_formats(path, file.buffer[:8])
    return file, read_header(file.buffer, path.name)


def _check_parts(names: Sequence[str], headers: Sequence[GgufHeader]) -> None:
    """Check that each file's header agrees with its name, and that the split is complete."""
    for index, (name, header) in enumerate(zip(names, headers, strict=True)):
        stated = header.metadata.get("split.no"), header.metadata.get("split.count")
        if stated != (index, len(names)):
            raise ModelFormatError(
                f"{name}: split.no and split.count are {stated[0]} and {stated[1]}, "
                f"the file's name says {index} and {len(names)}"
            )
    total = sum(len(header.tensors) for header in headers)
    expected = headers[0].metadata.get("split.tensors.count", total)
    if expected != total:
        raise ModelFormatError(
            f"{names[0]}: split.tensors.count is {expected}, the parts hold {total} tensors"
        )
