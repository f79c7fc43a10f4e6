"""Protection against web pages that make a browser send requests to this server. A browser can do
that even if the server listens on a loopback address.

Against DNS rebinding, only known `Host` names are accepted. Against CSRF, the `Origin` header that
browsers send is checked.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.config_schema import ServerSettings
from engine.core.errors import EngineError, ForbiddenError, InvalidRequestError
from engine.servers.http.errors import error_response
from engine.servers.http.request_log import record_of

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
# Paths that accept any `Host`, because orchestrators probe them by IP address.
_ANY_HOST_PATHS = frozenset({"/livez", "/readyz"})
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class BrowserGuard:
    """Refuses requests with an unknown `Host`. Also refuses state-changing methods, such as POST,
    from web pages of other origins.
    """

    def __init__(self, app: ASGIApp, server: ServerSettings) -> None:
        self._app = app
        bound = _bracketed(server.host.lower())
        self._hosts = {
            *LOOPBACK_NAMES,
            bound,
            *(_bracketed(h.lower()) for h in server.allowed_hosts),
        }
        # DNS rebinding needs a host name. Numeric addresses can't be rebound, so a server bound to
        # all interfaces accepts any numeric `Host`.
        self._any_address = bound in ("0.0.0.0", "[::]")
        self._origins = frozenset(server.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        record_of(scope).error_code = error.error_code
        await error_response(error, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> EngineError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if scope["path"] not in _ANY_HOST_PATHS and not self._is_known(hosts):
            return InvalidRequestError(
                "The Host header names a host that this server does not answer for;"
                " add it to server.allowed_hosts.",
                code="INVALID_HOST",
            )
        if scope["method"] in _READING_METHODS:
            return None
        if all(self._is_friendly(origin, hosts) for origin in headers.getlist("origin")):
            return None
        return ForbiddenError(
            "Requests from this web origin are refused; enable server.enable_cors and list it in"
            " server.cors_origins."
        )

    def _is_known(self, hosts: Iterable[str]) -> bool:
        names = [_host_name(host) for host in hosts]
        if len(names) != 1:
            return False
        name = names[0]
        return (
            "*" in self._hosts or name in self._hosts or (self._any_address and _is_address(name))
        )

    def _is_friendly(self, origin: str, hosts: list[str]) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            return [urlsplit(origin).netloc.lower()] == [host.lower() for host in hosts]
        except ValueError:
            return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _host_name(host: str) -> str:
    """The host without its port. A malformed host is returned unchanged; it matches no known
    name.
    """
    name, colon, port = host.lower().rpartition(":")
    if colon and port.isdecimal() and (":" not in name or name.startswith("[")):
        return name
    return host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
