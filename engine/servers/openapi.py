"""GET /openapi.json, built from the routes and the classes of request bodies.

FastAPI knows the routes and their responses. It does not know the request bodies, because routes
read bodies without FastAPI, to enforce limits and to parse large bodies in a thread. The tables
below list the bodies.
"""

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from engine import __version__
from engine.servers import azure
from engine.servers.access.auth import PUBLIC_ROUTES
from engine.servers.anthropic import schema as anthropic
from engine.servers.anthropic.batches import MessageBatchBody, MessageBatchQuery
from engine.servers.batches.schema import BatchBody, BatchQuery
from engine.servers.files import form
from engine.servers.files.routes import FileQuery, UploadFields
from engine.servers.files.uploads import CompleteBody, PartFields, UploadBody
from engine.servers.fine_tuning.schema import EventQuery, JobBody, JobListQuery, JobQuery
from engine.servers.http.errors import LLAMACPP_PATHS, is_anthropic, is_kserve, is_ollama
from engine.servers.huggingface import schema as huggingface
from engine.servers.interp.routes import RunBody
from engine.servers.kserve import schema as kserve
from engine.servers.llamacpp import schema as llamacpp
from engine.servers.llamacpp.state import PropsQuery, SlotsQuery
from engine.servers.ollama import schema as ollama
from engine.servers.openai.embeddings import EmbeddingBody
from engine.servers.openai.moderations import ModerationBody
from engine.servers.openai.rerank import RerankBody, ScoreBody
from engine.servers.openai.schema import ChatBody, CompletionBody, FimBody, GenerateBody
from engine.servers.openai.stored_chats import (
    StoredChatsQuery,
    StoredChatUpdate,
    StoredMessagesQuery,
)
from engine.servers.openai.tokenize import DetokenizeBody, TokenizeBody, TokenizerQuery
from engine.servers.ops import admin_control, admin_models
from engine.servers.ops.adapters import LoadAdapterBody, UnloadAdapterBody
from engine.servers.responses.conversations import (
    ConversationBody,
    ConversationUpdate,
    NewItemsBody,
    NewItemsQuery,
)
from engine.servers.responses.schema import (
    CompactBody,
    ItemsQuery,
    ResponseBody,
    ResponseQuery,
    TokenCountBody,
)
from engine.servers.serving.services import Services
from engine.servers.serving.sse import EventStream, LineStream
from engine.servers.sglang_api.schema import SglangGenerateBody
from engine.servers.vllm_api import routes as vllm
from engine.servers.vllm_api.batch_chat import BatchChatBody

