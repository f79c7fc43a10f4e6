"""Serves the blocks of prompts that this engine has computed to the engines that go on with them.

A connection is a thread. It is closed unless the other side proves that it has the token. Blocks
are read from the tier `outgoing`, so the engine loop is not asked.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from engine.backends.custom.runtime.tiers.host import HostTier
from engine.backends.custom.runtime.tiers.peers import block_build
from engine.core.errors import EngineError
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.link import TcpLink, split_address
from engine.core.shards.ring import RingClosedError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
GREETING_S = 10.0
# A block that is asked for may still be on its way to the tier. This is the max wait for it.
STORED_S = 1.0
POLL_S = 0.002
PAUSE_S = 1.0  # after a connection could not be accepted


class BlockServer:
    """`is_storing` says whether blocks are on their way to the tier."""

    def __init__(
        self,
        tier: HostTier,
        listen: str,
        is_storing: Callable[[], bool],
        files: tuple[str, str] | None = None,
    ) -> None:
        self.address = listen
        self._tier = tier
        self._is_storing = is_storing
        self._tls: ssl.SSLContext | None = None
        if files is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*files)
        self._token = b""
        self._listening: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._is_closed = False

    def serve(self, token: str) -> int:
        """Serve those who have the token, from now on. Returns the port."""
        self._token = token.encode()
        if self._listening is None:
            self._listening = socket.create_server(split_address(self.address))
            threading.Thread(target=self._accept, name="block-server", daemon=True).start()
        port: int = self._listening.getsockname()[1]
        return port

    def close(self) -> None:
        self._is_closed = True
        for sock in (self._listening, *list(self._open)):
            if sock is not None:
                with suppress(OSError):  # it was not connected
                    sock.shutdown(socket.SHUT_RDWR)  # ends calls of other threads
                sock.close()

    def _accept(self) -> None:
        assert self._listening is not None
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("no connection for blocks can be accepted: %s", error)
                time.sleep(PAUSE_S)  # there may be too many open files
                continue
            if len(self._open) >= MAX_CONNECTIONS:
                sock.close()
                continue
            self._open.add(sock)
            threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        wrapped = sock
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.settimeout(GREETING_S)
            if self._tls is not None:
                wrapped = self._tls.wrap_socket(sock, server_side=True)
            link = TcpLink(wrapped)
            link.greet(self._token, block_build())
            while True:
                self._answer(link)
        except RingClosedError:
            pass  # the other side is gone
        except (OSError, EngineError) as error:
            log.warning("a connection for blocks was closed: %s", error)
        finally:
            wrapped.close()
            self._open.discard(sock)

    def _answer(self, link: TcpLink) -> None:
        values, _ = decode_frame(link.receive())
        if len(values) != 2 or not isinstance(values[1], list):
            raise FrameError("this is no question for blocks")
        what, names = values
        if what == "find":
            link.send(encode_frame([self._find(names)]))
            return
        for record in self._tier.records(names):
            if record is None:
                link.send(encode_frame([], [None, None]))
            else:
                header = np.frombuffer(record.header(), np.uint8)
                link.send(encode_frame([], [header, record.payload]))

    def _find(self, names: list[str]) -> list[bool]:
        until = time.monotonic() + STORED_S
        while True:
            is_storing = self._is_storing()
            found = self._tier.find(names)
            if all(found) or not is_storing or time.monotonic() > until:
                return found
            time.sleep(POLL_S)
