"""GET /v1/capabilities: features of this server and its models, read from the tables that define
them.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from engine import __version__
from engine.core.interfaces.backend import ModelCard
from engine.servers.anthropic import schema as anthropic
from engine.servers.batches import lines
from engine.servers.batches.schema import BatchBody
from engine.servers.files import form
from engine.servers.openai import embeddings, rerank, schema
from engine.servers.openai.openapi import BODIES, api_routes
from engine.servers.responses import items
from engine.servers.schema import body, fields, messages, structured
from engine.servers.schema.body import NO_EFFECT, off_values
from engine.servers.serving.services import Services

LIMITS = {
    "max_n": body.MAX_N,
    "max_best_of": schema.MAX_BEST_OF,
    "max_logprobs": schema.MAX_LOGPROBS,
    "max_stop_strings": fields.MAX_STOPS,
    "max_stop_length": fields.MAX_STOP_LENGTH,
    "max_stop_token_ids": fields.MAX_STOP_IDS,
    "max_logit_bias": fields.MAX_BIASES,
    "max_prompts": fields.MAX_PROMPTS,
    "max_messages": messages.MAX_MESSAGES,
    "max_input_items": items.MAX_ITEMS,
    "max_tools": messages.MAX_TOOLS,
    "max_metadata_pairs": fields.MAX_METADATA,
    "max_grammar_length": structured.MAX_SOURCE,
    "max_embedding_inputs": embeddings.MAX_INPUTS,
    "max_rerank_documents": rerank.MAX_DOCUMENTS,
    "max_file_bytes": form.MAX_FILE_BYTES,
    "max_batch_requests": lines.MAX_LINES,
}


def add_capabilities_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/capabilities")
    async def capabilities() -> Response:
        """List the features of this server and its models."""
        server = services.settings.server
        body = {
            "object": "capabilities",
            "engine": {"name": "engine", "version": __version__},
            "strict": server.strict,
            "endpoints": [f"{method} {path}" for method, path in api_routes(app)],
            "parameters": {path: _parameters(kind) for path, kind in BODIES.items()},
            "structured_outputs": {
                "response_format": structured.FORMATS,
                "guided": structured.GUIDED,
                "structured_outputs": structured.KINDS,
            },
            "limits": LIMITS
            | {
                "max_body_bytes": server.body_limit_mb * 2**20,
                "max_concurrent_requests": server.max_concurrent_requests,
                "request_timeout_seconds": server.request_timeout_s,
            },
            "models": [_model(card) for card in services.backend.models()],
        }
        return Response(msgspec.json.encode(body), media_type="application/json")


def _parameters(kind: type[BaseModel]) -> dict[str, Any]:
    """A body's parameters. `refused_unless` lists unsupported ones with their accepted no-op
    values.
    """
    refused = off_values(kind)
    others = NO_EFFECT
    if issubclass(kind, anthropic.PromptBody):
        others = anthropic.NO_EFFECT
    elif issubclass(kind, BatchBody):
        others = {}
    return {
        "supported": sorted(kind.model_fields.keys() - refused),
        "refused_unless": refused
        | {name: off for name, off in others.items() if name not in kind.model_fields},
    }


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "max_model_len": card.max_model_len,
        "dimensions": card.num_dimensions,
        "capabilities": {
            name: "emulated" if name in card.emulated else "native" for name in card.capabilities
        },
        "chat_template_kwargs": card.template_options,
    }
