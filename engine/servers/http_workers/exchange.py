"""A request that arrived at an HTTP worker, as the main process handles it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Message

from engine.servers.http.protocol import with_direct_body
from engine.servers.http_workers.messages import Ended, Header, Opened, Part, Start, Want


class WorkerEnd(Protocol):
    """The HTTP worker that holds the connection."""

    @property
    def is_full(self) -> bool: ...

    def send(self, message: msgspec.Struct) -> None: ...

    def write(self, number: int, body: bytes) -> None: ...


class Exchange:
    """One request and its answer. `receive` and `send` are those of ASGI, and `write` makes it a
    `DirectBody`.
    """

    def __init__(self, opened: Opened, worker: WorkerEnd) -> None:
        self._number = opened.number
        self._worker = worker
        self._parts: deque[Part] = deque()
        self._has_whole_body = opened.body is not None
        if opened.body is not None:
            self._parts.append(Part(opened.number, opened.body, True))
        self._has_asked = False  # whether the worker was asked for the next part
        self._is_gone = False
        self._is_complete = False
        self._is_blocked = False
        self._waiting: set[asyncio.Future[None]] = set()
        self.scope = with_direct_body(_scope(opened), self)

    async def receive(self) -> Message:
        while not (self._parts or self._is_gone or self._is_complete):
            if not (self._has_whole_body or self._has_asked):
                self._has_asked = True
                self._worker.send(Want(self._number))
            await self._change()
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.popleft()
        return {"type": "http.request", "body": part.body, "more_body": not part.is_last}

    async def send(self, message: Message) -> None:
        while (self._is_blocked or self._worker.is_full) and not self._is_gone:
            await self._change()
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            headers: Sequence[Header] = message.get("headers", ())
            self._worker.send(Start(self._number, message["status"], list(headers)))
            return
        self._worker.write(self._number, bytes(message.get("body", b"")))
        if not message.get("more_body", False):
            self._is_complete = True
            self._worker.send(Ended(self._number, True))
            self.wake()

    def write(self, body: bytes) -> bool:
        if self._is_blocked or self._is_gone or self._worker.is_full:
            return False
        self._worker.write(self._number, body)
        return True

    def end(self) -> None:
        """The application has returned."""
        del self.scope["extensions"]  # it refers to this object
        if not self._is_complete:
            self._worker.send(Ended(self._number, False))

    def add(self, part: Part) -> None:
        self._has_asked = False
        self._has_whole_body = part.is_last
        self._parts.append(part)
        self.wake()

    def block(self, is_blocked: bool) -> None:
        self._is_blocked = is_blocked
        self.wake()

    def leave(self) -> None:
        """The client has disconnected."""
        self._is_gone = True
        self.wake()

    def wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)


def _scope(opened: Opened) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": opened.http_version,
        "method": opened.method,
        "scheme": opened.scheme,
        "path": opened.path,
        "raw_path": opened.raw_path,
        "root_path": "",
        "query_string": opened.query_string,
        "headers": opened.headers,
        "client": opened.client,
        "server": opened.server,
        "state": {},
    }
