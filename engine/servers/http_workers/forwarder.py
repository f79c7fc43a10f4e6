"""The application of an HTTP worker. It forwards each request to the main process, and writes the
answer that comes back.
"""

import asyncio
import itertools
from collections import deque

from starlette.types import Message, Receive, Scope, Send

from engine.ipc.connection import Connection
from engine.servers.http.protocol import CycleBody, direct_body
from engine.servers.http_workers.messages import (
    Blocked,
    Chunks,
    Drained,
    Ended,
    Gone,
    Opened,
    Part,
    Start,
    ToWorker,
    Want,
)


class Forwarder:
    """An ASGI application over the main process at the other end of `pipe`."""

    def __init__(self, pipe: Connection[ToWorker]) -> None:
        self._pipe = pipe
        self._numbers = itertools.count(1)
        self._requests: dict[int, Forwarded] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = next(self._numbers)
        forwarded = self._requests[number] = Forwarded(number, self._pipe, direct_body(scope))
        try:
            await forwarded.run(scope, receive, send)
        finally:
            del self._requests[number]

    def on_message(self, message: ToWorker) -> None:
        if isinstance(message, Chunks):
            get = self._requests.get
            for number, body in message.chunks:
                # A request whose connection is lost has ended here already.
                if (forwarded := get(number)) is not None:
                    forwarded.write(body)
        elif isinstance(message, Start | Ended | Want):
            forwarded = self._requests.get(message.number)
            if forwarded is not None:
                forwarded.take(message)


class Forwarded:
    """One request. What the main process sends is written at once, or queued for `run`."""

    def __init__(self, number: int, pipe: Connection[ToWorker], body: CycleBody) -> None:
        self._number = number
        self._pipe = pipe
        self._body = body
        self._queue: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._wanted = asyncio.Event()
        self._is_sending = False
        self._is_over = False
        self._answering: asyncio.Task[None] | None = None
        self._is_blocked = False

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        # If the whole body has arrived with the head, it is sent with the head.
        is_whole = self._body.has_whole_request
        first = await receive() if is_whole else {}
        if first.get("type") == "http.disconnect":
            return
        self._pipe.send(_opened(self._number, scope, first.get("body")))
        reading = asyncio.create_task(self._read(receive, is_whole))
        self._answering = asyncio.create_task(self._answer(send))
        try:
            await self._answering
        except asyncio.CancelledError:
            if not self._is_over:
                raise
        finally:
            reading.cancel()

    async def _answer(self, send: Send) -> None:
        while self._queue or not self._is_over:
            while self._queue:
                self._is_sending = True
                await send(self._queue.popleft())
                self._is_sending = False
            if self._is_blocked:
                self._is_blocked = False
                self._pipe.send(Drained(self._number))
            if not self._is_over:
                self._wake.clear()
                await self._wake.wait()

    async def _read(self, receive: Receive, is_whole: bool) -> None:
        """Forward the rest of the body as the application asks for it, then the client's end."""
        while True:
            if not is_whole:
                await self._wanted.wait()
                self._wanted.clear()
            message = await receive()
            if message["type"] != "http.request":
                self._pipe.send(Gone(self._number))
                return
            is_whole = not message["more_body"]
            self._pipe.send(Part(self._number, message["body"], is_whole))

    def write(self, body: bytes) -> None:
        """Write a part of the answer."""
        if self._queue or self._is_sending or not self._body.write(body):
            self._put({"type": "http.response.body", "body": body, "more_body": True})

    def take(self, message: Start | Ended | Want) -> None:
        if isinstance(message, Want):
            self._wanted.set()
        elif isinstance(message, Start):
            self._put(
                {
                    "type": "http.response.start",
                    "status": message.status,
                    "headers": message.headers,
                }
            )
        else:
            self._is_over = True
            if message.is_whole:
                self._queue.append({"type": "http.response.body", "body": b"", "more_body": False})
            elif self._is_sending and self._answering is not None:
                self._answering.cancel()  # the client was given up, because it does not read
            self._wake.set()

    def _put(self, message: Message) -> None:
        self._queue.append(message)
        self._wake.set()
        if self._body.is_paused and not self._is_blocked:
            self._is_blocked = True
            self._pipe.send(Blocked(self._number))


def _opened(number: int, scope: Scope, body: bytes | None) -> Opened:
    return Opened(
        number,
        body,
        scope["method"],
        scope["scheme"],
        scope["http_version"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        list(scope["headers"]),
        scope["client"],
        scope["server"],
    )
