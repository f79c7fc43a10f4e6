"""One gRPC call: who makes it, what it sends, and its requests to the application."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message

from engine.core.errors import RequestTimeoutError
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.http.errors import problem
from engine.servers.http.in_process import Header, call, scope_of
from engine.servers.http.limits import BODY_TIMEOUT_S, INLINE_BYTES
from engine.servers.kserve.grpc_messages import CLASSES

# Metadata that is passed on as HTTP headers. Only browsers send an origin, and they are refused as
# by HTTP.
PASSED_ON = frozenset(
    {"authorization", "x-api-key", "api-key", "x-request-id", "x-session-id", "origin"}
)
# Messages of one request that wait for a slow client. Then the request waits too.
MAX_WAITING = 64
# Max bytes of an error's text. In a header, each may take three, and clients take 8 KiB of headers.
MAX_TEXT_BYTES = 2_000


class CallFailed(Exception):
    """The application refused a request. `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Call:
    """Requests to the application for one gRPC call. They end when the call does."""

    def __init__(self, app: ASGIApp, context: Any) -> None:
        self._app = app
        self._context = context
        self.headers: list[Header] = [
            (key.encode(), value if isinstance(value, bytes) else value.encode())
            for key, value in context.invocation_metadata() or ()
            if key in PASSED_ON
        ]
        # As "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711"; failed keys are counted by address.
        self.client = unquote(context.peer().partition(":")[2].rpartition(":")[0]).strip("[]")
        self._gone = asyncio.Event()

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *_: object) -> None:
        self._gone.set()

    async def read(self) -> bytes | None:
        """The next message, which is not decoded yet. None if the client sends no more."""
        raw = await self._context.read()
        return None if raw is grpc.aio.EOF else raw

    async def read_only(self, name: str) -> Any:
        """The only message of a call."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await self.read()
        except TimeoutError:
            raise RequestTimeoutError(
                f"The message did not arrive within {BODY_TIMEOUT_S:.0f} seconds."
            ) from None
        if raw is None:
            raise problem("message", "is missing")
        return await decoded_message(name, raw)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._whole("GET", path, b"")

    async def post(self, path: str, body: Any) -> Any:
        status, made = await self._whole("POST", path, msgspec.json.encode(body))
        if status != 200:
            raise CallFailed(status, message_of(made))
        return made

    async def _whole(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        status, parts = 499, []

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = scope_of(method, path, len(body), self.headers, self.client)
        await call(self._app, scope, body, self._gone, send)
        return status, _decoded(b"".join(parts))

    async def stream(self, path: str, words: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream of `generate_stream`."""
        body = msgspec.json.encode(words)
        scope = scope_of("POST", path, len(body), self.headers, self.client)
        messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_WAITING)

        async def answer() -> None:
            await call(self._app, scope, body, self._gone, messages.put)
            await messages.put(None)

        calling = asyncio.create_task(answer())
        status, buffered = 499, b""
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                *events, buffered = (buffered + message.get("body", b"")).split(b"\n\n")
                if status == 200:
                    for event in events:
                        if event.startswith(b"data: "):
                            yield _checked(msgspec.json.decode(event[len(b"data: ") :]))
                elif not message.get("more_body"):
                    raise CallFailed(status, message_of(_decoded(buffered)))
        finally:
            calling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await calling


async def decoded_message(name: str, raw: bytes) -> Any:
    """Decode a message. A long one is decoded after other long texts, in their thread: its objects
    take many times the memory of its bytes.
    """
    decode = CLASSES[name].FromString
    try:
        if len(raw) <= INLINE_BYTES:
            return decode(raw)
        return await after_other_long_texts(decode, raw)
    except DecodeError:
        raise problem("message", f"is no {name}") from None


def shown(text: str) -> str:
    """The text of an error. It may quote the client, so it is cut and has no control characters."""
    cut = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    return "".join(each if each.isprintable() else "?" for each in cut)


def message_of(made: Any) -> str:
    error = made.get("error", "") if isinstance(made, dict) else ""
    return str(error) or "The request failed."


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise CallFailed(500, event["error"])
    return event


def _decoded(raw: bytes) -> Any:
    return msgspec.json.decode(raw) if raw else {}