# Maps paths to the JSON body of a POST.
BODIES: dict[str, type[BaseModel]] = {
    "/apply-template": llamacpp.TemplateBody,
    "/chat/completions": ChatBody,
    "/chat/completions/input_tokens": llamacpp.TemplateBody,
    "/completion": llamacpp.NativeBody,
    "/completions": llamacpp.NativeBody,
    "/detokenize": DetokenizeBody,
    "/embedding": llamacpp.EmbeddingsBody,
    "/embeddings": llamacpp.EmbeddingsBody,
    "/generate": GenerateBody,
    "/infill": llamacpp.InfillBody,
    "/rerank": RerankBody,
    "/reranking": RerankBody,
    "/responses": ResponseBody,
    "/responses/input_tokens": TokenCountBody,
    "/classify": vllm.ClassifyBody,
    "/invocations": vllm.InvocationBody,
    "/pooling": vllm.PoolingBody,
    "/score": ScoreBody,
    "/tokenize": TokenizeBody,
    "/v1/admin/cache/flush": admin_models.FlushBody,
    "/v1/admin/cache/warm": admin_models.WarmBody,
    "/v1/admin/drain": admin_control.EmptyBody,
    "/v1/admin/keys": admin_control.KeyBody,
    "/v1/admin/keys/{name}/limits": admin_control.LimitsBody,
    "/v1/admin/limits": admin_control.LimitsBody,
    "/v1/admin/log-level": admin_control.LevelBody,
    "/v1/admin/models/load": admin_models.LoadBody,
    "/v1/admin/models/remove": admin_models.NamedBody,
    "/v1/admin/models/swap": admin_models.SwapBody,
    "/v1/admin/models/unload": admin_models.NamedBody,
    "/v1/admin/plugins/{name}/enable": admin_control.EmptyBody,
    "/v1/admin/reload": admin_control.EmptyBody,
    "/v1/admin/requests/{request_id}/replay": admin_control.EmptyBody,
    "/v1/admin/undrain": admin_control.EmptyBody,
    "/v1/batches": BatchBody,
    "/v1/chat/completions": ChatBody,
    "/v1/chat/completions/input_tokens": llamacpp.TemplateBody,
    "/v1/chat/completions/batch": BatchChatBody,
    "/v1/chat/completions/{completion_id}": StoredChatUpdate,
    "/v1/completions": CompletionBody,
    "/v1/conversations": ConversationBody,
    "/v1/conversations/{conversation_id}": ConversationUpdate,
    "/v1/conversations/{conversation_id}/items": NewItemsBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/fim/completions": FimBody,
    "/v1/fine_tuning/jobs": JobBody,
    "/v1/interp/run": RunBody,
    "/v1/load_lora_adapter": LoadAdapterBody,
    "/v1/unload_lora_adapter": UnloadAdapterBody,
    "/v1/messages": anthropic.MessagesBody,
    "/v1/messages/batches": MessageBatchBody,
    "/v1/messages/count_tokens": anthropic.PromptBody,
    "/v1/moderations": ModerationBody,
    "/v1/rerank": RerankBody,
    "/v1/reranking": RerankBody,
    "/v1/responses": ResponseBody,
    "/v1/responses/compact": CompactBody,
    "/v1/responses/input_tokens": TokenCountBody,
    "/v1/score": ScoreBody,
    "/v1/uploads": UploadBody,
    "/v2/rerank": RerankBody,
    "/v1/uploads/{upload_id}/complete": CompleteBody,
}
BODIES |= ollama.BODIES
BODIES |= kserve.BODIES
# Azure's paths have the bodies of OpenAI's.
BODIES |= {azure.path_of(each): BODIES[f"/v1/{each}"] for each in azure.OPERATIONS}
BODIES |= huggingface.BODIES
# Maps paths to the other forms of the JSON body that a POST accepts.
OTHER_BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/": (huggingface.EmbedBody,),
    "/generate": (SglangGenerateBody, huggingface.TextGenerationBody),
}
# Paths of a POST without a body.
BODILESS = (
    *("/flush_cache", "/ping", "/reset_prefix_cache", "/sleep", "/start_profile"),
    *("/stop_profile", "/wake_up", "/v2/repository/index"),
    "/v1/batches/{batch_id}/cancel",
    "/v1/fine_tuning/jobs/{job_id}/cancel",
    "/v1/fine_tuning/jobs/{job_id}/pause",
    "/v1/fine_tuning/jobs/{job_id}/resume",
    "/v1/messages/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}/cancel",
    "/v1/uploads/{upload_id}/cancel",
)
# Maps paths to the form of a POST that uploads a file: its fields, and the part with the file.
FORMS: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/files": (UploadFields, form.FILE),
    "/v1/uploads/{upload_id}/parts": (PartFields, "data"),
}
# Maps paths to the query parameters of a GET.
QUERIES: dict[str, type[BaseModel]] = {
    "/v1/batches": BatchQuery,
    "/v1/fine_tuning/jobs": JobListQuery,
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": JobQuery,
    "/v1/fine_tuning/jobs/{job_id}/events": EventQuery,
    "/v1/chat/completions": StoredChatsQuery,
    "/v1/chat/completions/{completion_id}/messages": StoredMessagesQuery,
    "/v1/conversations/{conversation_id}/items": ItemsQuery,
    "/v1/conversations/{conversation_id}/items/{item_id}": NewItemsQuery,
    "/v1/files": FileQuery,
    "/v1/messages/batches": MessageBatchQuery,
    "/props": PropsQuery,
    "/slots": SlotsQuery,
    "/tokenizer_info": TokenizerQuery,
    "/v1/responses/{response_id}": ResponseQuery,
    "/v1/responses/{response_id}/input_items": ItemsQuery,
}

