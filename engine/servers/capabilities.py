"""GET /v1/capabilities: the endpoints, parameters and limits of this server, and what it does with
the parameters of other servers.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from engine import __version__
from engine.core.interfaces.backend import ModelCard
from engine.servers.access.auth import principal_of
from engine.servers.anthropic import schema as anthropic
from engine.servers.anthropic.batches import MessageBatchBody
from engine.servers.batches import lines
from engine.servers.batches.schema import BatchBody
from engine.servers.files import form
from engine.servers.files.uploads import CompleteBody, UploadBody
from engine.servers.openai import embeddings, rerank, schema
from engine.servers.openai.beam_fields import MAX_WIDTH
from engine.servers.openai.stored_chats import StoredChatUpdate
from engine.servers.openapi import BODIES, api_routes
from engine.servers.responses import items
from engine.servers.responses.conversations import (
    ConversationBody,
    ConversationUpdate,
    NewItemsBody,
)
from engine.servers.schema import body, fields, messages, structured, tools
from engine.servers.schema.body import SamplingBody, off_values
from engine.servers.schema.dialects.parameters import DIALECTS, PARAMETERS, Parameter
from engine.servers.schema.dialects.reading import Verdict, verdict
from engine.servers.serving.services import Services

# Bodies that refuse every parameter besides their own, whatever its value.
EXACT = (
    *(BatchBody, CompleteBody, ConversationBody, ConversationUpdate, MessageBatchBody),
    *(NewItemsBody, StoredChatUpdate, UploadBody),
)
# The endpoints that take the parameters of other servers.
TRANSLATING = {
    path: BODIES[path] for path in ("/v1/chat/completions", "/v1/completions", "/generate")
}
LIMITS = {
    "max_n": body.MAX_N,
    "max_best_of": MAX_WIDTH,
    "max_logprobs": schema.MAX_LOGPROBS,
    "max_stop_strings": fields.MAX_STOPS,
    "max_stop_length": fields.MAX_STOP_LENGTH,
    "max_stop_token_ids": fields.MAX_STOP_IDS,
    "max_logit_bias": fields.MAX_BIASES,
    "max_prompts": fields.MAX_PROMPTS,
    "max_messages": messages.MAX_MESSAGES,
    "max_input_items": items.MAX_ITEMS,
    "max_tools": tools.MAX_TOOLS,
    "max_metadata_pairs": fields.MAX_METADATA,
    "max_grammar_length": structured.MAX_SOURCE,
    "max_embedding_inputs": embeddings.MAX_INPUTS,
    "max_rerank_documents": rerank.MAX_DOCUMENTS,
    "max_file_bytes": form.MAX_FILE_BYTES,
    "max_batch_requests": lines.MAX_LINES,
}


def add_capabilities_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/capabilities")
    async def capabilities(request: Request) -> Response:
        """List the features of this server and its models."""
        server, served = services.settings.server, api_routes(app)
        body = {
            "object": "capabilities",
            "engine": {"name": "engine", "version": __version__},
            "strict": server.strict,
            "endpoints": [f"{method} {path}" for method, path in served],
            "parameters": {
                path: _parameters(kind) for path, kind in BODIES.items() if ("POST", path) in served
            },
            "dialects": {name: _dialect(name) for name in DIALECTS},
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
            "models": [_model(card) for card in services.models_for(principal_of(request))],
        }
        return Response(msgspec.json.encode(body), media_type="application/json")


def _parameters(kind: type[BaseModel]) -> dict[str, Any]:
    """The parameters of the body `kind`. `refused_unless` maps each unsupported parameter to the
    values that switch it off. The server accepts only these values.
    """
    refused = off_values(kind)
    others: Mapping[str, tuple[Any, ...]] = {}
    if issubclass(kind, anthropic.PromptBody):
        others = anthropic.NO_EFFECT
    elif kind not in EXACT:
        others = {
            word.name: word.off
            for word in PARAMETERS.values()
            if word.name not in kind.model_fields and verdict_in(word, kind) == "refused"
        }
    return {
        "supported": sorted(_followed(kind)),
        "refused_unless": refused | dict(others),
    }


def verdict_in(word: Parameter, kind: type[BaseModel]) -> Verdict:
    """What the endpoints with the body `kind` do with a parameter."""
    found = verdict(word, _followed(kind))
    return "refused" if found == "warned" and not issubclass(kind, SamplingBody) else found


@cache
def _followed(kind: type[BaseModel]) -> frozenset[str]:
    """The fields of the body `kind` that do not exist only to be refused."""
    return frozenset(kind.model_fields.keys() - off_values(kind).keys())


def _dialect(name: str) -> dict[str, Any]:
    """What happens to each parameter of another server, for each endpoint with its parameters."""
    return {
        word.name: {path: verdict_in(word, kind) for path, kind in TRANSLATING.items()}
        | ({"translated_to": word.target} if word.target else {})
        for word in PARAMETERS.values()
        if name in word.dialects
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
        "speculation": card.speculates,
    }
