"""Messages between processes: between a frontend and its engine process, between frontend
processes, and between servers and nodes. `connection.py` has the end of an event loop.

A message in msgpack is preceded by its length. Messages that are not of a known type are refused.
Between processes of one machine, the socket belongs to a pair that is created before the other
process starts, so no other process can connect. Frames to and from nodes are sealed.

A message that is too large is never sent: it fails its request, and never a process. The receiver
can't go on after one, so the sender has to notice it.
"""

import logging
import select
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from engine.core.errors import EngineError, PayloadTooLargeError
from engine.core.interfaces.request import ControlReply, Deltas, FromEngine, ToEngine, TokenDelta

if TYPE_CHECKING:
    from engine.core.shards.link import Seal

log = logging.getLogger(__name__)

Message = TypeVar("Message")

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 1024 * 1024
RECEIVE_BYTES = 256 * 1024
SEND_POLL_S = 0.5


class ConnectionClosedError(EngineError):
    """The other side has closed the connection."""


class MessageTooLargeError(PayloadTooLargeError):
    """A message has more bytes than a frame may have. It was not sent."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Raises `MessageTooLargeError`, so that the request of the message fails."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise MessageTooLargeError(
            f"The request or its result has {len(body):,} bytes between processes, and may have"
            f" {MAX_FRAME_BYTES:,}; ask for less at once."
        )
    return LENGTH.pack(len(body)) + body


def frames_of(message: msgspec.Struct) -> list[bytes]:
    """The frames of a message. Deltas that are too large together are sent apart, and one that is
    too large alone becomes the error of its request, as a reply does. Other messages of an engine
    concern no request, and are left out. Any other message raises `MessageTooLargeError`.
    """
    try:
        return [encode_frame(message)]
    except MessageTooLargeError as error:
        if isinstance(message, Deltas):
            deltas, middle = message.deltas, len(message.deltas) // 2
            if not middle:
                last = failed_delta(deltas[0].request_id, deltas[0].choice, error)
                return [encode_frame(Deltas((last,)))]
            halves = (deltas[:middle], deltas[middle:])
            return [frame for half in halves for frame in frames_of(Deltas(half))]
        if isinstance(message, ControlReply):
            return [encode_frame(ControlReply(message.control_id, False, error.message))]
        if not isinstance(message, FromEngine):
            raise
        log.error("a message of type %s is not sent: %s", type(message).__name__, error)
        return []


def failed_delta(request_id: str, choice: int, error: EngineError) -> TokenDelta:
    """The last delta of a choice that ends with an error."""
    return TokenDelta(
        request_id,
        choice,
        finish_reason="error",
        error_code=error.error_code,
        error_message=error.message,
        retry_after=error.retry_after,
    )


def length_in(head: bytes | bytearray) -> int:
    """The length of the message whose frame begins with `head`. Raises if it is too large."""
    length: int = LENGTH.unpack_from(head)[0]
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {length} bytes is over the limit")
    return length


class FrameDecoder(Generic[Message]):
    """Splits a byte stream into messages. `message_type` is the union of all allowed types. With
    `seal`, each frame has a seal behind it, which is checked.
    """

    def __init__(self, message_type: Any, seal: "Seal | None" = None) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)
        self._seal = seal
        self._seal_bytes = 0 if seal is None else seal.num_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + length_in(self._buffer)
            sealed_end = end + self._seal_bytes
            if len(self._buffer) < sealed_end:
                break
            if self._seal is not None:
                seal = self._buffer[end:sealed_end]
                if not self._seal.is_next(self._buffer[:end], seal):
                    raise EngineError("a message was changed on its way")
            messages.append(self._decoder.decode(self._buffer[LENGTH.size : end]))
            del self._buffer[:sealed_end]
        return messages


class Channel(Protocol):
    """The engine's connection to its frontend."""

    def poll(self, timeout_s: float) -> list[ToEngine]: ...

    def send(self, message: FromEngine) -> None: ...


class SocketChannel(Generic[Message]):
    """A blocking end of the socket between frontend and engine process. If the other side does not
    read, `send` waits, and calls `on_wait` again and again meanwhile.
    """

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self.on_wait: Callable[[], None] = lambda: None

    def poll(self, timeout_s: float) -> list[Message]:
        """The messages that have arrived. If none has arrived, waits up to `timeout_s` for data."""
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
        for frame in frames_of(message):
            self._send(memoryview(frame))

    def _send(self, rest: memoryview) -> None:
        try:
            while rest:
                try:
                    rest = rest[self._sock.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self.on_wait()
                    select.select([], [self._sock], [], SEND_POLL_S)
        except OSError as error:
            raise ConnectionClosedError(f"the frontend is gone: {error}") from error
