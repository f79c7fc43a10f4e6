"""A ring in shared memory, which carries frames from one process to one or more others.

The writer copies a frame into the ring and rings a bell for each reader: 16 bytes in a pipe, which
say where the frame is. A reader copies the frame out and moves its cursor. So neither side spins,
and nothing is overwritten that a reader has not taken: a full ring makes the writer wait. Frames of
any size pass, because a long frame is sent in pieces.
"""

import logging
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

log = logging.getLogger(__name__)

RING_BYTES = 32 * 2**20  # memory is used only as far as frames have needed it
_BELL = struct.Struct("<QII")  # begin of the piece, counted from the ring's start; length; is_last
_CURSOR = struct.Struct("<Q")
_HEAD_BYTES = 4096  # the cursors, one for each reader
_PAUSE_S = 0.0002


class RingClosedError(Exception):
    """The other side is gone."""


def ring_file(capacity: int = RING_BYTES) -> IO[bytes]:
    """An unnamed file, which the processes of a ring map."""
    file = tempfile.TemporaryFile(dir=_memory_folder())  # noqa: SIM115 - the caller closes it
    file.truncate(_HEAD_BYTES + capacity)
    return file


def _memory_folder() -> str | None:
    """Where files are in memory, if the system has such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class RingWriter:
    """The writing end. `bells` are pipes, one for each reader. While the ring is full, `check` is
    called again and again; it raises if the readers are gone.
    """

    def __init__(
        self, fileno: int, bells: Sequence[int], check: Callable[[], None] = lambda: None
    ) -> None:
        self._memory = mmap.mmap(fileno, 0)
        self._view = memoryview(self._memory)
        self._capacity = len(self._memory) - _HEAD_BYTES
        self._bells = bells
        self._check = check
        self._written = 0

    def send(self, frame: bytes) -> None:
        """Sends a frame to all readers. Waits while the ring is full."""
        view, piece = memoryview(frame), self._capacity // 4
        for start in range(0, len(frame), piece):
            self._send_piece(view[start : start + piece], start + piece >= len(frame))

    def close(self) -> None:
        self._view.release()
        self._memory.close()
        for bell in self._bells:
            os.close(bell)

    def _send_piece(self, piece: memoryview, is_last: bool) -> None:
        begin, length = self._written, len(piece)
        if begin % self._capacity + length > self._capacity:  # the rest of the ring is too short
            begin += -begin % self._capacity
        self._wait_for_room(begin + length)
        place = _HEAD_BYTES + begin % self._capacity
        self._view[place : place + length] = piece
        self._written = begin + length
        message = _BELL.pack(begin, length, is_last)
        for bell in self._bells:
            try:
                os.write(bell, message)
            except BrokenPipeError as error:
                raise RingClosedError("a reader of the ring is gone") from error

    def _wait_for_room(self, end: int) -> None:
        if end - self._slowest() <= self._capacity:
            return
        log.warning("the ring of %d bytes is full; waiting for its readers", self._capacity)
        while end - self._slowest() > self._capacity:
            self._check()
            time.sleep(_PAUSE_S)

    def _slowest(self) -> int:
        cursors = (_CURSOR.unpack_from(self._memory, 8 * i)[0] for i in range(len(self._bells)))
        return int(min(cursors))


class RingReader:
    """A reading end. `index` is the reader's number, `bell` its pipe."""

    def __init__(self, fileno: int, index: int, bell: int) -> None:
        self._memory = mmap.mmap(fileno, 0)
        self._view = memoryview(self._memory)
        self._capacity = len(self._memory) - _HEAD_BYTES
        self._index = index
        self._bell = bell
        self._partial = bytearray()

    def receive(self) -> bytearray:
        """The next frame. Waits for it. Raises `RingClosedError` if the writer is gone."""
        while True:
            message = os.read(self._bell, _BELL.size)
            if len(message) < _BELL.size:
                raise RingClosedError("the writer of the ring is gone")
            begin, length, is_last = _BELL.unpack(message)
            place = _HEAD_BYTES + begin % self._capacity
            piece = self._view[place : place + length]
            if not is_last or self._partial:
                self._partial += piece
                frame = self._partial
            else:
                frame = bytearray(piece)
            _CURSOR.pack_into(self._memory, 8 * self._index, begin + length)
            if is_last:
                self._partial = bytearray()
                return frame

    def close(self) -> None:
        self._view.release()
        self._memory.close()
        os.close(self._bell)
