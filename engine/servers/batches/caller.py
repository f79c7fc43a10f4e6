"""Sends requests from the server to its own application, in the same process.

So the lines of a batch are validated, admitted, measured and logged like requests of clients. The
tenant of such a request is an object in the ASGI scope, which clients can't set.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from engine.servers.access.auth import Principal, act_for

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
        is_sent = False

        async def receive() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
            else:
                parts.append(message.get("body", b""))

        await self._app(_scope(path, len(body), principal), receive, send)
        return LineAnswer(status, headers, b"".join(parts))


def _scope(path: str, num_bytes: int, principal: Principal) -> dict[str, Any]:
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
        ],
        "server": ("localhost", None),
        "client": None,
        "state": {},
    }
    act_for(scope, principal)
    return scope
