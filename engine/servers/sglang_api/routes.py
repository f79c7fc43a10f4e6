"""SGLang's routes about the server: what it serves, its health and its cache."""

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine import __version__
from engine.backends.base import close_events
from engine.core.interfaces.backend import (
    CompletionRequest,
    EmbedRequest,
    GenerationContext,
    ModelCard,
    TextPair,
)
from engine.core.interfaces.request import SamplingParams
from engine.servers.access.auth import SERVER, principal_of
from engine.servers.ops.admin import who_is
from engine.servers.ops.probes import is_accepting, status_response
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response, new_completion_id

HEALTH_TIMEOUT_S = 20.0  # SGLang's
_PROMPT = "."


def add_sglang_routes(app: FastAPI, services: Services) -> None:
    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info(request: Request) -> Response:
        return json_response(_model(services.find_model(None, principal_of(request))))

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info(request: Request) -> Response:
        card = services.find_model(None, principal_of(request))
        return json_response(_model(card) | _server(services, card))

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """Generate a token, unless the server works on requests and shows its health so."""
        if not is_accepting(services):
            return status_response("unhealthy", ok=False)
        try:
            if not services.lifecycle.pumps:
                async with asyncio.timeout(HEALTH_TIMEOUT_S):
                    await _probe(services)
        except TimeoutError:
            return status_response("unhealthy", ok=False)
        return status_response("healthy", ok=True)

    @app.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache(request: Request) -> Response:
        """Drop all cached prefixes that no running request uses."""
        async with audit_of(services).change(who_is(request), "cache.flush"):
            done = await services.backend.flush_prefixes()
        return PlainTextResponse("\n".join(("Cache flushed.", *done)))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        # The id, because the path of the model's file is not for clients.
        "model_path": card.id,
        "served_model_name": card.id,
        "tokenizer_path": card.id,
        "is_generation": "completions" in card.capabilities,
        "preferred_sampling_params": None if card.preset is None else card.preset.parameters,
        "weight_version": "default",
        "has_image_understanding": "images" in card.capabilities,
        "has_audio_understanding": False,
        "model_type": None,
        "architectures": None,
    }


def _server(services: Services, card: ModelCard) -> dict[str, Any]:
    stats = services.backend.stats()
    state: dict[str, Any] = {}
    if stats is not None:
        state = {
            "num_running_reqs": stats.num_running,
            "num_queue_reqs": stats.num_waiting,
            "max_total_num_tokens": stats.num_blocks * stats.block_size,
        }
    return {
        "version": __version__,
        "context_length": card.max_model_len,
        "max_total_num_tokens": state.get("max_total_num_tokens"),
        "max_running_requests": services.lifecycle.max_concurrent,
        "internal_states": [state],
    }


async def _probe(services: Services) -> None:
    """Make the engine compute something. Returns when the first result arrives."""
    card, request_id = services.find_model(None, SERVER), new_completion_id("health")
    if "completions" not in card.capabilities:
        text = TextPair(_PROMPT, _PROMPT) if "rerank" in card.capabilities else _PROMPT
        asked = EmbedRequest(request_id=request_id, model=card.id, inputs=(text,))
        await services.backend.embed(asked)
        return
    params = SamplingParams(max_tokens=1, temperature=0.0)
    context = GenerationContext(request_id=request_id, params=params, model=card.id)
    events = await services.backend.open(CompletionRequest(context=context, prompt=_PROMPT))
    try:
        await anext(events)
    finally:
        await close_events(events)
