"""One end of the socket between the main process and a writer."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from engine.ipc.transport import FrameDecoder, encode_frame

logger = logging.getLogger(__name__)

Message = TypeVar("Message")


class Pipe(asyncio.Protocol, Generic[Message]):
    """Sends and receives messages on an event loop. `on_message` is called for each message, and
    `on_lost` once, when the other process is gone. `on_drained` is called whenever the other
    process has read what kept this end waiting.
    """

    def __init__(
        self,
        message_type: Any,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._frames: FrameDecoder[Message] = FrameDecoder(message_type)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_drained = on_drained
        self._transport: asyncio.WriteTransport | None = None
        self.is_full = False  # whether the other process reads too slowly

    async def connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=sock)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. It is dropped if the other process is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._transport.set_write_buffer_limits(high=2**20)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except Exception:
            logger.exception("the connection between two frontend processes broke")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._on_drained()
