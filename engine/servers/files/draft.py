"""A file that is being written. It has a temporary name until it is complete.

If writing fails, for example because the disk is full, the file is deleted. If the process is
killed, `FileStore.sweep` deletes the file later.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from engine.core.errors import UnavailableError, disk_full_error, is_disk_full

logger = logging.getLogger(__name__)

# Bytes are collected in memory until there are this many, and then written in a thread. Waking a
# thread for smaller writes would be slow.
_BUFFER_BYTES = 1 << 20


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Convert disk errors to errors for the client, without file paths. The log has the full
    error.
    """
    try:
        yield
    except OSError as error:
        logger.error("the file storage failed: %r", error)
        if is_disk_full(error):
            raise disk_full_error() from None
        raise UnavailableError("The server's storage failed; its log says why.") from None


class Draft:
    """A file that is being written. Use it with `async with`. At the end of the block, the file is
    deleted unless `publish` and `keep` were called.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self._path = path
        self._draft_path = path.with_name(path.name + ".part")
        self._fd: int | None = None
        self._buffer = bytearray()
        self._is_unclaimed = False

    async def __aenter__(self) -> "Draft":
        await asyncio.to_thread(self._open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._close)

    async def write(self, data: bytes) -> None:
        self._buffer += data
        self.num_bytes += len(data)
        if len(self._buffer) >= _BUFFER_BYTES:
            await asyncio.to_thread(self._flush)

    async def publish(self) -> None:
        """Flush the file to disk and move it to its final name."""
        await asyncio.to_thread(self._publish)

    def keep(self) -> None:
        """Keep the published file when the block ends. Call this when a database row refers to the
        file.
        """
        assert self._is_unclaimed
        self._is_unclaimed = False

    def _open(self) -> None:
        with storage_errors():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # If there is a file with this temporary name, a killed process left it incomplete.
            self._draft_path.unlink(missing_ok=True)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            self._fd = os.open(self._draft_path, flags, 0o600)

    def _flush(self) -> None:
        with storage_errors():
            self._write_buffer()
        self._buffer = bytearray()

    def _write_buffer(self) -> None:
        assert self._fd is not None
        view = memoryview(self._buffer)
        while view:
            view = view[os.write(self._fd, view) :]

    def _publish(self) -> None:
        self._flush()
        assert self._fd is not None
        with storage_errors():
            os.fsync(self._fd)
            self._draft_path.rename(self._path)
        self._is_unclaimed = True

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._draft_path.unlink(missing_ok=True)
        if self._is_unclaimed:
            self._path.unlink(missing_ok=True)
