"""Requests that cost whoever sends them little: for figures in which the machine is what is short.

As `ask` of `streams.py`, but an answer's bytes are only kept while there is load; `judge_all` looks
at them afterwards.
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


class _Reading(asyncio.Protocol):
    """One request, written when the connection stands; `done` when its answer has ended."""

    def __init__(self, raw: bytes, reply: Reply) -> None:
        self._raw = raw
        self._reply = reply
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
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
            self._reply.problem = problem
            self._reply.body = b"".join(self._pieces)
            self._reply.ended = time.monotonic()
            self.done.set_result(None)


async def send(server: HasAddress, raw: bytes, patience_s: float = PATIENCE_S) -> Reply:
    """On a connection of its own; read to its end, and not judged yet."""
    reply = Reply(time.monotonic())
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(patience_s):
            transport, reading = await asyncio.get_running_loop().create_connection(
                lambda: _Reading(raw, reply), *server.address
            )
            await reading.done
    except (OSError, TimeoutError) as error:
        reply.problem = f"{type(error).__name__}: {error}"
        reply.ended = time.monotonic()
    finally:
        if transport is not None:
            transport.close()
    return reply


async def post(
    server: HasAddress,
    body: Mapping[str, Any],
    path: str = COMPLETIONS,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    return await send(server, request_bytes(path, body, headers))


def judge_all(replies: Iterable[Reply]) -> None:
    """By the rules of well-formed answers; what breaks them has a `problem` from then on."""
    for reply in replies:
        if reply.problem is None:
            try:
                judge(reply)
            except (MalformedError, ValueError, KeyError) as error:
                reply.problem = f"{type(error).__name__}: {error}"
