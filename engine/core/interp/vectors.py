"""Named vectors, sparse autoencoders and tuned lenses, each a safetensors file in one directory.

A vector file has a tensor `blocks.N.hook_resid_post` (or another site) for each site that the
vector is for. A sparse autoencoder has the tensors W_enc, b_enc, W_dec and b_dec, as SAE-lens
writes them, and maybe `threshold`. A tuned lens has `N.weight` and `N.bias` for each layer N.
"""

import re
from array import array
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError, InvalidRequestError, NotFoundError
from engine.core.tensor_file import StoredTensor, pack_tensors, unpack_tensors

SUFFIX = ".safetensors"
_NAME = re.compile(r"\w[\w.-]{0,127}")
MAX_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class StoredVector:
    name: str
    kind: str  # "vector", "sae" or "lens"
    sites: tuple[str, ...]
    size: int
    metadata: dict[str, str]


class VectorStore:
    """The files of one directory. Files are read when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[StoredVector]:
        if not self.directory.is_dir():
            return []
        found = []
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            tensors, metadata = self._read(path)
            names = tuple(each.name for each in tensors)
            kind = "sae" if "W_enc" in names else "lens" if "0.weight" in names else "vector"
            sites = names if kind == "vector" else tuple(filter(None, [metadata.get("site", "")]))
            size = tensors[0].shape[-1] if tensors else 0
            found.append(StoredVector(path.name.removesuffix(SUFFIX), kind, sites, size, metadata))
        return found

    def load(self, name: str) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """The tensors and the metadata of a file. Raises `NotFoundError`."""
        path = self._path(name)
        if not path.is_file():
            known = ", ".join(each.name for each in self.names()[:20]) or "none"
            raise NotFoundError(
                f"interp: this server has no vector '{name}'. Available: {known}.", param="interp"
            )
        tensors, metadata = self._read(path)
        return {each.name: each for each in tensors}, metadata

    def save(self, name: str, tensors: list[StoredTensor], metadata: dict[str, str]) -> Path:
        path = self._path(name)
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_bytes(pack_tensors(tensors, metadata))
        partial.replace(path)
        return path

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"interp: {name!r} is no name of a vector: use letters, digits, - _ and .",
                param="interp",
            )
        return self.directory / f"{name}{SUFFIX}"

    def _read(self, path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        return unpack_tensors(path.read_bytes())


def floats(tensor: StoredTensor) -> bytes:
    """The values of a tensor as float32 bytes. Other types are refused with a hint."""
    if tensor.dtype != "F32":
        raise InvalidRequestError(
            f"interp: tensor '{tensor.name}' is {tensor.dtype}; store it as float32 "
            "(engine vectors import converts it).",
            param="interp",
        )
    return tensor.data


def packed_floats(values: list[float]) -> bytes:
    return array("f", values).tobytes()


def row(tensor: StoredTensor, index: int) -> bytes:
    """Row `index` of a matrix."""
    rows, columns = tensor.shape
    if not 0 <= index < rows:
        raise InvalidRequestError(
            f"interp: there is no feature {index}; the autoencoder has {rows}.", param="interp"
        )
    data = floats(tensor)
    return data[4 * index * columns : 4 * (index + 1) * columns]


def column(tensor: StoredTensor, index: int) -> bytes:
    """Column `index` of a matrix."""
    _, columns = tensor.shape
    if not 0 <= index < columns:
        raise InvalidRequestError(
            f"interp: there is no feature {index}; the autoencoder has {columns}.", param="interp"
        )
    values = array("f")
    values.frombytes(floats(tensor))
    return values[index::columns].tobytes()


def scalar(tensor: StoredTensor | None, index: int) -> float:
    if tensor is None:
        return 0.0
    values = array("f")
    values.frombytes(floats(tensor))
    return values[index] if len(values) > 1 else values[0]
