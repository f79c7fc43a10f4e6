"""The routes of Ollama's API that describe the server and its models."""

import hashlib
import math
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine import __version__
from engine.core.errors import NotFoundError
from engine.core.interfaces.backend import ModelCard, Preset
from engine.core.store.model_store import StoredModel
from engine.servers.access.auth import may_administer, principal_of
from engine.servers.ollama.changes import add_change_routes
from engine.servers.ollama.format import timestamp
from engine.servers.ollama.generation import (
    add_embedding_routes,
    add_generation_routes,
)
from engine.servers.ollama.names import OllamaModels, best_match, tagged
from engine.servers.ollama.schema import OllamaShowBody
from engine.servers.serving.services import Services, json_response

# The version of Ollama whose API this is. Clients use it to find out what the server can do.
OLLAMA_VERSION = "0.13.0"
NEVER = "9999-12-31T23:59:59Z"
_FAMILY = "engine"  # the program that answers; the card does not have the model's architecture
# Our names of a model's abilities, and Ollama's.
_CAPABILITIES = {
    "completions": "completion",
    "embeddings": "embedding",
    "tools": "tools",
    "suffix": "insert",
    "images": "vision",
    "reasoning": "thinking",
}


def add_ollama_routes(app: FastAPI, services: Services) -> None:
    models = OllamaModels(services)
    add_generation_routes(app, services, models)
    add_embedding_routes(app, services, models)
    _add_model_routes(app, services, models)
    _add_server_routes(app, models)
    add_change_routes(app, services, models)


def _add_model_routes(app: FastAPI, services: Services, models: OllamaModels) -> None:
    @app.get("/api/tags")
    async def tags(request: Request) -> Response:
        """List the models that the client can use."""
        principal = principal_of(request)
        cards = services.models_for(principal)
        served = {card.root or card.id for card in cards}
        listed = [_entry(principal.view(card)) for card in cards]
        if may_administer(request, services.keys):
            stored = await models.stored()
            listed += [_stored_entry(each) for each in stored.values() if each.name not in served]
        return json_response({"models": listed})

    @app.get("/api/ps")
    async def loaded(request: Request) -> Response:
        """List the models in memory."""
        allowed = services.models_for(principal_of(request))
        cards = [card for card in allowed if card.root is None]
        running = [card for card in cards if services.backend.model_health(card.id).loaded]
        return json_response({"models": [_running(services, card) for card in running]})

    @app.post("/api/show")
    async def show(request: Request) -> Response:
        body = await services.read(request, OllamaShowBody, is_lenient=True)
        found, principal = models.served(request, body.model_name), principal_of(request)
        if found is not None:
            card = services.find_model(found, principal)
            return json_response(await _shown(services, principal.view(card)))
        stored = await models.stored() if may_administer(request, services.keys) else {}
        name = best_match(body.model_name, stored)
        if name is None:
            raise models.unknown(request, body.model_name)
        return json_response(_stored_shown(stored[name]))


def _add_server_routes(app: FastAPI, models: OllamaModels) -> None:
    @app.get("/api/version")
    async def version() -> Response:
        engine = {"name": "engine", "version": __version__}
        return json_response({"version": OLLAMA_VERSION, "engine": engine})

    @app.get("/", response_class=PlainTextResponse)
    @app.head("/", response_class=PlainTextResponse)
    async def root() -> Response:
        """Answer the probe of Ollama's clients."""
        return PlainTextResponse("Ollama is running")

    @app.head("/api/blobs/{digest}")
    async def blob(digest: str) -> Response:
        """Tell whether a model of the store has a file with this SHA-256."""
        stored = await models.stored()
        files = {file.sha256 for model in stored.values() for file in model.files}
        if digest.removeprefix("sha256:").removeprefix("sha256-") not in files:
            raise NotFoundError("There is no such blob.")
        return Response()


def _entry(card: ModelCard) -> dict[str, Any]:
    return {
        "name": tagged(card.id),
        "model": tagged(card.id),
        "modified_at": timestamp(card.created),
        "size": card.size_bytes or 0,
        "digest": hashlib.sha256(msgspec.json.encode(card)).hexdigest(),
        "details": _details(card),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": card.root or "",
        "format": "",
        "family": _FAMILY,
        "families": [_FAMILY],
        "parameter_size": _short(card.num_params),
        "quantization_level": card.quantization or "",
    }


def _short(count: int | None) -> str:
    """A number of parameters as `134.5M` or `7.6B`."""
    if count is None:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _stored_entry(model: StoredModel) -> dict[str, Any]:
    details = {"parent_model": "", "format": "gguf" if model.entry else "safetensors"}
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": model.date,
        "size": model.size,
        "digest": model.sha256 or hashlib.sha256(msgspec.json.encode(model)).hexdigest(),
        "details": details
        | {"family": "", "families": [], "parameter_size": "", "quantization_level": ""},
    }


def _running(services: Services, card: ModelCard) -> dict[str, Any]:
    entry = _entry(card)
    del entry["modified_at"]
    on_gpu = services.settings.model.device.startswith("cuda")
    return entry | {
        "expires_at": _expiry(services, card),
        "size_vram": entry["size"] if on_gpu else 0,
        "context_length": card.max_model_len,
    }


def _expiry(services: Services, card: ModelCard) -> str:
    """When the model is unloaded if no further request comes."""
    seconds = services.models.seconds_left(card.id)
    if seconds == math.inf:
        return NEVER
    return timestamp(datetime.now(UTC).timestamp() + seconds)


async def _shown(services: Services, card: ModelCard) -> dict[str, Any]:
    preset = card.preset or Preset()
    info = None
    if services.backend.model_health(card.id).loaded:  # asking for it would load the model
        info = await services.backend.tokenizer_info(model=card.id)
    parameters = _parameters(preset)
    lines = [f"FROM {card.root or card.id}", *(f"PARAMETER {each}" for each in parameters)]
    if preset.system:
        lines.append(f'SYSTEM """{preset.system}"""')
    return {
        "modelfile": "\n".join(lines),
        "parameters": "\n".join(parameters),
        "template": "" if info is None else info.chat_template or "",
        "system": preset.system or "",
        "details": _details(card),
        "model_info": {
            "general.architecture": _FAMILY,
            "general.basename": card.id,
            "general.parameter_count": card.num_params,
            f"{_FAMILY}.context_length": card.max_model_len,
            f"{_FAMILY}.embedding_length": card.num_dimensions,
        },
        "capabilities": [
            theirs
            for ours, theirs in _CAPABILITIES.items()
            if ours in card.capabilities and ours not in card.emulated
        ],
        "modified_at": timestamp(card.created),
    }


def _parameters(preset: Preset) -> list[str]:
    """The preset's parameters in the syntax of a Modelfile."""
    lines = []
    for name, value in preset.parameters.items():
        for each in value if isinstance(value, tuple) else (value,):
            lines.append(f"{name} {msgspec.json.encode(each).decode()}")
    return lines


def _stored_shown(model: StoredModel) -> dict[str, Any]:
    """What is known of a model that is not served: its file, and not what it can do."""
    entry = _stored_entry(model)
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": "",
        "template": "",
        "details": entry["details"],
        "model_info": {"general.basename": model.name},
        "capabilities": [],
        "modified_at": model.date,
    }
