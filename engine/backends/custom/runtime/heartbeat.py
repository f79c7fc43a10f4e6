"""The engine's pulse in shared memory: health is read, never asked for.

A counter of loop turns, the time of the last one, and whether there was work. The frontend maps the
same bytes, so that a frozen engine is seen without waiting for it.
"""

import mmap
import struct
import time
from typing import IO

LAYOUT = struct.Struct("<QQQ")  # turns, CLOCK_MONOTONIC of the last in ns, busy


class Heartbeat:
    """One side of the pulse; both sides open the same file descriptor."""

    def __init__(self, fileno: int) -> None:
        self._memory = mmap.mmap(fileno, LAYOUT.size)
        self._turns = 0

    def beat(self, busy: bool) -> None:
        self._turns += 1
        LAYOUT.pack_into(self._memory, 0, self._turns, time.monotonic_ns(), busy)

    def stalled_s(self) -> float | None:
        """Seconds since the last turn while there is work; None when idle or not started."""
        turns, at_ns, busy = LAYOUT.unpack_from(self._memory, 0)
        if not turns or not busy:
            return None
        return max(0.0, (time.monotonic_ns() - int(at_ns)) / 1e9)


def heartbeat_file() -> IO[bytes]:
    """An unnamed file of the right size, to be mapped by both sides."""
    import tempfile  # the engine's own process never makes one

    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.truncate(LAYOUT.size)
    return file
