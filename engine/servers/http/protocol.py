"""uvicorn's HTTP protocol, with limits that uvicorn lacks.

Without these limits, a client could send headers forever, and there could be any number of idle
connections. The time limit for request bodies is in `limits.py`. The number of connections is
limited so that some file descriptors always stay free. Without a free descriptor, the server could
not even import a module.

A request may be refused before its body has arrived. If the connection were closed then, with data
in it that nobody has read, the kernel would reset it, and a client that still sends could lose the
answer. So the connection lingers: the server closes its own direction, and discards what the client
still sends, for a limited time.

A `DirectBody` writes parts of a response body without a coroutine. uvicorn's `send` is a coroutine,
and the stream that calls it is a task. Resuming both for each token takes longer than making the
token's text. If the connection takes more data at once, a stream may write to it directly, from the
callback in which the tokens arrived.
"""

import asyncio
import contextlib
import functools
import re
import resource
import socket
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

_DIRECT_BODY = "engine.direct_body"  # extension of the ASGI scope
# Takes over a connection whose request asks for another protocol. Gets the headers.
Upgrade = Callable[[Sequence[tuple[bytes, bytes]], asyncio.Transport], None]

KEEP_ALIVE_TIMEOUT_S = 15
# Max seconds for closing connections at shutdown, after all requests have ended.
CLOSE_TIMEOUT_S = 5
HEAD_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100
MAX_URL_BYTES = 8_192
# Requests that may wait on a connection for the answer to an earlier one while it is still read.
MAX_PIPELINED = 16
MAX_CONNECTIONS = 8_192
# Limits of connections that linger. If there are more of them, the next one is closed at once.
LINGER_S = 5.0
MAX_LINGER_BYTES = 64 * 2**20
MAX_LINGERING = 256
# File descriptors kept for upstream connections, storage, the engine and late imports.
RESERVED_FILES = 512


def raise_file_limit() -> None:
    """Raise this process's soft limit on open files, which is 1,024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # If this fails, the server only accepts fewer connections.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """The max number of connections. It is the limit on open files minus `RESERVED_FILES`, but at
    least a quarter of that limit, and at most `MAX_CONNECTIONS`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 4))


class HeadTooLargeError(Exception):
    """The URL or the headers of a request are too large. It is raised in a callback of the HTTP
    parser; uvicorn then answers 400.
    """


_CONTINUE = b"HTTP/1.1 100"
# The name of a header, in the head of an answer.
_HEADER_NAME = re.compile(rb"(?<=\r\n)[a-z0-9-]+(?=:)")


class AnswerTransport:
    """The transport of a connection, as the code of uvicorn sees it that writes one answer. It asks
    the connection before it closes it. It writes the names of headers with capitals, for clients
    that know no others.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.write = self._write_head
        self.is_closing = transport.is_closing
        self.close = close

    def _write_head(self, data: bytes) -> None:
        if not data.startswith(_CONTINUE):
            self.write = self._transport.write
        self._transport.write(_HEADER_NAME.sub(lambda name: name[0].title(), data))


class LimitedProtocol(HttpToolsProtocol):
    """One connection, with limits on the time and size of each request's headers. If there are too
    many connections, the oldest idle one is closed. `upgrades` has the protocols to which a request
    may switch, by path and name. `lingering` has the server's connections that linger.
    """

    def __init__(
        self,
        *args: Any,
        upgrades: dict[tuple[bytes, bytes], Upgrade],
        lingering: "set[LimitedProtocol]",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._upgrades = upgrades
        self._lingering = lingering
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_discarded = 0
        self._is_stopping = False
        self._opened = self.loop.time()
        self._open_cycles: list[RequestResponseCycle] = []
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > max_connections():
            self._oldest_idle().transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._lingering.discard(self)
        # uvicorn tells only the last of several pipelined requests, which may not have begun.
        for cycle in self._open_cycles:
            cycle.transport = self.transport  # without a reference to this object
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        timer = self.timeout_keep_alive_task
        super().data_received(data)
        if timer is not None:
            self._keep_deadline(timer.when())
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
        if self.cycle is None:
            return
        with_direct_body(self.cycle.scope, CycleBody(self.cycle))  # type: ignore[type-var]
        self.cycle.transport = AnswerTransport(self.transport, self._close_answered)  # type: ignore[assignment]
        waiting = [each for each in self._open_cycles if not each.response_complete]
        self._open_cycles = [*waiting, self.cycle]
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()  # otherwise nobody would notice that the client has left

    def on_response_complete(self) -> None:
        if self._linger_timer is None:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """As in uvicorn, but the connection may linger."""
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(msg)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % (name.title(), value) for name, value in headers)
        self.transport.write(STATUS_LINE[400] + lines + b"\r\n" + msg.encode("ascii"))
        self._close(may_send=True)

    def shutdown(self) -> None:
        self._is_stopping = True
        if self._linger_timer is None:
            super().shutdown()
        else:
            self.transport.abort()

    def _should_upgrade(self) -> bool:
        return (self.url, self._get_upgrade() or b"") in self._upgrades

    def handle_websocket_upgrade(self) -> None:
        """Called by uvicorn if `_should_upgrade`, for any protocol."""
        self.connections.discard(self)
        upgrade = self._upgrades[self.url, self._get_upgrade() or b""]
        upgrade(self.headers, self.transport)

    def _close_answered(self) -> None:
        """Called by uvicorn at the end of an answer, if no other request may follow it."""
        self._close(may_send=self.cycle.more_body)

    def _close(self, *, may_send: bool) -> None:
        """Close the connection, after lingering if that may save an answer: the client may still
        send, and the last answer is written.
        """
        num_open = sum(not each.response_complete for each in self._open_cycles)
        is_written = num_open == len(self.pipeline)
        may_linger = not self._is_stopping and len(self._lingering) < MAX_LINGERING
        if may_send and is_written and may_linger and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Discard what the client sends, until it closes the connection too, or a limit is
        reached.
        """
        self._end_head()
        self._unset_keepalive_if_required()
        self._lingering.add(self)
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()
        try:
            # TLS has no half-closed connections. There, clients close, because the answer asks
            # them to.
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client is gone
            self.transport.abort()

    def _keep_deadline(self, due: float) -> None:
        """uvicorn stops its keep-alive timer whenever data arrives. If that was no request, but for
        example the rest of a body that nobody wanted, the next one is due as before.
        """
        is_waiting = self._is_idle and self._head_timer is None and self in self.connections
        if is_waiting and not self.transport.is_closing() and self._linger_timer is None:
            self.timeout_keep_alive_task = self.loop.call_at(due, self.timeout_keep_alive_handler)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _is_idle(self) -> bool:
        """Whether no response is in progress on this connection. A connection that is closing is
        idle too, even if its client has not read all data.
        """
        finished = self.cycle is None or self.cycle.response_complete
        return finished or self._linger_timer is not None or self.transport.is_closing()

    def _oldest_idle(self) -> "LimitedProtocol":
        """The idle connection that was opened first. This is `self` if all other connections are
        busy.
        """
        idle = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        return min((each for each in idle if each._is_idle), key=lambda each: each._opened)


