"""uvicorn's HTTP protocol plus limits that it lacks: on request heads and on idle connections.

Without them a client could send headers forever, byte by byte or in megabytes, and silent
connections could pile up without bound. `limits.py` has the deadline for bodies. Connections never
use up all file descriptors: without a free one the server could not even import a module.
"""

import asyncio
import contextlib
import resource
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

KEEP_ALIVE_TIMEOUT_S = 15
HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100
MAX_URL_BYTES = 8_192
MAX_CONNECTIONS = 1_024
# File descriptors kept for upstream connections, storage, the engine and late imports.
RESERVED_FILES = 512


def raise_file_limit() -> None:
    """Raise the soft limit on open files, which is 1,024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # on failure there are just fewer connections
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Connections that the file limit allows after the reserve, at least a quarter of the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 4))


class HeadTooLargeError(Exception):
    """Raised inside a parser callback; the parser answers 400."""


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opened = self.loop.time()
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > max_connections():
            self._oldest_idle().transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if (
            num_bytes > MAX_HEAD_BYTES
            or len(self.headers) > MAX_HEADERS
            or len(self.url) > MAX_URL_BYTES
        ):
            raise HeadTooLargeError
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_idle(self) -> bool:
        """Whether no response is in progress, or the connection is closing and its client reads
        nothing.
        """
        finished = self.cycle is None or self.cycle.response_complete
        return finished or self.transport.is_closing()

    def _oldest_idle(self) -> "LimitedProtocol":
        """The connection that has been idle longest; this one if all others are busy."""
        idle = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        return min((each for each in idle if each._is_idle), key=lambda each: each._opened)


class _Uvicorn(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Disabled: `HttpServer.handle_signal` handles signals. uvicorn would re-raise them at the
        end.
        """
        return contextlib.nullcontext()


def http_server(app: ASGIApp, close_timeout_s: int) -> uvicorn.Server:
    """A uvicorn server that speaks only HTTP, within these limits."""
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
            timeout_graceful_shutdown=close_timeout_s,
        )
    )
