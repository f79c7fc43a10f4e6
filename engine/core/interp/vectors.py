"""Named vectors, sparse autoencoders and tuned lenses, each a safetensors file in one directory.

A vector file has a tensor `blocks.N.hook_resid_post` (or another site) for each site that the
vector is for. A sparse autoencoder has the tensors W_enc, b_enc, W_dec and b_dec, as SAE-lens
writes them, and maybe `threshold`. A tuned lens has `N.weight` and `N.bias` for each layer N.
"""

import logging
import re
from array import array
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError, EngineError, InvalidRequestError, NotFoundError
from engine.core.tensor_file import FileTensor, StoredTensor, open_tensors, pack_tensors

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_NAME = re.compile(r"\w[\w.-]{0,127}")
_MAX_NAME_BYTES = 200  # file systems take 255, with the suffix
MAX_FILE_BYTES = 4 * 2**30
PART_BYTES = 16 * 2**20  # of a matrix, read at once


@dataclass(frozen=True, slots=True)
class StoredVector:
    name: str
    kind: str  # "vector", "sae" or "lens"
    sites: tuple[str, ...]
    size: int
    metadata: dict[str, str]


class VectorStore:
    """The files of one directory, which the operator put there for all tenants. Only headers are
    read before values are asked for. All methods wait for the disk.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[StoredVector]:
        if not self.directory.is_dir():
            return []
        found = []
        for path in sorted(self.directory.glob(f"*{SUFFIX}")):
            try:
                tensors, metadata = self._read(path)
            except (EngineError, OSError) as error:
                log.warning("a vector file is left out: %s", error)
                continue
            names = tuple(each.name for each in tensors)
            kind = "sae" if "W_enc" in names else "lens" if "0.weight" in names else "vector"
            sites = names if kind == "vector" else tuple(filter(None, [metadata.get("site", "")]))
            size = tensors[0].shape[-1] if tensors and tensors[0].shape else 0
            found.append(StoredVector(path.name.removesuffix(SUFFIX), kind, sites, size, metadata))
        return found

    def load(self, name: str) -> tuple[dict[str, FileTensor], dict[str, str]]:
        """The tensors and the metadata of a file. Raises `NotFoundError`."""
        path = self._path(name)
        if not path.is_file():
            known = ", ".join(each.name for each in self.names()[:20]) or "none"
            raise NotFoundError(
                f"interp: this server has no vector '{name}'. Available: {known}.", param="interp"
            )
        tensors, metadata = self._read(path)
        return {each.name: each for each in tensors}, metadata

    def autoencoder(self, name: str) -> dict[str, FileTensor]:
        """The tensors of a sparse autoencoder, whose shapes agree."""
        tensors, _ = self.load(name)
        shape = tensors["W_enc"].shape if "W_enc" in tensors else ()
        is_sound = len(shape) == 2 and 0 not in shape
        if is_sound:
            inputs, features = shape
            wanted: dict[str, list[tuple[int, ...]]] = {
                "W_dec": [(features, inputs)],
                "b_enc": [(features,)],
                "b_dec": [(inputs,)],
                "threshold": [(features,), (1,), ()],
            }
            given = {part: tensors[part].shape for part in wanted if part in tensors}
            is_sound = all(found in wanted[part] for part, found in given.items())
        if not is_sound:
            raise InvalidRequestError(
                f"interp: '{name}' is no sparse autoencoder: it needs W_enc (inputs, features), and"
                " the shapes of its other tensors must agree with that.",
                param="interp",
            )
        return tensors

    def save(self, name: str, tensors: list[StoredTensor], metadata: dict[str, str]) -> Path:
        path = self._path(name)
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_bytes(pack_tensors(tensors, metadata))
        partial.replace(path)
        return path

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or len(name.encode()) > _MAX_NAME_BYTES:
            raise InvalidRequestError(
                f"interp: {name!r} is no name of a vector: use letters, digits, - _ and .",
                param="interp",
            )
        return self.directory / f"{name}{SUFFIX}"

    def _read(self, path: Path) -> tuple[list[FileTensor], dict[str, str]]:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes")
        return open_tensors(path)


def floats(tensor: FileTensor) -> bytes:
    """The values of a tensor as float32 bytes. Other types are refused with a hint."""
    return checked(tensor).data


def checked(tensor: FileTensor) -> FileTensor:
    if tensor.dtype != "F32":
        raise InvalidRequestError(
            f"interp: tensor '{tensor.name}' is {tensor.dtype}; store it as float32 "
            "(engine vectors import converts it).",
            param="interp",
        )
    return tensor


def packed_floats(values: list[float]) -> bytes:
    return array("f", values).tobytes()


def row(tensor: FileTensor, index: int) -> bytes:
    """Row `index` of a matrix."""
    rows, columns = tensor.shape
    if not 0 <= index < rows:
        raise InvalidRequestError(
            f"interp: there is no feature {index}; the autoencoder has {rows}.", param="interp"
        )
    return checked(tensor).read(4 * index * columns, 4 * columns)


def column(tensor: FileTensor, index: int) -> bytes:
    """Column `index` of a matrix, which is read in parts."""
    rows, columns = tensor.shape
    if not 0 <= index < columns:
        raise InvalidRequestError(
            f"interp: there is no feature {index}; the autoencoder has {columns}.", param="interp"
        )
    found = array("f")
    step = max(1, PART_BYTES // (4 * columns))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values = array("f", checked(tensor).read(4 * first * columns, 4 * count * columns))
        found += values[index::columns]
    return found.tobytes()


def scalar(tensor: FileTensor | None, index: int) -> float:
    if tensor is None:
        return 0.0
    place = index if tensor.num_bytes > 4 else 0
    return array("f", checked(tensor).read(4 * place, 4))[0]
