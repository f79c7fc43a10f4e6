"""Sends msgpack messages over a private socket, between a frontend and its engine process.

A message is preceded by its length. Messages that are not of a known type are refused. The socket
belongs to a pair that is created before the engine process starts, so no other process can connect.
"""

import select
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.request import Deltas, Stats, TokenDelta

Message = TypeVar("Message")

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
RECEIVE_BYTES = 256 * 1024
MAX_WAITING = 65_536  # if more deltas wait for the other side, the sender waits for it, too


class ConnectionClosedError(EngineError):
    """The other side has closed the connection."""


def encode_frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[Message]):
    """Splits a byte stream into messages. `message_type` is the union of all allowed types."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a message of {length} bytes is over the limit")
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return messages


class SocketChannel(Generic[Message]):
    """The engine's end of the socket to its frontend, or the frontend's end while it is loading.

    If the other side is slower than this one, deltas wait here until all that was sent before is on
    its way. They are then sent in one message. So a busy frontend gets fewer and larger messages,
    and the engine does not wait for it.
    """

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self._waiting: list[TokenDelta] = []
        self._stats: Stats | None = None  # sent after the waiting deltas
        self._unsent = memoryview(b"")  # the rest of the last message

    def poll(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived. If none has arrived, waits up to `timeout_s` for data."""
        if self._has_more:
            self._send_waiting()
        if timeout_s > 0:
            self.flush()
        ready, _, _ = select.select([self._sock], [], [], timeout_s)
        if not ready:
            return []
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        # The other process exited before it read everything that was sent to it.
        except ConnectionError:
            data = b""
        if not data:
            raise ConnectionClosedError("the other side closed the connection")
        return self._frames.feed(data)

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message. Deltas and statistics may wait until the next `poll`."""
        if isinstance(message, Deltas):
            self._waiting.extend(message.deltas)
        elif isinstance(message, Stats):
            self._stats = message
        else:
            self.flush()
            self._unsent = memoryview(encode_frame(message))
            self.flush()
            return
        self._send_waiting()
        if len(self._waiting) > MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Waits until the other side has room for all that waits, and sends it."""
        while self._has_more:
            select.select([], [self._sock], [])
            self._send_waiting()

    @property
    def _has_more(self) -> bool:
        return bool(self._unsent or self._waiting or self._stats)

    def _send_waiting(self) -> None:
        """Sends what the other side has room for, without waiting for it."""
        while self._has_more:
            if not self._unsent:
                self._unsent = memoryview(self._next_frame())
            try:
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosedError(f"the frontend is gone: {error}") from error
            self._unsent = self._unsent[sent:]

    def _next_frame(self) -> bytes:
        if self._waiting:
            deltas, self._waiting = Deltas(tuple(self._waiting)), []
            return encode_frame(deltas)
        stats, self._stats = self._stats, None
        assert stats is not None
        return encode_frame(stats)
