"""Files that a process caches for its next start. Writes are atomic, and a file is trusted only if
no other user can have written it.
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
    """The file may not be ours; the message says why."""


def open_private(path: Path) -> BinaryIO:
    """Open a regular file that we own and no other user may write to."""
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
    """Append the whole line, or nothing if the disk is full. So a later line never joins a torn
    one.
    """
    size = os.fstat(handle).st_size
    if os.write(handle, line) < len(line):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_private(path: Path, content: bytes) -> None:
    """Write to a temporary file and rename it to `path`, so that no partial file is ever seen."""
    faults.hit("keep_file")
    handle, name = tempfile.mkstemp(PART_SUFFIX, f"{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
