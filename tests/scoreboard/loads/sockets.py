"""Connections that burden a server: silent ones, and clients that send or read slowly."""

import asyncio
import resource
import socket
import time
from dataclasses import dataclass, field

from tests.scoreboard.streams import HasAddress


def allow_files(count: int) -> None:
    """Set the limit of open files for this process and its children. Raises if it can't be that
    high.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise OSError(f"{count} files must be open at once, and {hard} may be (RLIMIT_NOFILE)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@dataclass
class Burden(asyncio.Protocol):
    """A connection that sends `opening`, then one byte of `rest` each second."""

    opening: bytes = b""
    rest: bytes = b""
    opened: float = 0.0
    closed: float | None = None  # when the server closed it
    received: bytearray = field(default_factory=bytearray)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.opened = time.monotonic()
        self.transport = transport
        transport.write(self.opening)
        if self.rest:
            self._send_next(0)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = time.monotonic()

    def _send_next(self, position: int) -> None:
        if self.closed is None and position < len(self.rest):
            self.transport.write(self.rest[position : position + 1])
            asyncio.get_running_loop().call_later(1.0, self._send_next, position + 1)

    def is_open_after(self, seconds: float) -> bool:
        return self.closed is None or self.closed - self.opened > seconds


async def connect(server: HasAddress, burden: Burden) -> Burden:
    """Connect. A refused connection counts as closed at once."""
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    try:
        await loop.create_connection(lambda: burden, *server.address)
    except OSError:
        burden.opened = burden.closed = began
    return burden


async def slow_reader(
    server: HasAddress, raw: bytes, seconds: float, bytes_per_s: float = 1.0
) -> int:
    """Send a request and read its answer slowly, with a tiny buffer. Returns the bytes read."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the minimum
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        await loop.sock_sendall(sock, raw)
        until = time.monotonic() + seconds
        num_bytes = 0
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(max(0.01, until - time.monotonic())):
                    got = await loop.sock_recv(sock, 1)
            except (TimeoutError, OSError):
                break
            if not got:
                break
            num_bytes += len(got)
            await asyncio.sleep(min(1 / bytes_per_s, max(0.0, until - time.monotonic())))
        return num_bytes
