"""Lets other machines in: accepts connections, each of which must prove soon that it has a token.

Each connection has a thread of its own until it has proved it, so a silent one holds up nobody.
There are only so many of them: then one of the address with the most of them is closed. What is
refused is logged, but not more often than every few seconds.
"""

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from engine.core.errors import EngineError
from engine.core.shards.link import GREETING_S, MAX_FRAME_BYTES, TcpLink
from engine.core.shards.ring import RingClosedError

log = logging.getLogger(__name__)

MAX_PENDING = 64  # connections that have not proved anything yet
PAUSE_S = 1.0  # after a connection could not be accepted
LOG_S = 10.0
Welcome = Callable[[TcpLink, socket.socket], None]


class Doorway:
    """Listens at an address. `welcome` gets each connection that has the token, in a thread of the
    connection. `what` says in log lines what the connections are for.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        build: str,
        welcome: Welcome,
        what: str,
        tls: ssl.SSLContext | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.token = token
        self._build, self._welcome, self._what, self._tls = build, welcome, what, tls
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, str] = {}  # -> address, oldest first
        self._is_closed = False
        self._logged_at = -LOG_S
        self._num_unlogged = 0
        is_ipv6 = ":" in address[0]
        self._listening = socket.create_server(
            address, family=socket.AF_INET6 if is_ipv6 else socket.AF_INET
        )
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name=f"doorway for {what}", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more. Connections that were welcomed stay open."""
        with self._lock:
            self._is_closed = True
            pending = list(self._pending)
        for sock in (self._listening, *pending):
            hang_up(sock)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("no connection for %s can be accepted: %s", self._what, error)
                time.sleep(PAUSE_S)  # there may be too many open files
                continue
            self._add(sock, str(address[0]))
            thread = threading.Thread(target=self._greet, args=(sock, str(address[0])), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many threads
                self._refused(str(address[0]), error)
                self._drop(sock)
                sock.close()

    def _add(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                crowd = Counter(self._pending.values()).most_common(1)[0][0]
                oldest = next(each for each, where in self._pending.items() if where == crowd)
                del self._pending[oldest]
                hang_up(oldest)
            self._pending[sock] = address

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._pending.pop(sock, None)

    def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            sock.settimeout(GREETING_S)
            if self._tls is not None:
                plain = sock
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    if self._pending.pop(plain, None) is None:
                        raise ConnectionAbortedError("there are too many connections")
                    self._pending[sock] = address
                sock.do_handshake()
            link = TcpLink(sock)
            link.greet(self.token, self._build, self._max_bytes)
        except (OSError, ValueError, EngineError, RingClosedError) as error:
            self._refused(address, error)
            self._drop(sock)
            sock.close()
            return
        self._drop(sock)
        if self._is_closed:
            sock.close()
        else:
            self._welcome(link, sock)

    def _refused(self, address: str, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            self._num_unlogged += 1
            if self._is_closed or now - self._logged_at < LOG_S:
                return
            count, self._num_unlogged, self._logged_at = self._num_unlogged, 0, now
        others = f" ({count - 1} others since the last such line)" if count > 1 else ""
        log.warning(
            "a connection for %s from %s was closed: %s%s", self._what, address, error, others
        )


def hang_up(sock: socket.socket) -> None:
    """End all calls of other threads on a socket."""
    with suppress(OSError):  # it was not connected
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
