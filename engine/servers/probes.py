"""The probes on a port of their own, answered by a thread with a loop of its own: whoever restarts
servers by their probes must not take a busy one for a dead one.

The server's loop leaves its state here a few times a second. The thread only reads it, so no object
of the server is touched by two threads, and a loop that no longer turns is seen by its silence.
"""

import asyncio
import socket
import threading
import time
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.servers.health import is_accepting, status_response
from engine.servers.protocol import http_server
from engine.servers.services import Services

NOTE_EVERY_S = 0.25
# Longer than any request keeps the loop busy, by far.
STUCK_AFTER_S = 30.0
CLOSE_TIMEOUT_S = 1


@dataclass(frozen=True, slots=True)
class Noted:
    at: float
    is_accepting: bool
    is_healthy: bool


class ProbeServer:
    """A component of the server."""

    def __init__(self, services: Services, sock: socket.socket) -> None:
        self._services = services
        self._sock = sock
        self._noted = Noted(time.monotonic(), is_accepting=False, is_healthy=False)
        self._noting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        routes = [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/health", self._health),
        ]
        self._uvicorn = http_server(Starlette(routes=routes), CLOSE_TIMEOUT_S)

    async def start(self) -> None:
        self._noting = asyncio.create_task(self._note())
        self._thread.start()

    async def stop(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
        self._uvicorn.should_exit = True
        await asyncio.to_thread(self._thread.join, 2 * CLOSE_TIMEOUT_S)

    async def _note(self) -> None:
        while True:
            self._noted = Noted(
                time.monotonic(),
                is_accepting(self._services),
                self._services.backend.health().ready,
            )
            await asyncio.sleep(NOTE_EVERY_S)

    def _run(self) -> None:
        asyncio.run(self._uvicorn.serve(sockets=[self._sock]))

    @property
    def _is_stuck(self) -> bool:
        return time.monotonic() - self._noted.at > STUCK_AFTER_S

    async def _livez(self, _: Request) -> Response:
        is_stuck = self._is_stuck
        return status_response("stuck" if is_stuck else "alive", ok=not is_stuck)

    async def _readyz(self, _: Request) -> Response:
        ok = self._noted.is_accepting and not self._is_stuck
        return status_response("ready" if ok else "not ready", ok=ok)

    async def _health(self, _: Request) -> Response:
        ok = self._noted.is_healthy and not self._is_stuck
        return status_response("healthy" if ok else "unhealthy", ok=ok)