_REFS = "#/components/schemas/{model}"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_LLAMACPP_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type", "param"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
_PLAIN_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}
# Maps media types to the description of a response. Event streams have no JSON schema.
_ANSWERS: dict[str, dict[str, Any]] = {
    "application/json": {"schema": {"type": "object"}},
    EventStream.media_type: {},
    LineStream.media_type: {},
}
_HEADERS = {
    "x-request-id": {"schema": {"type": "string"}, "description": "Also in the server's log."},
    "x-engine-warnings": {
        "schema": {"type": "string"},
        "description": "Parameters that were not followed to the letter.",
    },
}


def add_openapi_routes(app: FastAPI, services: Services) -> None:
    made: asyncio.Future[bytes] | None = None  # begun on first use, when all routes are registered

    def encoded() -> bytes:
        return msgspec.json.encode(document(app))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        """Return this OpenAPI document."""
        nonlocal made
        if made is None:
            # In a thread, because it takes a second. All requests wait for the same one.
            made = asyncio.ensure_future(asyncio.to_thread(encoded))
        return Response(await asyncio.shield(made), media_type="application/json")


def document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(
        title="engine",
        version=__version__,
        description="An OpenAI-compatible server of language models.",
        routes=app.routes,
    )
    forms = [form_fields for form_fields, _ in FORMS.values()]
    models = dict.fromkeys([*BODIES.values(), *chain(*OTHER_BODIES.values()), *forms])
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REFS
    )
    made["components"] = {
        "schemas": {
            "Error": _ERROR_SCHEMA,
            "AnthropicError": _ANTHROPIC_ERROR_SCHEMA,
            "LlamacppError": _LLAMACPP_ERROR_SCHEMA,
            "PlainError": _PLAIN_ERROR_SCHEMA,
        }
        | definitions["$defs"],
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    made["security"] = [{"key": []}]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            media_types = list(operation["responses"]["200"]["content"])
            if path in PUBLIC_ROUTES:
                operation["security"] = []
            if method == "get" and path in QUERIES:
                in_path = operation.get("parameters", [])
                operation["parameters"] = in_path + _query_parameters(QUERIES[path])
            if method == "post" and path in BODIES:
                model = BODIES[path]
                schema = references[model, "validation"]
                if others := OTHER_BODIES.get(path):
                    schema = {
                        "anyOf": [references[each, "validation"] for each in (model, *others)]
                    }
                operation["requestBody"] = _body("application/json", schema)
                if "stream" in model.model_fields:
                    kind = LineStream if is_ollama(path) else EventStream
                    media_types.append(kind.media_type)
            if method == "post" and path in FORMS:
                uploaded = _form_schema(*FORMS[path])
                operation["requestBody"] = _body("multipart/form-data", uploaded)
            operation["responses"] = _responses(path, media_types)
    return made


def _body(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _form_schema(model: type[BaseModel], file_part: str) -> dict[str, Any]:
    """The JSON schema of the form `model`, with the uploaded file as another field."""
    schema = model.model_json_schema(ref_template=_REFS)
    schema.pop("$defs", None)
    file = {file_part: {"type": "string", "format": "binary"}}
    required = [*schema.get("required", ()), file_part]
    return schema | {"properties": schema.get("properties", {}) | file, "required": required}


def _query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    properties = model.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": each} for name, each in properties.items()]


def api_routes(app: FastAPI) -> list[tuple[str, str]]:
    """The method and path of every public API route, sorted."""
    return sorted(
        (method, route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    )


def _responses(path: str, media_types: Iterable[str]) -> dict[str, Any]:
    content = {each: _ANSWERS.get(each, {"schema": {"type": "string"}}) for each in media_types}
    model = "PlainError" if is_ollama(path) or is_kserve(path) else "Error"
    model = "AnthropicError" if is_anthropic(path) else model
    model = "LlamacppError" if path in LLAMACPP_PATHS else model
    error = {"application/json": {"schema": {"$ref": _REFS.format(model=model)}}}
    return {
        "200": {"description": "The answer.", "headers": _HEADERS, "content": content},
        "default": {"description": "What went wrong, and what to change.", "content": error},
    }
