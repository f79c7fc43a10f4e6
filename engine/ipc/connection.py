"""A connection to another process in an event loop. An engine process has none, so that it need not
import asyncio: its end is `transport.SocketChannel`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from engine.core.errors import EngineError
from engine.ipc.transport import FrameDecoder, frames_of

if TYPE_CHECKING:
    from engine.core.shards.link import Seal

log = logging.getLogger(__name__)

Message = TypeVar("Message")

FULL_BYTES = 2**20  # unsent bytes from which on a connection is full


class Connection(asyncio.Protocol, Generic[Message]):
    """Sends and receives messages. `on_message` is called for each message, in order, from the
    loop's read callback, without switching to a task. `on_lost` is called once, when the other side
    is gone, and `on_drained` whenever it has read what made this end full.

    `join` may make one message of several that have arrived together. A side that leaves more than
    `max_unsent_bytes` unread is given up. If `is_sealed`, `trust` is called before the first
    message.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
        *,
        on_drained: Callable[[], None] = lambda: None,
        join: Callable[[list[Message]], Iterable[Message]] = iter,
        max_unsent_bytes: int | None = None,
        is_sealed: bool = False,
    ) -> None:
        self._message_type = message_type
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_drained = on_drained
        self._join = join
        self._max_unsent_bytes = max_unsent_bytes
        self._must_be_trusted = is_sealed
        self._sent: Seal | None = None
        self._is_connected = False
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self.is_full = False  # whether the other side reads too slowly

    async def connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await self._loop.create_connection(lambda: self, sock=sock)

    def trust(self, sent: "Seal", received: "Seal") -> None:
        self._sent, self._must_be_trusted = sent, False
        self._frames = FrameDecoder(self._message_type, seal=received)

    @property
    def silent_s(self) -> float:
        return self._loop.time() - self.heard_at

    @property
    def is_open(self) -> bool:
        return self._is_connected and not self.transport.is_closing()

    @property
    def num_unsent(self) -> int:
        """Bytes that wait to be sent."""
        return self.transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> bool:
        """Queue a message. Returns False, and drops it, if the other side is gone or does not read.
        Raises `MessageTooLargeError` if it is too large and is no message of an engine.
        """
        if not self.is_open:
            return False
        if self._max_unsent_bytes is not None and self.num_unsent > self._max_unsent_bytes:
            self.abort()
            return False
        for frame in frames_of(message):
            self.transport.write(frame if self._sent is None else frame + self._sent.next(frame))
        return True

    def abort(self) -> None:
        if self._is_connected:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._must_be_trusted:
            raise EngineError("this connection has no seals yet")
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=FULL_BYTES)
        self._is_connected = True

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        try:
            for message in self._join(self._frames.feed(data)):
                self._on_message(message)
        except Exception:  # what follows a message that can't be read can't be read either
            peer = self.transport.get_extra_info("peername") or "another process"
            log.exception("the connection to %s broke", peer)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._on_drained()
