"""GET /v1/models and its deprecated alias /v1/engines. Model ids may contain slashes, so routes use
`:path`.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.interfaces.backend import Health, ModelCard
from engine.servers.access.auth import principal_of
from engine.servers.schema.body import SamplingBody
from engine.servers.serving.services import Services, json_response

_DEPRECATED = {"deprecation": "true", "link": '</v1/models>; rel="successor-version"'}


def model_body(card: ModelCard, health: Health) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root or card.id,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
        "context_length": card.max_model_len,
        "meta": {
            "n_ctx_train": card.trained_context or card.max_model_len,
            "n_params": card.num_params,
            "size": card.size_bytes,
        },
        "state": _state(health),
        "loaded": health.ready and health.loaded,
        "capabilities": card.capabilities,
        "backend": card.backend,
        "quantization": card.quantization,
        "chat_sampling": card.chat_sampling,
    }


def _state(health: Health) -> str:
    if not health.loaded:
        return "unloaded"  # the first request loads the model
    return "loaded" if health.ready else "loading"


def add_models_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        return json_response(_all(services, request))


def add_model_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(request: Request, model_id: str) -> Response:
        return json_response(_one(services, request, model_id))

    @app.get("/v1/engines")
    async def list_engines(request: Request) -> Response:
        return json_response(_all(services, request), _DEPRECATED)

    @app.get("/v1/engines/{model_id:path}")
    async def retrieve_engine(request: Request, model_id: str) -> Response:
        return json_response(_one(services, request, model_id), _DEPRECATED)


def _all(services: Services, request: Request) -> dict[str, Any]:
    principal = principal_of(request)
    cards = [_described(services, principal.view(it)) for it in services.models_for(principal)]
    return {"object": "list", "data": cards}


def _one(services: Services, request: Request, model_id: str) -> dict[str, Any]:
    principal = principal_of(request)
    card = principal.view(services.find_model(model_id, principal))
    return _described(services, card) | {"defaults": _defaults(card)}


def _defaults(card: ModelCard) -> dict[str, Any]:
    """The sampling parameters of a chat that sets none, with those of the model's preset."""
    params = msgspec.structs.asdict(SamplingBody().sampling(card, None, None))
    return {name: value for name, value in params.items() if name in SamplingBody.model_fields}


def _described(services: Services, card: ModelCard) -> dict[str, Any]:
    health = services.backend.model_health(card.id)
    return model_body(services.with_preset(card), health)
