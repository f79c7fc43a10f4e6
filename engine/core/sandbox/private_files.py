"""Reads and writes private files, such as the keys file and caches for the next start. Writes are
atomic, and a file is trusted only if no other user can have written it.
"""

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART_SUFFIX = ".part"


class ForeignFileError(OSError):
    """A file can't be trusted, because another user may have written it. The message says why."""


def open_private(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises `ForeignFileError` unless we own the file and no
    other user may write to it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(handle, "rb")
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise ForeignFileError("it is not a plain file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        file.close()
        raise ForeignFileError("others may have written to it")
    return file


def append_whole(handle: int, line: bytes) -> None:
    """Append the whole line. If the disk is full, append nothing and raise `OSError`. So the file
    never has an incomplete line.
    """
    size = os.fstat(handle).st_size
    if os.write(handle, line) < len(line):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_private(path: Path, content: bytes) -> None:
    """Write to a temporary file and rename it to `path`, so that no partial file is ever seen."""
    with new_version(path) as file:
        write_all(file, memoryview(content))


def write_all(file: io.FileIO, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[file.write(chunk) :]


@contextmanager
def new_version(path: Path) -> Iterator[io.FileIO]:
    """Yields a new file beside `path`. At the end of the block, the file is renamed to `path`. If
    the block raises, the file is removed.
    """
    handle, name = _open_part(path)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            yield file
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _open_part(path: Path) -> tuple[int, str]:
    return tempfile.mkstemp(PART_SUFFIX, f"{path.name}.", path.parent)
