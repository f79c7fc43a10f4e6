"""GET /v1/admin/plugins: which plugins take part in requests and how they do.

POST /v1/admin/plugins/{name}/enable lets one take part again that was left out for its failures.
"""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError
from engine.plugins.backend import PluggedBackend, describe
from engine.servers.admin import who_is
from engine.servers.admin_control import EmptyBody
from engine.servers.live import audit_of
from engine.servers.services import Services, json_response


def add_plugins_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.get("/v1/admin/plugins")
    async def plugins() -> Response:
        backend = services.backend
        hosts = backend.hosts if isinstance(backend, PluggedBackend) else []
        return json_response({"plugins": [describe(host) for host in hosts]})

    @app.post("/v1/admin/plugins/{name}/enable")
    async def enable(name: str, request: Request) -> Response:
        await services.read(request, EmptyBody)
        backend = services.backend
        host = backend.find(name) if isinstance(backend, PluggedBackend) else None
        if host is None:
            raise NotFoundError("There is no such plugin in use here.", param="name")
        async with audit.change(who_is(request), "plugins.enable", host.name):
            host.enable()
        return json_response(describe(host))
