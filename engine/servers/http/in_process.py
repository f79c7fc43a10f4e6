"""Requests from the server to its own application, in the same process.

They pass all layers of the application. So they are validated, admitted, measured and logged like
requests of HTTP clients.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message

Header = tuple[bytes, bytes]


def scope_of(
    method: str, path: str, num_bytes: int, headers: Iterable[Header] = (), client: str = ""
) -> dict[str, Any]:
    """The ASGI scope of a request with a JSON body of `num_bytes`. `client` is the address of the
    machine that the request came from, if it came from one.
    """
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
            *headers,
        ],
        "server": ("localhost", None),
        "client": (client, 0) if client else None,
        "state": {},
    }


async def call(
    app: ASGIApp,
    scope: dict[str, Any],
    body: bytes,
    gone: asyncio.Event,
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Send a request to `app`. When the event `gone` is set, the application sees a client that
    disconnects.
    """
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    await app(scope, receive, send)
