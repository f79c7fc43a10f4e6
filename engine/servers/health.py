"""Three probes and the metrics page.

`/livez`: the process answers. `/readyz`: it takes requests. `/health`: the backend's own view;
anyone may see whether it is healthy, the figures need the key. HEAD gives the status
alone. None of them waits for the engine; `probes.py` has them on a port of their own.
"""

import asyncio
import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.core.interfaces.backend import Health
from engine.servers.services import NOT_READY_RETRY_S, Services


def add_health_routes(app: FastAPI, services: Services) -> None:
    @app.head("/livez", include_in_schema=False)
    @app.get("/livez")
    async def livez() -> Response:
        return status_response("alive", ok=True)

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> Response:
        if services.lifecycle.is_draining:
            return status_response("draining", ok=False)
        is_ready = is_accepting(services)
        return status_response("ready" if is_ready else "not ready", ok=is_ready)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health(request: Request) -> Response:
        state = services.backend.health()
        status = "healthy" if state.ready else "unhealthy"
        if request.state.principal is None:
            return status_response(status, ok=state.ready)
        return status_response(status, ok=state.ready, figures=_figures(services, state))


def add_metrics_routes(app: FastAPI, services: Services) -> None:
    @app.get(services.settings.metrics.endpoint, response_class=PlainTextResponse)
    async def metrics() -> Response:
        services.watcher.observe()
        # Walks the process tree and formats some hundred series: milliseconds.
        content, content_type = await asyncio.to_thread(services.metrics.render)
        return Response(content, headers={"content-type": content_type})


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


def status_response(status: str, *, ok: bool, figures: dict[str, Any] | None = None) -> Response:
    headers = {"cache-control": "no-store"}
    if not ok:
        headers["retry-after"] = str(int(NOT_READY_RETRY_S))
    body = msgspec.json.encode({"status": status} | (figures or {}))
    return Response(body, 200 if ok else 503, headers, media_type="application/json")
