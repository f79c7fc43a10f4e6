"""vLLM's endpoints for probes, gateways and texts: /version, /load, /ping, /invocations, /score,
/v2/rerank, /pooling and /classify.
"""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import __version__
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import Embeddings, ModelCard
from engine.servers.http.request_log import record_of
from engine.servers.openai.embeddings import (
    Inputs,
    VectorsBody,
    embed,
    encoded_vector,
    usage_body,
)
from engine.servers.openai.format import new_envelope
from engine.servers.ops.probes import is_accepting
from engine.servers.serving.admission import Ticket
from engine.servers.serving.services import Services, json_response

# Maps our other name of an endpoint to vLLM's.
ALIASES = {"/score": "/v1/score", "/v2/rerank": "/v1/rerank"}
# /invocations finds the endpoint by a field that only its body has.
INVOKED = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "query": "/v1/rerank",
    "text_1": "/v1/score",
}
# Fields of the ASGI scope that belong to the route of the first request.
_OF_ROUTE = frozenset({"endpoint", "route", "path_params"})


class PoolingBody(VectorsBody):
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    task: Literal["embed"] | None = None


class ClassifyBody(VectorsBody):
    input: Inputs


class InvocationBody(BaseModel):
    """The body of any endpoint in `INVOKED`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, defer_build=True)


class Forwarded(Response):
    """Answers a request by another endpoint of this server. `body` replaces the request's body if
    that was read already.
    """

    def __init__(self, app: ASGIApp, path: str, body: bytes | None = None) -> None:
        super().__init__()
        self._app = app
        self._path = path
        self._content = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {name: value for name, value in scope.items() if name not in _OF_ROUTE}
        inner |= {"path": self._path, "raw_path": self._path.encode()}
        unsent = self._content

        async def receive_again() -> Message:
            nonlocal unsent
            if unsent is None:
                return await receive()
            body, unsent = unsent, None
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(inner, receive_again, send)


def add_vllm_routes(app: FastAPI, services: Services) -> None:
    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": services.lifecycle.num_admitted})

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        """SageMaker's probe."""
        return Response(status_code=200 if is_accepting(services) else 503)

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        """SageMaker's endpoint: the body decides which of ours answers."""
        body = await services.read_as(request, dict)
        path = next((INVOKED[name] for name in INVOKED if name in body), None)
        if path is None:
            names = ", ".join(INVOKED)
            raise InvalidRequestError(f"The body should have one of the fields {names}.")
        return Forwarded(app.router, path, msgspec.json.encode(body))

    for path, target in ALIASES.items():
        _add_alias(app, path, target)
    _add_text_routes(app, services)


def _add_alias(app: FastAPI, path: str, target: str) -> None:
    @app.post(path)
    async def alias() -> Response:
        return Forwarded(app.router, target)


def _add_text_routes(app: FastAPI, services: Services) -> None:
    @app.post("/pooling")
    async def pooling(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read(request, PoolingBody)
        card = services.choose_model(request, body.model)
        services.require(card, "embeddings", "model", "gives no vectors")
        made = await embed(services, request, ticket, card, body, "pool", body.input)
        completion_id = record_of(request.scope).completion_id or ""
        answer = await asyncio.to_thread(_pooled, card, completion_id, made, body)
        return json_response(answer)

    @app.post("/classify")
    async def classify(request: Request) -> Response:
        body = await services.read(request, ClassifyBody)
        card = services.choose_model(request, body.model)
        raise InvalidRequestError(
            f"{card.id} does not sort texts into classes; this server has no models that do. Use"
            " /v1/rerank or /v1/score to compare texts.",
            param="model",
        )


def _pooled(
    card: ModelCard, completion_id: str, made: Embeddings, body: PoolingBody
) -> dict[str, Any]:
    data = [
        {"index": index, "object": "pooling", "data": encoded_vector(row, body.encoding_format)}
        for index, row in enumerate(made.vectors)
    ]
    fields = new_envelope(completion_id, card).fields("list")
    return fields | {"data": data, "usage": usage_body(made)}
