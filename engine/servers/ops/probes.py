"""Health probes: `/livez`, `/readyz` and `/health` (or `/healthz`), and the metrics route.

`ProbeServer` serves the probes on a separate port, in a thread with its own event loop. So probes
are answered even if the server is busy, and an orchestrator does not restart it. The main event
loop writes the server's state a few times a second, and the thread only reads this state. The
threads share no other objects. If the main event loop is stuck, its updates stop, and the probes
fail.
"""

import asyncio
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from engine.core.interfaces.backend import Health
from engine.servers.http.protocol import http_server
from engine.servers.serving.services import NOT_READY_RETRY_S, Services


def add_health_routes(app: FastAPI, services: Services) -> None:
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> Response:
        return live_response(services.backend.health().alive)

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> Response:
        if services.lifecycle.is_draining:
            return status_response("draining", ok=False)
        is_ready = is_accepting(services)
        return status_response("ready" if is_ready else "not ready", ok=is_ready)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health(request: Request) -> Response:
        state = services.backend.health()
        status = "healthy" if state.ready else "unhealthy"
        principal = request.state.principal
        # The figures are of all models together, and the detail may name them.
        if principal is None or principal.models is not None:
            return status_response(status, ok=state.ready)
        return status_response(status, ok=state.ready, figures=_figures(services, state))


def add_metrics_routes(app: FastAPI, services: Services) -> None:
    @app.get(services.settings.metrics.endpoint, response_class=PlainTextResponse)
    async def metrics() -> Response:
        services.watcher.observe()
        # This runs in a thread, because reading the process tree and formatting hundreds of series
        # takes milliseconds.
        content, content_type = await asyncio.to_thread(services.metrics.render)
        started = time.time() - (time.monotonic() - services.lifecycle.started)
        headers = {"content-type": content_type}
        headers["process-start-time-unix"] = str(int(started))  # llama.cpp's header
        return Response(content, headers=headers)


def _figures(services: Services, state: Health) -> dict[str, Any]:
    stats = services.backend.stats()
    queries = stats.prefix_queries if stats is not None else 0
    hits = stats.prefix_hits if stats is not None else 0
    return {
        "detail": state.detail,
        "uptime_seconds": round(time.monotonic() - services.lifecycle.started, 3),
        "total_requests": services.lifecycle.total_requests,
        "cache_hit_rate": round(hits / queries, 4) if queries else 0.0,
        "memory_usage_mb": round(services.backend.memory_bytes() / 2**20, 1),
        "step_age_seconds": state.step_age_s,
    }


def is_accepting(services: Services) -> bool:
    return not services.lifecycle.is_draining and services.backend.health().ready


def live_response(is_alive: bool) -> Response:
    return status_response("alive" if is_alive else "the engine can't be restarted", ok=is_alive)


def status_response(status: str, *, ok: bool, figures: dict[str, Any] | None = None) -> Response:
    headers = {"cache-control": "no-store"}
    if not ok:
        headers["retry-after"] = str(int(NOT_READY_RETRY_S))
    body = msgspec.json.encode({"status": status} | (figures or {}))
    return Response(body, 200 if ok else 503, headers, media_type="application/json")


NOTE_EVERY_S = 0.25
# If the main event loop has not updated the state for this many seconds, it is stuck. No request
# blocks the event loop for nearly that long.
STUCK_AFTER_S = 30.0
CLOSE_TIMEOUT_S = 1


@dataclass(frozen=True, slots=True)
class Noted:
    """The server's state at the time `at` (`time.monotonic()`), for the probe thread."""

    at: float
    is_accepting: bool
    is_healthy: bool
    is_alive: bool


class ProbeServer:
    """A background component of the server that answers probes in its own thread."""

    def __init__(self, services: Services, sock: socket.socket) -> None:
        self._services = services
        self._sock = sock
        self._noted = Noted(time.monotonic(), is_accepting=False, is_healthy=False, is_alive=True)
        self._noting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        routes = [
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/health", self._health),
            Route("/healthz", self._health),
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
            health = self._services.backend.health()
            self._noted = Noted(
                time.monotonic(), is_accepting(self._services), health.ready, health.alive
            )
            await asyncio.sleep(NOTE_EVERY_S)

    def _run(self) -> None:
        asyncio.run(self._uvicorn.serve(sockets=[self._sock]))

    @property
    def _is_stuck(self) -> bool:
        return time.monotonic() - self._noted.at > STUCK_AFTER_S

    async def _livez(self, _: Request) -> Response:
        if self._is_stuck:
            return status_response("stuck", ok=False)
        return live_response(self._noted.is_alive)

    async def _readyz(self, _: Request) -> Response:
        ok = self._noted.is_accepting and not self._is_stuck
        return status_response("ready" if ok else "not ready", ok=ok)

    async def _health(self, _: Request) -> Response:
        ok = self._noted.is_healthy and not self._is_stuck
        return status_response("healthy" if ok else "unhealthy", ok=ok)
