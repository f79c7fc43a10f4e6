"""Opens untrusted model files. Decides which files may be read, and maps or reads their bytes.

Weights must be in safetensors or GGUF format. Formats that can contain code are refused. They are
recognized by the file name and also by the first bytes, so renaming such a file does not help.
"""

import json
import mmap
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError, ModelFormatError
from engine.core.text.json_text import check_characters

CODE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".h5")
_MAX_JSON_BYTES = 16 * 1024 * 1024


class FileBytes:
    """The bytes of one file. With `use_mmap`, the file is memory-mapped, else it is read at once.

    Views stay valid after `close`. The memory is released with the last view.
    """

    def __init__(self, path: Path, *, use_mmap: bool) -> None:
        try:
            with path.open("rb") as file:
                self.status = os.fstat(file.fileno())
                if self.status.st_size == 0:
                    raise ModelFormatError(f"{path.name}: the file is empty")
                self.buffer: mmap.mmap | bytes | None = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    if use_mmap
                    else file.read()
                )
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
        self.path = path
        self.size = len(self.buffer)

    def view(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """A read-only view of part of the file. If the file is mapped, nothing is read until the
        view is used.
        """
        if self.buffer is None:
            raise ModelError(f"{self.path.name} has been closed; open the model again")
        return np.frombuffer(self.buffer, np.uint8, num_bytes, start)

    def close(self) -> None:
        self.buffer = None


def refuse_code_formats(path: Path, head: bytes) -> None:
    """Raise if the file's name, or its first bytes `head`, show a format that can contain code."""
    if path.suffix.lower() in CODE_SUFFIXES:
        raise ModelFormatError(
            f"{path.name}: {path.suffix} files can carry code and are never loaded; "
            "convert the model to safetensors or GGUF (`engine convert` does that for llama2.c's)"
        )
    found = None
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        found = "a zip archive (as torch.save writes)"
    # A pickle starts with these two bytes. A safetensors file starts with the length of its header
    # as 8 bytes. Its first two bytes may be the same, but then bytes 3 to 7 are zero.
    elif head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        found = "a pickle" if any(head[3:8]) else None
    elif head[:6] == b"\x93NUMPY":
        found = "a numpy array file"
    elif head[:4] == b"\x89HDF":
        found = "an HDF5 file"
    if found:
        raise ModelFormatError(
            f"{path.name}: the content is {found}, whatever the name says; "
            "it is never loaded, convert the model to safetensors or GGUF"
        )


def member(directory: Path, name: str, folder: str | None = None) -> Path:
    """The path of file `name` in a model directory, or in its subfolder `folder`.

    `name` and `folder` must be plain names without path separators. A symlink may point inside the
    directory or, as in the Hugging Face cache (`snapshots/REVISION/file -> ../../blobs/HASH`), into
    the blobs folder beside it.
    """
    parts = [name] if folder is None else [folder, name]
    for part in parts:
        if not part or part in (".", "..") or set(part) & set("/\\\0:"):
            raise ModelFormatError(f"'{part}' is not a plain file name inside {directory.name}")
    path = directory.joinpath(*parts)
    home = directory.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(place) for place in allowed):
        raise ModelFormatError(
            f"{directory.name}/{name} is a link out of the model directory; copy the file there"
        )
    return path


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Anything else raises an error that names
    `where`.
    """

    def unique(pairs: list[tuple[Hashable, Any]]) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"key '{key}' appears more than once")
            result[key] = value
        return result

    try:
        decoded = text.decode("utf-8-sig")
        parsed = json.loads(decoded, object_pairs_hook=unique)
        check_characters(decoded, parsed)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFormatError(f"{where}: must be a JSON object")
    return parsed


def read_json(directory: Path, name: str, folder: str | None = None) -> dict[str, Any]:
    return parse_json(read_small(directory, name, folder), name)


def read_small(directory: Path, name: str, folder: str | None = None) -> bytes:
    """Read a small file of a model folder, such as a settings file. Raises if the file is larger
    than 16 MB.
    """
    path = member(directory, name, folder)
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ModelFormatError(f"{name}: {size} bytes is more than any model's {name} needs")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
