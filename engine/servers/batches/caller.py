"""Sends the lines of a batch to the server's own application, in the same process.

The tenant of such a request is an object in the ASGI scope, which clients can't set.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from engine.servers.access.auth import Principal, act_for
from engine.servers.http.in_process import call, scope_of

# HTTP status of a request that its caller aborted.
ABANDONED = 499


@dataclass(frozen=True, slots=True)
class LineAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Caller:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(
        self, path: str, body: bytes, principal: Principal, gone: asyncio.Event
    ) -> LineAnswer:
        """Post a JSON body to the application and return its answer. When the event `gone` is set,
        the application sees a client that disconnects.
        """
        status, headers = ABANDONED, Headers()
        parts: list[bytes] = []

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            else:
                parts.append(message.get("body", b""))

        scope = scope_of("POST", path, len(body))
        act_for(scope, principal)
        await call(self._app, scope, body, gone, send)
        return LineAnswer(status, headers, b"".join(parts))