class _Uvicorn(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Does nothing, because `HttpServer.handle_signal` handles signals. uvicorn's own handler
        would raise them again when the server ends.
        """
        return contextlib.nullcontext()


def http_server(
    app: ASGIApp,
    close_timeout_s: int,
    tls: tuple[Path, Path] | tuple[str, str] | None = None,
    upgrades: dict[tuple[bytes, bytes], Upgrade] | None = None,
) -> uvicorn.Server:
    """A uvicorn server for HTTP without WebSockets, with the limits of this module. `tls` are the
    files of the certificate and of its key.
    """
    cert_file, key_file = tls or (None, None)
    protocol = functools.partial(LimitedProtocol, upgrades=upgrades or {}, lingering=set())
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ssl_certfile=cert_file,
            ssl_keyfile=key_file,
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


async def serve_connection(server: uvicorn.Server, connection: socket.socket) -> None:
    """Serve a connection that was accepted elsewhere, on a server that has started."""
    loop, config = asyncio.get_running_loop(), server.config
    connection.setblocking(False)
    await loop.connect_accepted_socket(
        lambda: config.http_protocol_class(  # type: ignore[call-arg]
            config=config,
            server_state=server.server_state,
            app_state=server.lifespan.state,
            _loop=loop,
        ),
        connection,
        ssl=config.ssl,
    )


def event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop of a frontend process."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class DirectBody(Protocol):
    """The body of one response. The response must have been started with `send`, and must be ended
    with it.
    """

    def write(self, body: bytes) -> bool:
        """Write a part of the body. Returns False, and writes nothing, if the connection can't take
        it now.
        """
        ...


class CycleBody:
    """The body of a response on a connection of this process."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # The cycle has the scope, and the scope has this object. With a weak reference, all of them
        # are freed with the request, and not by the garbage collector.
        self._cycle = weakref.ref(cycle)
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly."""
        return self._flow.write_paused

    @property
    def has_whole_request(self) -> bool:
        """Whether the whole body of the request has arrived."""
        cycle = self._cycle()
        return cycle is not None and not cycle.more_body

    def write(self, body: bytes) -> bool:
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or not cycle.chunked_encoding:
            return False
        if self._flow.write_paused:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


Scope = TypeVar("Scope", bound=MutableMapping[str, Any])


def with_direct_body(scope: Scope, body: DirectBody) -> Scope:
    """Let the application find the body of a request's response."""
    scope["extensions"] = {_DIRECT_BODY: body}
    return scope


def direct_body(scope: MutableMapping[str, Any]) -> Any:
    """The body of the request's response, or None if it can't be written directly."""
    return scope.get("extensions", {}).get(_DIRECT_BODY)
