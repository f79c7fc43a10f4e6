"""Files that a process keeps for its next start: seen whole or not at all, and trusted only if
nobody else can have written them.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from engine.core import faults

PART_SUFFIX = ".part"


class ForeignFileError(OSError):
    """The file may not be ours; its text says why."""


def open_private(path: Path) -> BinaryIO:
    """Only a plain file of our own that nobody else may write to."""
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
    """All of it or, when the disk is full, nothing: no later line is joined to a torn one."""
    size = os.fstat(handle).st_size
    if os.write(handle, line) < len(line):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_private(path: Path, content: bytes) -> None:
    """Write beside `path` and rename, so that no half file is ever seen under its name."""
    faults.hit("keep_file")
    handle, name = tempfile.mkstemp(PART_SUFFIX, f"{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
