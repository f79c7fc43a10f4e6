"""A file of packed weights: a header page, then the bytes of the arena as in memory.

The header ends with a digest of the header itself. A file is valid only if this digest, the key and
the file size match. The file's mtime must also equal the mtime in the header, because any later
write changes the mtime. The header also has a digest of the data. Only `verify` checks this digest,
because the check reads the whole file.
"""

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.sandbox.private_files import new_version, open_private, write_all

HEADER_BYTES = 4096
_MAGIC = b"ENGPACK2"
_FIELDS = struct.Struct("<8s32sQ32sQ")  # magic, key, size of the data, digest of the data, mtime
_DIGEST_BYTES = 32
_CHUNK_BYTES = 4 * 1024 * 1024


class PackedFileError(Exception):
    """The file is damaged, has another format, or has other weights. The message says which."""


class PackedHeader(msgspec.Struct, frozen=True):
    key: bytes
    num_bytes: int
    data_digest: bytes
    # The file's mtime in seconds. It is even, because some file systems store only even seconds.
    sealed_s: int

    def encode(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, self.key, self.num_bytes, self.data_digest, self.sealed_s)
        page = fields.ljust(HEADER_BYTES - _DIGEST_BYTES, b"\0")
        return page + hashlib.sha256(page).digest()


def map_packed(path: Path, key: bytes, num_bytes: int) -> NDArray[np.uint8]:
    """Maps the packed weights of the file into memory, read-only and shared. Reads only the header.

    Raises `PackedFileError` unless the file is valid and has this key and size.
    """
    with open_private(path) as file:
        header = _read_header(file)
        if header.key != key or header.num_bytes != num_bytes:
            raise PackedFileError("it holds other weights")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8, num_bytes, HEADER_BYTES)


def verify(path: Path) -> None:
    """Reads the whole file. Raises `PackedFileError` unless the data matches the digest in the
    header.
    """
    with open_private(path) as file:
        header = _read_header(file)
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.digest() != header.data_digest:
        raise PackedFileError("its data has changed since it was written")


def write_packed(path: Path, key: bytes, arena: NDArray[np.uint8]) -> None:
    """Writes the weights to a file with a temporary name, syncs the file, then renames it to
    `path`. So `path` is never a partial file.
    """
    with new_version(path) as file:
        digest = hashlib.sha256()
        file.seek(HEADER_BYTES)
        for start in range(0, arena.size, _CHUNK_BYTES):
            chunk = arena[start : start + _CHUNK_BYTES].data
            digest.update(chunk)
            write_all(file, chunk)
        file.seek(0)
        sealed_s = int(os.fstat(file.fileno()).st_mtime) & ~1
        header = PackedHeader(key, arena.size, digest.digest(), sealed_s)
        write_all(file, memoryview(header.encode()))
        os.fsync(file.fileno())
        os.utime(file.fileno(), (sealed_s, sealed_s))


def _read_header(file: BinaryIO) -> PackedHeader:
    page = file.read(HEADER_BYTES)
    if len(page) != HEADER_BYTES or page[: len(_MAGIC)] != _MAGIC:
        raise PackedFileError("it is not a file of packed weights")
    body = page[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != page[-_DIGEST_BYTES:]:
        raise PackedFileError("its header is damaged")
    header = PackedHeader(*_FIELDS.unpack_from(body)[1:])
    status = os.fstat(file.fileno())
    if status.st_size != HEADER_BYTES + header.num_bytes:
        raise PackedFileError("its size is not what its header says")
    if status.st_mtime_ns != header.sealed_s * 10**9:
        raise PackedFileError("something has written to it")
    return header
