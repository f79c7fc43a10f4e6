"""Where a child is to listen: a port that is taken for it, or a Unix socket in a private folder.

A port is bound here first and stays bound, not listening, as long as the child may need it: so a
conflict is known before anything slow begins, and nobody else is given the port meanwhile or
between two runs. Linux lets the child bind it too, which asks for SO_REUSEADDR as servers do.
"""

import errno
import ipaddress
import socket
import sys
import tempfile
from pathlib import Path

from engine.core.errors import ConfigError

SOCKET_NAME = "http.sock"
SOME_SOCKET = f"/tmp/engine-XXXXXXXX/{SOCKET_NAME}"  # before one has been made


class HeldPort:
    """`host` and `port` as the child is told them; `url` as a client on this machine reaches it."""

    folder = ""

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._sock = socket.socket(found[0], socket.SOCK_STREAM)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(found[4])
        except OSError as error:
            reason = (
                "another program is using it; choose another port, or 0 for any"
                if error.errno == errno.EADDRINUSE
                else error.strerror or str(error)
            )
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="port") from None
        self.host = host
        address, self.port = self._sock.getsockname()[:2]
        self.url = f"http://{_reachable(address)}:{self.port}"
        self.is_exposed = not ipaddress.ip_address(address).is_loopback
        if sys.platform != "linux":
            self._sock.close()

    def prepare(self) -> None:
        """Before each run."""

    def release(self) -> None:
        self._sock.close()


class PrivateSocket:
    """A Unix socket that only this user reaches."""

    is_exposed = False

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="engine-")  # mode 0700
        self.path = Path(self.folder) / SOCKET_NAME
        self.url = f"unix://{self.path}"

    def prepare(self) -> None:
        """Before each run: what the last one left would be in the way."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        if self.path.parent.exists():
            self.path.parent.rmdir()


Place = HeldPort | PrivateSocket


def _reachable(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        parsed = ipaddress.ip_address("127.0.0.1" if parsed.version == 4 else "::1")
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)
