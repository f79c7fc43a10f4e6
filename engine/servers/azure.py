"""Azure's paths of OpenAI's API: /openai/deployments/{deployment}/... A deployment is a model's id.

Requests are forwarded to the routes of OpenAI's API. `api-version` in the query is not read,
because all versions have the same bodies.
"""

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.servers.serving.services import DEPLOYMENT, Services

OPERATIONS = ("chat/completions", "completions", "embeddings")


def path_of(operation: str, deployment: str = "{deployment}") -> str:
    return f"/openai/deployments/{deployment}/{operation}"


class Forwarded(Response):
    """The response of another route to the same request. `scope` has what differs from it."""

    def __init__(self, router: ASGIApp, scope: Scope) -> None:
        super().__init__()
        self._router = router
        self._scope = scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._router({**scope, **self._scope}, receive, send)


def add_azure_routes(app: FastAPI, services: Services) -> None:
    for operation in OPERATIONS:
        _add_route(app, operation)


def _add_route(app: FastAPI, operation: str) -> None:
    path = f"/v1/{operation}"

    @app.post(path_of(operation, "{deployment:path}"), name=f"azure {operation}")
    async def forward(request: Request, deployment: str) -> Response:
        to = {"path": path, "raw_path": path.encode(), DEPLOYMENT: deployment}
        return Forwarded(app.router, to)
