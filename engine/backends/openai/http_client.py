"""HTTP/1.1 client for one server. Connections are kept alive. Each has one request at a time.

Response bytes are processed in the same call in which the event loop delivers them, so no task is
woken per chunk. httpx would take about five times the CPU time per chunk (90 instead of 17
microseconds), which is too much for many streams.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

import httptools
import msgspec

from engine.backends.openai.config import ServerAddress

# A connection that was idle for longer is not reused, because the server may be about to close it.
MAX_IDLE_S = 30.0
MAX_IDLE_CONNECTIONS = 128
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 256 * 2**20
T = TypeVar("T")
# How long the last bytes of a response may take after its answer is complete. Then the connection
# is closed.
DRAIN_S = 1.0


class TransportError(Exception):
    """The server is unreachable, or its response broke off. The message has no address."""


class ConnectFailed(TransportError):
    """Connecting failed; nothing was sent."""


class StaleConnection(TransportError):
    """The server closed a reused connection before it answered. The request is sent again on a new
    one.
    """


class Receiver(Generic[T]):
    """Receives a response and sets the result of `done`. Its methods must not raise."""

    def __init__(self) -> None:
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.is_cut = False  # `done` has its result, but the server would send more

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """The response's status and headers."""

    def body(self, data: bytes) -> None:
        """A chunk of the body."""

    def end(self) -> None:
        """The response is complete."""

    def fail(self, error: Exception) -> None:
        """The connection failed, at any point."""
        if not self.done.done():
            self.done.set_exception(error)

    @property
    def went_well(self) -> bool:
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None


class _Nobody(Receiver[None]):
    """Receives and ignores the last bytes of a response whose answer is complete."""

    def fail(self, error: Exception) -> None:
        """Ignored: the answer is already complete."""


