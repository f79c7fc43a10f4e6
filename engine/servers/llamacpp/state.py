"""GET /props, /slots and /lora-adapters: the state of the server in llama.cpp's form.

A slot stands for one of the sequences that a step can compute. The scheduler assigns sequences to
slots, and cached prefixes belong to no slot. So an idle slot has no state.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine import __version__
from engine.core.errors import InvalidRequestError, UnavailableError
from engine.core.interfaces.backend import ModelCard, TokenizerInfo
from engine.servers.access.auth import principal_of
from engine.servers.http.listing import Query, parse_query
from engine.servers.llamacpp.format import settings_body
from engine.servers.llamacpp.schema import NativeSampling
from engine.servers.schema import fields
from engine.servers.serving.event_pump import EventPump
from engine.servers.serving.services import Services, json_bytes, json_response

# Routes that llama.cpp serves under two names. The second name is the one that we have.
ALIASES = {
    ("POST", "/chat/completions"): "/v1/chat/completions",
    ("GET", "/models"): "/v1/models",
    ("POST", "/reranking"): "/v1/rerank",
    ("POST", "/responses"): "/v1/responses",
    ("POST", "/responses/input_tokens"): "/v1/responses/input_tokens",
    ("POST", "/v1/reranking"): "/v1/rerank",
}


class NotSupportedError(InvalidRequestError):
    status = 501
    type = "not_supported_error"
    code = "NOT_SUPPORTED"


class PropsQuery(Query):
    model: fields.ModelName | None = None
    autoload: bool | None = None  # of llama.cpp's router; models are loaded when they are needed


class SlotsQuery(PropsQuery):
    fail_on_no_slot: Annotated[int, Field(ge=0, le=1)] | None = None


def add_alias_routes(app: FastAPI, services: Services) -> None:
    """Add the routes of `ALIASES`. All routes that they stand for must be there already."""
    routes = {
        (method, route.path): route.endpoint
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    for (method, alias), path in ALIASES.items():
        app.add_api_route(alias, routes[method, path], methods=[method])


def add_state_routes(app: FastAPI, services: Services) -> None:
    # Tokenizers by model and start time. To ask for one loads its model, or keeps it loaded.
    tokenizers: dict[tuple[str, int], TokenizerInfo | None] = {}

    @app.get("/props")
    async def props(request: Request) -> Response:
        """Describe the model and the defaults of `/completion`."""
        card = services.find_model(parse_query(PropsQuery, request).model, principal_of(request))
        is_loaded = services.backend.model_health(card.id).loaded
        key = (card.id, card.created)
        if is_loaded and key not in tokenizers:
            tokenizers[key] = await services.backend.tokenizer_info(model=card.id)
        return json_response(
            _props(services, card, tokenizers.get(key)) | {"is_sleeping": not is_loaded}
        )

    @app.post("/props", include_in_schema=False)
    async def change_props() -> Response:
        raise NotSupportedError("The properties can't be changed; set them in the configuration.")

    @app.get("/slots")
    async def slots(request: Request) -> Response:
        """Describe the sequences that are computed now."""
        query = parse_query(SlotsQuery, request)
        card = services.find_model(query.model, principal_of(request))
        found = _slots(services, card)
        if query.fail_on_no_slot and all(slot["is_processing"] for slot in found):
            raise UnavailableError("No slot is idle.", retry_after=1)
        return json_bytes(msgspec.json.encode(found))

    if not services.settings.metrics.enabled:

        @app.get("/metrics", include_in_schema=False)
        async def no_metrics() -> Response:
            raise NotSupportedError("This server has no metrics; set metrics.enabled = true.")

    @app.get("/lora-adapters")
    async def lora_adapters(request: Request) -> Response:
        """List the LoRA adapters. The name of one as a request's model selects it, so none has a
        scale for all requests.
        """
        allowed = services.models_for(principal_of(request))
        cards = [card for card in allowed if card.parent is not None]
        return json_bytes(
            msgspec.json.encode(
                [{"id": index, "path": card.id, "scale": 0.0} for index, card in enumerate(cards)]
            )
        )

    @app.post("/lora-adapters", include_in_schema=False)
    async def scale_lora_adapters() -> Response:
        raise NotSupportedError(
            "Adapters have no scale for all requests; name the adapter as a request's model."
        )


def _props(services: Services, card: ModelCard, info: TokenizerInfo | None) -> dict[str, Any]:
    defaults = NativeSampling()
    params = defaults.params(card, None, {})
    path = card.root or card.id
    if not services.settings.tables.models:
        path = Path(services.settings.model.model_path).name
    return {
        "default_generation_settings": {
            "params": settings_body(params, defaults.limit(card)),
            "n_ctx": card.max_model_len,
        },
        "total_slots": card.max_sequences or 1,
        "model_alias": card.id,
        "model_path": path,
        "modalities": {"vision": "images" in card.capabilities, "audio": False},
        "chat_template": (info and info.chat_template) or "",
        "bos_token": (info and info.bos_token) or "",
        "eos_token": (info and info.eos_token) or "",
        "build_info": f"engine-{__version__}",
    }


def _slots(services: Services, card: ModelCard) -> list[dict[str, Any]]:
    running = [slot for pump in services.lifecycle.pumps for slot in _running(pump)]
    # Sequences that have no token yet may still wait for a slot, so they come last.
    running.sort(key=lambda slot: -slot["next_token"][0]["n_decoded"])
    idle = {
        "n_ctx": card.max_model_len,
        "speculative": card.speculates,
        "is_processing": False,
    }
    count = card.max_sequences or max(len(running), 1)
    return [
        {"id": index} | idle | (running[index] if index < len(running) else {})
        for index in range(count)
    ]


def _running(pump: EventPump) -> Iterator[dict[str, Any]]:
    """The fields of a slot that a running sequence sets, for each sequence of a request."""
    for choice, num_tokens in enumerate(pump.choice_tokens):
        if pump.failure is not None or pump.finish_reasons[choice] is not None:
            continue
        limit = pump.max_tokens
        yield {
            "is_processing": True,
            "next_token": [
                {
                    "has_next_token": True,
                    "n_remain": -1 if limit is None else limit - num_tokens,
                    "n_decoded": num_tokens,
                }
            ],
        }
