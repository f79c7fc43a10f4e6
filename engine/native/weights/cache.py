"""A cache of packed weights on disk, limited in total size. It has one file per model. A cache file
is valid only as long as the model's own files are unchanged.

Serving never depends on the cache. If the disk is full or read-only, only a warning is logged.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine import __version__
from engine.core.folders import store_directory
from engine.core.sandbox.private_files import PART_SUFFIX
from engine.native import _native
from engine.native.weights.arena import ArenaPlan, MatrixParts
from engine.native.weights.packed_file import (
    HEADER_BYTES,
    PackedFileError,
    map_packed,
    write_packed,
)
from engine.weights.files import FileBytes
from engine.weights.model import ModelSource

log = logging.getLogger(__name__)

SUFFIX = ".packed"
_GIB = 1024**3
# A killed process leaves its temporary file behind. A temporary file is removed once its mtime is
# this old, because no running process takes this long to write a file.
_ABANDONED_SECONDS = 3600


def cache_directory() -> Path:
    """The cache's folder, next to the folder of downloaded models."""
    return store_directory().parent / "packed"


class PackedCache(msgspec.Struct, frozen=True):
    """A folder of files with packed weights. All files together take at most `max_bytes`. A new
    file may take at most the fraction `free_share` of the free disk space.
    """

    directory: Path = msgspec.field(default_factory=cache_directory)
    max_bytes: int = 16 * _GIB
    free_share: float = 0.1

    def path_for(self, source: ModelSource) -> Path:
        """The cache file of a model. Its name depends only on the paths of the model's files, so a
        new version of a model replaces the old cache file.
        """
        places = "\n".join(str(file.path.resolve()) for file in source.checkpoint.files)
        digest = hashlib.sha256(places.encode()).hexdigest()[:16]
        return self.directory / f"{source.path.stem[:64]}-{digest}{SUFFIX}"

    def open(self, path: Path, key: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        """Memory-maps the packed weights in `path`. Returns None if the file is missing or invalid,
        or does not have this key and size.
        """
        try:
            arena = map_packed(path, key, num_bytes)
            with suppress(OSError):  # the disk may be read-only
                # Sets the access time, because eviction removes the least recently used file. The
                # mtime must not change: a changed mtime makes the file invalid.
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return None
        except (OSError, PackedFileError) as error:
            log.info("packed weights in %s are not used and will be made again: %s", path, error)
            return None
        return arena

    def write(self, path: Path, key: bytes, arena: NDArray[np.uint8]) -> bool:
        """Writes packed weights to `path`. If the cache would become too large, first removes the
        least recently used files. Returns whether the file was written. A failure only logs a
        warning.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            size = HEADER_BYTES + arena.size
            free = shutil.disk_usage(self.directory).free
            if size > self.max_bytes or size > free * self.free_share:
                log.warning(
                    "packed weights are not kept: %d MB is too much for %s", size >> 20, path.parent
                )
                return False
            self._make_room(path, size)
            write_packed(path, key, arena)
        except OSError as error:
            log.warning("packed weights are not kept in %s: %s", path.parent, error)
            return False
        return True

    def _make_room(self, path: Path, size: int) -> None:
        others = []
        for file in self.directory.glob(f"*{SUFFIX}"):
            if file != path and (status := _status(file)) is not None:
                others.append((status.st_atime_ns, status.st_size, file))
        total = size + sum(num_bytes for _, num_bytes, _ in others)
        for _, num_bytes, file in sorted(others):
            if total <= self.max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= num_bytes
        os.utime(self.directory)
        now = self.directory.stat().st_mtime
        for file in self.directory.glob(f"*{PART_SUFFIX}"):
            status = _status(file)
            if status is not None and now - status.st_mtime > _ABANDONED_SECONDS:
                file.unlink(missing_ok=True)


def cache_key(
    source: ModelSource, matrices: Sequence[MatrixParts], plan: ArenaPlan
) -> bytes | None:
    """The key of a cache file: a digest of the identity of the model's files, the storage types of
    its weights and the packed layout.

    Reads only the headers of the model's files. Returns None if a model file was replaced since it
    was opened.
    """
    files = [_identity(source, file) for file in source.checkpoint.files]
    if None in files:
        return None
    stored = [
        (weight.spec.name, weight.tensor.name, weight.tensor.dtype, repr(weight.transform))
        for weight in source.weights.values()
    ]
    facts = {
        "version": (__version__, _native.LAYOUT_VERSION),
        "files": files,
        "stored": stored,
        # It may change the values of a safetensors checkpoint without changing the weight files.
        "quantization": str(source.metadata.get("quantization_config")),
        "matrices": [(m.name, m.parts, m.biases, m.interleaved, m.experts) for m in matrices],
        "places": [
            [(name, msgspec.structs.astuple(place)) for name, place in places.items()]
            for places in (plan.matrices, plan.biases, plan.vectors)
        ],
    }
    return hashlib.sha256(json.dumps(facts).encode()).digest()


def _identity(source: ModelSource, file: FileBytes) -> tuple[str, int, int, str] | None:
    """A model file's path, size and mtime, and a digest of its header, which is everything before
    its first tensor. None if the file was replaced since it was opened.
    """
    status = _status(file.path)
    if status is None or any(
        getattr(status, fact) != getattr(file.status, fact)
        for fact in ("st_dev", "st_ino", "st_size", "st_mtime_ns")
    ):
        return None
    whole = file.view(0, file.size)
    start, end = whole.ctypes.data, whole.ctypes.data + file.size
    places = (tensor.raw().ctypes.data for tensor in source.checkpoint.tensors.values())
    first = min((place for place in places if start <= place < end), default=end)
    header = hashlib.sha256(whole[: first - start].data).hexdigest()
    return (str(file.path.resolve()), file.size, status.st_mtime_ns, header)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
