"""Reports on routing. /v1/admin/routes shows the backends of each model, their state, and why
recent requests were sent to which backend. /v1/admin/shadow shows how answers of shadow backends
differ.
"""

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError
from engine.routing.report import describe_decisions, describe_routes
from engine.routing.router import Router
from engine.servers.access.auth import principal_of
from engine.servers.serving.services import Services, json_response


def add_admin_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/admin/routes")
    async def routes() -> Response:
        backend = services.backend.unwrapped
        if isinstance(backend, Router):
            return json_response(describe_routes(backend))
        return json_response({"models": only_backend(services), "decisions": []})

    @app.get("/v1/admin/routes/{request_id}")
    async def explain(request_id: str) -> Response:
        backend = services.backend.unwrapped
        found = describe_decisions(backend, request_id) if isinstance(backend, Router) else []
        if not found:
            raise NotFoundError(
                "There is no decision about this request: it is too old, was never routed, or this"
                " server has only one backend.",
                param="request_id",
            )
        return json_response({"request_id": request_id, "decisions": found})

    @app.get("/v1/admin/shadow")
    async def shadow() -> Response:
        backend = services.backend.unwrapped
        traffic = backend.shadow if isinstance(backend, Router) else None
        return json_response({"models": [], "recent": []} if traffic is None else traffic.report())


def who_is(request: Request) -> str:
    """Who sent the request, for the audit log: the name of the API key and the client's address. It
    never contains the key itself.
    """
    principal = principal_of(request)
    address = request.client.host if request.client else "this process"
    return f"{principal.key or principal.name or 'anyone'}@{address}"


def only_backend(services: Services) -> list[dict[str, Any]]:
    """The list of models and their backends for a server without a router, in the router's
    format.
    """
    health = services.backend.health()
    stats = services.backend.stats()
    hit_rate = None
    if stats is not None and stats.prefix_queries:
        hit_rate = round(stats.prefix_hits / stats.prefix_queries, 4)
    return [
        {
            "id": card.id,
            "aliases": [],
            "policy": None,
            "fallbacks": [],
            "shadow": None,
            "backends": [
                {
                    "name": card.backend,
                    "kind": card.backend,
                    "weight": 1.0,
                    "tags": [],
                    "state": "ready" if health.ready else "down",
                    "detail": health.detail,
                    "in_flight": services.lifecycle.num_admitted,
                    "max_concurrent": services.lifecycle.max_concurrent,
                    "requests": services.lifecycle.total_requests,
                    "failures": None,
                    "restarts": health.num_restarts,
                    "tokens_per_s": None,
                    "ttft_p50_s": None,
                    "prefix_hit_rate": hit_rate,
                }
            ],
        }
        for card in services.backend.models()
    ]
