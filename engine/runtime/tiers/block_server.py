"""Serves the blocks of prompts that this engine has computed to the engines that go on with them.

A connection has a thread and a place among `MAX_CONNECTIONS` once the other side has proved that it
has the token (`core/shards/doorway.py`). Blocks are read from the tier `outgoing`, so the engine
loop is not asked. A block is found by its name alone, which is a hash over its tokens and its
tenant's salt. No question lists names, so an engine can ask only for prompts that it was given.
"""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable

import numpy as np

from engine.core.errors import EngineError
from engine.core.shards.doorway import Doorway, hang_up
from engine.core.shards.frames import FrameError, decode_frame, encode_frame
from engine.core.shards.link import TcpLink, split_address
from engine.core.shards.ring import RingClosedError
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.peers import block_build

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_QUESTION_BYTES = 16 * 2**20
MAX_NAMES = 2**17
UNREAD_S = 30.0  # a connection whose other side reads nothing for this long is closed
# A block that is asked for may still be on its way to the tier. This is the max wait for it.
STORED_S = 1.0
POLL_S = 0.002


class BlockServer:
    """`listen` is the address at which blocks are served. If it is empty, `serve` names the host.
    `is_storing` says whether blocks are on their way to the tier.
    """

    def __init__(
        self,
        tier: HostTier,
        listen: str,
        is_storing: Callable[[], bool],
        files: tuple[str, str] | None = None,
    ) -> None:
        self._listen = listen
        self._tier = tier
        self._is_storing = is_storing
        self._tls: ssl.SSLContext | None = None
        if files is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*files)
        self._doorways: dict[tuple[str, int], Doorway] = {}
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def serve(self, token: str, host: str = "127.0.0.1") -> int:
        """Serve those who have the token, from now on. Returns the port."""
        address = split_address(self._listen) if self._listen else (host, 0)
        if address not in self._doorways:
            self._doorways[address] = Doorway(
                address,
                token.encode(),
                block_build(),
                self._talk,
                "blocks",
                self._tls,
                MAX_QUESTION_BYTES,
            )
        for doorway in self._doorways.values():
            doorway.token = token.encode()
        return self._doorways[address].port

    def close(self) -> None:
        for doorway in self._doorways.values():
            doorway.close()
        with self._lock:
            for sock in self._open:
                hang_up(sock)

    def _talk(self, link: TcpLink, sock: socket.socket) -> None:
        with self._lock:
            has_place = len(self._open) < MAX_CONNECTIONS
            if has_place:
                self._open.add(sock)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
            while has_place:
                self._answer(link)
        except RingClosedError:
            pass  # the other side is gone
        except (OSError, EngineError) as error:
            log.warning("a connection for blocks from %s was closed: %s", link.peer, error)
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, link: TcpLink) -> None:
        values, _ = decode_frame(link.receive())
        if len(values) != 2 or values[0] not in ("find", "load"):
            raise FrameError("this is no question for blocks")
        what, names = values
        if not isinstance(names, list) or len(names) > MAX_NAMES:
            raise FrameError("this is no question for blocks")
        if not all(isinstance(each, str) for each in names):
            raise FrameError("a name of a block is a string")
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
