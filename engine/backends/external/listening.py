"""Reserves an address for a child: a TCP port, or a Unix socket in a private folder.

We bind the port ourselves, without listening, as long as the child may need it. So a conflict is
found before the child is started, and no other process can take the port between two runs. Linux
lets the child bind the port too, because both set SO_REUSEADDR.

With either kind of address, there is a folder that only this user can read. It is for the Unix
socket and for the child's temporary files. It is deleted at the end.
"""

import errno
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from engine.core.errors import ConfigError

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
SOCKET_NAME = "http.sock"
# A placeholder for the socket's path, shown while the folder does not exist yet.
SOME_SOCKET = f"/tmp/engine-XXXXXXXX/{SOCKET_NAME}"


class _PrivateFolder:
    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="engine-")  # mode 0700

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the child. PyTorch's compile cache stays at its usual place, so
        that the next run finds it.
        """
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        return {"TMPDIR": self.folder, _COMPILED: os.environ.get(_COMPILED, str(compiled))}

    def prepare(self) -> None:
        """Delete files that the last run left. Called before each run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(self.folder).mkdir(mode=0o700)

    def release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class HeldPort(_PrivateFolder):
    """A reserved TCP port. `host` and `port` are arguments for the child. `url` is the child's
    address for clients on this machine.
    """

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
        super().__init__()
        self.host = host
        address, self.port = self._sock.getsockname()[:2]
        self.url = f"http://{_reachable(address)}:{self.port}"
        self.is_exposed = not ipaddress.ip_address(address).is_loopback
        if sys.platform != "linux":
            self._sock.close()

    def release(self) -> None:
        self._sock.close()
        super().release()


class PrivateSocket(_PrivateFolder):
    """A Unix socket in the private folder."""

    is_exposed = False

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(self.folder) / SOCKET_NAME
        self.url = f"unix://{self.path}"


Place = HeldPort | PrivateSocket


def _reachable(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        parsed = ipaddress.ip_address("127.0.0.1" if parsed.version == 4 else "::1")
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)
