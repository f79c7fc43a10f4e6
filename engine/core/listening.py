"""Binds the server's socket before a model is loaded, so that a used port is reported at once. This
module imports little, so that binding is fast.
"""

import errno
import ipaddress
import socket

from engine.core.config import check_exposure
from engine.core.config_schema import Settings
from engine.core.errors import ConfigError


def bind_socket(settings: Settings) -> socket.socket:
    """Bind the server's port, without listening yet. Raises `ConfigError` if the port can't be
    bound.
    """
    check_exposure(settings)
    return _bind(settings.server.host, settings.server.port, "server.port", "--port")


def bind_probes(settings: Settings) -> socket.socket | None:
    """Bind the separate port for the probes. Returns None if the settings have no such port."""
    port = settings.server.probe_port
    if port is None:
        return None
    return _bind(settings.server.host, port, "server.probe_port", "server.probe_port")


def _bind(host: str, port: int, param: str, option: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # IPPROTO_TCP is given explicitly, because asyncio sets TCP_NODELAY only on such sockets.
        # Without TCP_NODELAY, a response body waits 40 ms for the client's ACK of the response's
        # head.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        reason = (
            f"another program is using it; choose another with {option}"
            if error.errno == errno.EADDRINUSE
            else error.strerror or str(error)
        )
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param=param) from None
    sock.set_inheritable(False)
    return sock


def is_on_all_interfaces(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0]).is_unspecified


def address_of(sock: socket.socket) -> str:
    """A URL at which this machine reaches a bound socket. If the socket is bound to all interfaces,
    this is the loopback address, because no client can open 0.0.0.0 or [::].
    """
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