class Connection(asyncio.Protocol):
    """One connection. It calls `on_free` when it can be reused, and `on_closed` when it is
    closed.
    """

    def __init__(
        self,
        idle_timeout_s: float,
        on_free: Callable[["Connection"], None],
        on_closed: Callable[["Connection"], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle_timeout_s = idle_timeout_s
        self._on_free = on_free
        self._on_closed = on_closed
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver[Any] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._is_headed = False
        self._timer: asyncio.TimerHandle | None = None
        self._asked_at = 0.0  # time of the last request, event-loop clock
        self.heard_at = 0.0  # time of the last received byte, event-loop clock
        self.is_open = True
        self.is_fresh = True  # no request has been sent yet
        self.free_since = 0.0  # time.monotonic()

    def send(self, receiver: Receiver[Any], message: bytes) -> None:
        assert self._receiver is None and self._transport is not None
        self._receiver = receiver
        self._is_headed = False
        self._head_bytes = 0
        self._asked_at = self._loop.time()
        self._timer = self._loop.call_later(self._idle_timeout_s, self._check_idle)
        self._transport.write(message)

    def release(self, receiver: Receiver[Any]) -> None:
        """Stop waiting for the response. Closes the connection, unless the answer is complete. Then
        the last bytes of the response may still arrive.
        """
        if self._receiver is not receiver:
            return
        if receiver.is_cut or not receiver.went_well:
            self.abort()
            return
        self._receiver = _Nobody()
        self._stop_timer()
        self._timer = self._loop.call_later(DRAIN_S, self.abort)

    def abort(self) -> None:
        self.is_open = False
        self._receiver = None
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: TransportError) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.fail(error)

    # asyncio.Protocol callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
        if not self._is_headed:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data:
                self.fail(TransportError("its answer begins with too many headers"))
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.fail(TransportError("its answer is no HTTP"))

    def eof_received(self) -> None:
        lengths = (b"content-length", b"transfer-encoding")
        if self._is_headed and not any(name in self._headers for name in lengths):
            self.is_open = False
            self.on_message_complete()  # a body without a length ends with the connection

    def connection_lost(self, error: Exception | None) -> None:
        self._on_closed(self)
        if not self._is_headed and not self.is_fresh:
            self.fail(StaleConnection("it closed the connection"))
        else:
            when = "within its answer" if self._is_headed else "without an answer"
            self.fail(TransportError(f"it closed the connection {when}"))

    # Parser callbacks.

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._receiver is not None:
            self._is_headed = True
            self._receiver.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data)

    def on_message_complete(self) -> None:
        receiver = self._receiver
        if receiver is None or not self._is_headed:
            return  # an interim response, such as 100 Continue
        self._receiver = None
        self._is_headed = False
        self._stop_timer()
        receiver.end()
        if self.is_open and self._parser.should_keep_alive():
            self.is_fresh = False
            self._on_free(self)
        else:
            self.abort()

    def _check_idle(self) -> None:
        last = max(self._asked_at, self.heard_at)
        left = last + self._idle_timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self.fail(TransportError(f"it sent nothing for {self._idle_timeout_s:g} seconds"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class _Whole(Receiver[Response]):
    """Collects a complete response."""

    def __init__(self) -> None:
        super().__init__()
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers

    def body(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BODY_BYTES:
            self.fail(TransportError("its answer is too large"))
        elif not self.done.done():
            self._pieces.append(data)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(Response(self._status, self._headers, b"".join(self._pieces)))


class HttpClient:
    """Sends requests to one server. `close` fails all open requests."""

    def __init__(
        self,
        endpoint: ServerAddress,
        header_lines: list[str],
        *,
        connect_timeout_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._endpoint = endpoint
        lines = [f"Host: {endpoint.host_header}", *header_lines, "Accept-Encoding: identity"]
        self._common = "".join(f"{line}\r\n" for line in lines)
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._free: list[Connection] = []
        self._all: set[Connection] = set()
        self._is_closed = False

    async def exchange(
        self,
        new_receiver: Callable[[], Receiver[T]],
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> T:
        """Send `body` as JSON and wait for the receiver's result. Raises `TransportError`, or the
        receiver's error.
        """
        message = self._message(method, path, body, headers)
        connection = self._kept() or await self._connect()
        while True:
            receiver = new_receiver()
            connection.send(receiver, message)
            try:
                return await receiver.done
            except StaleConnection:
                connection = await self._connect()
            finally:
                connection.release(receiver)

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float | None = None,
    ) -> Response:
        """Send a request and return the complete response. Raises `TransportError`."""
        try:
            exchange = self.exchange(_Whole, method, path, body, headers)
            return await asyncio.wait_for(exchange, timeout_s)
        except TimeoutError:
            raise TransportError(f"it did not answer within {timeout_s:g} seconds") from None

    def has_heard_since(self, moment: float) -> bool:
        """Whether any response made progress after `moment` (event-loop clock)."""
        return any(each.heard_at > moment for each in self._all)

    def close(self) -> None:
        self._is_closed = True
        for connection in list(self._all):
            connection.fail(TransportError("its connection was closed here"))
        self._free.clear()

    def _message(self, method: str, path: str, body: object, headers: Mapping[str, str]) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\n{self._common}"
        for name, value in headers.items():
            head += f"{name}: {value}\r\n"
        if body is None:
            return head.encode() + b"\r\n"
        content = msgspec.json.encode(body)
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content

    def _kept(self) -> Connection | None:
        oldest = time.monotonic() - MAX_IDLE_S
        while self._free:
            connection = self._free.pop()
            if connection.is_open and connection.free_since >= oldest:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop, endpoint = asyncio.get_running_loop(), self._endpoint
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if endpoint.unix_path is not None:
                    _, connection = await loop.create_unix_connection(
                        self._new_connection, endpoint.unix_path
                    )
                else:
                    _, connection = await loop.create_connection(
                        self._new_connection, endpoint.host, endpoint.port, ssl=endpoint.tls
                    )
        except TimeoutError:
            seconds = self._connect_timeout_s
            raise ConnectFailed(f"there was no connection within {seconds:g} seconds") from None
        except OSError as error:
            raise ConnectFailed(_why(error)) from None
        if self._is_closed:
            connection.abort()
            raise ConnectFailed("its connection was closed here")
        self._all.add(connection)
        return connection

    def _new_connection(self) -> Connection:
        return Connection(self._idle_timeout_s, self._take_back, self._all.discard)

    def _take_back(self, connection: Connection) -> None:
        connection.free_since = time.monotonic()
        self._free.append(connection)
        if len(self._free) > MAX_IDLE_CONNECTIONS:
            self._free.pop(0).abort()


def _why(error: OSError) -> str:
    """The error as text. asyncio's messages contain the address, which clients must not see."""
    if isinstance(error, ConnectionRefusedError):
        return "it refused the connection"
    return (error.strerror or "it can't be reached").lower()
