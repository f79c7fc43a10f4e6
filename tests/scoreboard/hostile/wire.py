"""Sends hostile requests over sockets, and reads what the server says to them."""

import asyncio
import contextlib
import random
import socket
import time

import httptools

from tests.scoreboard.hostile.cases import Answer, Hostile

# Streams that do not end by themselves; a client leaves them.
ENDLESS = ("/v1/admin/live", "/events", "/stream")
LEAVE_ENDLESS_S = 0.3
LONGEST_LINGER_S = 0.3
RESET = b"\1\0\0\0\0\0\0\0"  # linger for 0 s: closing sends RST
MAX_READ = 2**26


class _Reader:
    """Collects the parts of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pieces: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"retry-after":
                self._answer.retry_after = value.decode("latin-1")
            case b"content-type":
                self._answer.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if len(self._pieces) < MAX_READ:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._answer.body = b"".join(self._pieces)
        self._answer.is_whole = self._answer.status != 100


async def send(address: tuple[str, int], hostile: Hostile, key: str, bound_s: float) -> Answer:
    """Send a request and read the answer to its end. Raises `TimeoutError` after `bound_s`."""
    answer, began = Answer(), time.monotonic()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(bound_s):
            reader, writer = await asyncio.open_connection(*address, limit=2**20)
            with contextlib.suppress(ConnectionError):  # it may answer before it has read all
                await _write(writer, hostile, key)
            await _read(reader, writer, hostile, answer)
    except ConnectionError:
        pass  # closed by the server, which `is_whole` tells
    finally:
        answer.seconds = time.monotonic() - began
        if writer is not None:
            writer.close()
    return answer


async def _write(writer: asyncio.StreamWriter, hostile: Hostile, key: str) -> None:
    own = (("authorization", f"Bearer {key}"), ("connection", "close"))
    length = (("content-length", str(len(hostile.content))),)
    rng = random.Random(hostile.seed)
    match hostile.manner:
        case "chunked":
            writer.write(hostile.head(*own, ("transfer-encoding", "chunked")))
            size = max(1, len(hostile.content) // rng.choice((1, 3, 50)))
            for start in range(0, len(hostile.content), size):
                piece = hostile.content[start : start + size]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        case "one byte at a time":
            whole = hostile.head(*own, *length) + hostile.content
            for start in range(min(len(whole), 200)):
                writer.write(whole[start : start + 1])
                await asyncio.sleep(0)
            writer.write(whole[200:])
        case "cut":
            whole = hostile.head(*own, *length) + hostile.content
            writer.write(whole[: rng.randrange(len(whole))])
            await writer.drain()
            if rng.random() < 0.5 and writer.can_write_eof():
                writer.write_eof()
        case "pipelined":
            whole = hostile.head(own[0], *length) + hostile.content
            writer.write(whole * rng.choice((2, 5)))
        case _:
            writer.write(hostile.head(*own, *length) + hostile.content)
    await writer.drain()


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hostile: Hostile, answer: Answer
) -> None:
    patience_s = _patience(hostile)
    if patience_s is None:
        await _read_all(reader, answer)
        return
    try:
        async with asyncio.timeout(patience_s):
            await _read_all(reader, answer)
    except TimeoutError:
        answer.has_left = True
        if random.Random(hostile.seed).random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


def _patience(hostile: Hostile) -> float | None:
    """When the client leaves; None: it waits for the whole answer."""
    rng = random.Random(f"{hostile.seed}/leaving")
    if hostile.manner in ("leave", "cut", "headers", "pipelined"):
        return rng.uniform(0, LONGEST_LINGER_S)
    if hostile.target.partition("?")[0].endswith(ENDLESS):
        return LEAVE_ENDLESS_S
    return None


async def _read_all(reader: asyncio.StreamReader, answer: Answer) -> None:
    collector = _Reader(answer)
    while not answer.is_whole:
        data = await reader.read(2**18)
        if not data:
            return
        with contextlib.suppress(httptools.HttpParserError):
            collector.parser.feed_data(data)
