"""Cheap clients, for figures in which CPU time is scarce.

Like `ask` of `streams.py`, but under load the bytes of an answer are only collected; `judge_all`
parses them afterwards.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httptools

from tests.scoreboard.streams import (
    COMPLETIONS,
    PATIENCE_S,
    HasAddress,
    MalformedError,
    Reply,
    judge,
    request_bytes,
)

MAX_IDLE_S = 5.0  # well below a server's timeout for idle connections


class _Connection(asyncio.Protocol):
    """One request at a time; `done` is set when its answer has ended."""

    def __init__(self) -> None:
        self.used_at = 0.0
        self.done: asyncio.Future[None]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, raw: bytes, reply: Reply) -> None:
        self._reply = reply
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(raw)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport.close()
        self._end(f"the connection ended early: {exc or 'closed'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._reply.times.append(time.monotonic())

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, problem: str | None) -> None:
        if not self.done.done():
            self.used_at = time.monotonic()
            self._reply.problem = problem
            self._reply.body = b"".join(self._pieces)
            self._reply.ended = self.used_at
            self.done.set_result(None)


async def send(server: HasAddress, raw: bytes, patience_s: float = PATIENCE_S) -> Reply:
    """Send a request on a new connection and read the answer to its end, without checking it."""
    connection: _Connection | None = None
    reply = Reply(time.monotonic())
    try:
        async with asyncio.timeout(patience_s):
            connection = await _connect(server)
            connection.begin(raw, reply)
            await connection.done
    except (OSError, TimeoutError) as error:
        _give_up(reply, error)
    finally:
        if connection is not None:
            connection.transport.close()
    return reply


class Pool:
    """Connections that are kept alive for later requests, as client libraries do. It has only
    `post`, without a timeout.
    """

    def __init__(self, server: HasAddress) -> None:
        self._server = server
        self._idle: list[_Connection] = []

    async def post(self, body: Mapping[str, Any]) -> Reply:
        reply = Reply(time.monotonic())
        try:
            connection = self._kept() or await _connect(self._server)
            connection.begin(request_bytes(COMPLETIONS, body, {"Connection": "keep-alive"}), reply)
            await connection.done
        except OSError as error:
            _give_up(reply, error)
        else:
            self._idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            is_fresh = time.monotonic() - connection.used_at < MAX_IDLE_S
            if is_fresh and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None


async def _connect(server: HasAddress) -> _Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(_Connection, *server.address)
    return connection


def _give_up(reply: Reply, error: Exception) -> None:
    reply.problem = f"{type(error).__name__}: {error}"
    reply.ended = time.monotonic()


async def post(
    server: HasAddress,
    body: Mapping[str, Any],
    path: str = COMPLETIONS,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    return await send(server, request_bytes(path, body, headers))


def judge_all(replies: Iterable[Reply]) -> None:
    """Check that the answers are well-formed; a bad one gets a `problem`."""
    for reply in replies:
        if reply.problem is None:
            try:
                judge(reply)
            except (MalformedError, ValueError, KeyError) as error:
                reply.problem = f"{type(error).__name__}: {error}"
