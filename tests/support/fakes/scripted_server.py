"""An HTTP server whose every byte the test decides, to send what no real server would.

It runs on the test's own event loop, on TCP or on a Unix socket, and records its requests.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MODEL = "scripted"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 2048}]}


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """A response whose pieces are written one by one. `hangs` waits after them; otherwise the
    connection is kept open.
    """

    pieces: Sequence[bytes]
    hangs: bool = False
    closes: bool = False
    pause_s: float = 0.0  # between pieces


Script = Callable[[Asked], Reply]


def whole(body: Any, status: int = 200, **headers: str) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = {"content-type": "application/json", "content-length": str(len(content))}
    return Reply(
        [_head(status, head | {k.replace("_", "-"): v for k, v in headers.items()}), content]
    )


def stream(*events: Any, **how: Any) -> Reply:
    """A response with one piece per event: bytes as they are, a string as data, others as JSON."""
    pieces = [_chunk(event_bytes(event)) for event in events]
    head = _head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
    ending = [] if how.get("hangs") or how.get("closes") else [b"0\r\n\r\n"]
    return Reply([head, *pieces, *ending], **how)


def event_bytes(event: Any) -> bytes:
    if isinstance(event, bytes):
        return event
    return b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """One chunk of a streamed chat."""
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, completion: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    return {"choices": [], "usage": counts}


HELLO = (delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo"))
ENDING = (delta(finish="stop"), usage(3, 2), "[DONE]")


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
    return "\r\n".join(lines).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class ScriptedServer:
    """Answers every POST with `script`, lists one model, and serves other paths from `paths`."""

    script: Script
    url: str = ""
    paths: dict[str, Script] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    # Set when a client disconnected before its answer was complete.
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._one(reader, writer):
                pass
        self.writers.discard(writer)
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(method, path, headers, json.loads(raw) if raw else None)
        self.asked.append(asked)
        reply = self._reply(asked)
        is_cut = False
        try:
            for piece in reply.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(reply.pause_s)
            is_cut = reply.hangs and not await reader.read(1)
        except ConnectionError:
            is_cut = True
        if is_cut:
            self.cut.set()
        return not (is_cut or reply.hangs or reply.closes)

    def _reply(self, asked: Asked) -> Reply:
        if asked.path in self.paths:
            return self.paths[asked.path](asked)
        if asked.path.endswith("/models"):
            return whole(MODELS)
        if asked.method == "GET":
            return whole({"error": "nothing here"}, 404)
        return self.script(asked)

    @property
    def posts(self) -> list[Asked]:
        return [each for each in self.asked if each.method == "POST"]

    def drop_all(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


@asynccontextmanager
async def scripted_server(
    script: Script | Reply, unix_path: str | None = None, port: int = 0
) -> AsyncIterator[ScriptedServer]:
    made = ScriptedServer((lambda asked: script) if isinstance(script, Reply) else script)
    if unix_path is not None:
        server = await asyncio.start_unix_server(made.handle, unix_path)
        made.url = f"unix://{unix_path}"
    else:
        server = await asyncio.start_server(made.handle, "127.0.0.1", port)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        made.drop_all()
        server.close()
        await server.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
