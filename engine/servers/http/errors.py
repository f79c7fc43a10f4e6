"""Converts exceptions to HTTP errors. Error bodies have Anthropic's format on Anthropic's routes,
likewise those of llama.cpp, Ollama and KServe, and OpenAI's format on all others. They contain no
internal details.

`x-should-retry: false` stops OpenAI's client library from repeating a request that would fail
again. `retry-after` says when a retry makes sense. An exception that is not an `EngineError` is a
bug in the server, and the client does not get its text.
"""

import logging
import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from engine.core.errors import (
    AuthenticationError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RequestTimeoutError,
    ResourceError,
    disk_full_error,
    is_disk_full,
)
from engine.servers.http.request_log import record_of

logger = logging.getLogger(__name__)

MAX_ERRORS = 10
MAX_MESSAGE = 2_000
_MAX_SHOWN = 40
# Errors at paths that start with this prefix use Anthropic's format, even if there is no such
# route.
ANTHROPIC_PATH = "/v1/messages/"
OLLAMA_PATH = "/api/"  # as above, for Ollama's format
# Errors at these paths and below them use the format of the Open Inference Protocol.
KSERVE_PATHS = ("/v2/health/", "/v2/models/", "/v2/repository/")
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# Errors at these paths use llama.cpp's format.
LLAMACPP_PATHS = frozenset(
    {
        *("/completion", "/completions", "/infill", "/apply-template", "/props", "/slots"),
        *("/embedding", "/embeddings", "/reranking", "/lora-adapters", "/models"),
        *("/chat/completions", "/chat/completions/input_tokens"),
    }
)
_LLAMACPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# OpenAI's endpoints that this server does not have, by the start of their paths.
_ABSENT = {
    "/v1/audio/": "speech or transcription",
    "/v1/images/": "generation of images",
    "/v1/videos/": "generation of videos",
    "/v1/realtime/": "realtime sessions; stream /v1/chat/completions instead",
    "/v1/assistants/": "assistants; use /v1/responses with a conversation instead",
    "/v1/threads/": "threads; use /v1/conversations instead",
    "/v1/vector_stores/": "vector stores; /v1/embeddings makes the vectors for yours",
}
CONTEXT_EXCEEDED = "context_length_exceeded"
_encode = msgspec.json.encode


class AbortedError(EngineError):
    """The client ended its own request before the answer was complete. This is not a server
    error.
    """

    category = "abort"
    status = 499


class PromptTooLargeError(PayloadTooLargeError):
    """The body is so large that its prompt can't fit into the model's context. By the code, clients
    handle this as they handle any prompt that is too long.
    """

    code = CONTEXT_EXCEEDED


class ClientDisconnectedError(AbortedError):
    """The client disconnected. This error is only logged, because no client is left to receive
    it.
    """

    code = "client_disconnected"


def error_fields(error: EngineError) -> dict[str, Any]:
    """OpenAI's error object. A long message is cut to a maximum length."""
    fields: dict[str, Any] = error.body()["error"]
    return fields | {"message": short_message(error)}


def error_body(error: EngineError) -> bytes:
    return _encode({"error": error_fields(error)})


def anthropic_error_body(error: EngineError, request_id: str) -> bytes:
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, fallback)
    message = short_message(error)
    if error.error_code == CONTEXT_EXCEEDED and error.param != "max_tokens":
        # Claude Code recognizes Anthropic's words, and then shortens the conversation.
        message = f"prompt is too long: {message}"
    described: dict[str, Any] = {"type": kind, "message": message}
    if error.details is not None:
        described["details"] = error.details
    return _encode({"type": "error", "error": described, "request_id": request_id})


def llamacpp_error_body(error: EngineError) -> bytes:
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    described: dict[str, Any] = {
        "code": error.status,
        "message": short_message(error),
        "type": _LLAMACPP_TYPES.get(error.status, fallback),
        "param": error.param,
    }
    if isinstance(error, ContextLengthError):
        # Clients recognize the type or these words, and then shorten the conversation.
        asked, most = error.num_prompt_tokens, error.max_tokens
        told = f"The request ({asked} tokens) exceeds the available context size ({most} tokens)."
        described |= {
            "message": f"{told} {described['message']}",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": asked,
            "n_ctx": most,
        }
    return _encode({"error": described})


def plain_error_body(error: EngineError) -> bytes:
    return _encode({"error": short_message(error)})


def short_message(error: EngineError) -> str:
    message = error.message
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."


def error_headers(error: EngineError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if not error.retryable:
        headers["x-should-retry"] = "false"
    if error.status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 1)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, PayloadTooLargeError | RequestTimeoutError | ResourceError):
        # The rest of the body may still arrive. Closing the connection discards it.
        headers["connection"] = "close"
    return headers


def is_anthropic(path: str) -> bool:
    """Whether errors at `path` use Anthropic's format."""
    return f"{path}/".startswith(ANTHROPIC_PATH)


def is_ollama(path: str) -> bool:
    """Whether errors at `path` use Ollama's format."""
    return path.startswith(OLLAMA_PATH)


def is_kserve(path: str) -> bool:
    """Whether errors at `path` use the format of the Open Inference Protocol."""
    return f"{path}/" == "/v2/" or f"{path}/".startswith(KSERVE_PATHS)


def error_response(error: EngineError, scope: Scope) -> Response:
    headers = error_headers(error)
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if is_ollama(path) or is_kserve(path):
        body = plain_error_body(error)
    elif is_anthropic(path):
        headers["request-id"] = record_of(scope).request_id
        body = anthropic_error_body(error, headers["request-id"])
    elif scope["path"] in LLAMACPP_PATHS:
        body = llamacpp_error_body(error)
    else:
        body = error_body(error)
    return Response(body, error.status, headers, media_type="application/json")


def opaque_error() -> EngineError:
    """The error that a client gets if a bug made its request fail. It has no details. The log has
    them, under the same request id.
    """
    return EngineError("The server failed to answer this request. Its log says why.")


def describe(value: Any) -> str:
    """Describe a value from the client for an error message. Long values are not quoted."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} keys"
    if isinstance(value, int) and not isinstance(value, bool):
        return "a very large integer" if value.bit_length() > 128 else str(int(value))
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"a string of {len(value)} characters"
    return _encode(value).decode("utf-8", "replace")


def problem(param: str, rule: str) -> InvalidRequestError:
    """An error about a field of the request body. `param` is the field's name, or its path such as
    `messages[0].role`.
    """
    return InvalidRequestError(f"{param}: {rule}.", param=param)


def short_text(value: Any, where: str, max_length: int) -> str:
    """Return `value` if it is a string of 1 to `max_length` characters, such as a name or an id.
    Otherwise raise an error about the field `where`.
    """
    if not isinstance(value, str) or not 1 <= len(value) <= max_length:
        rule = f"should be a string of 1 to {max_length} characters"
        raise problem(where, f"{rule}, got {describe(value)}")
    return value


def check_keys(item: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in item:
        if key not in known:
            raise problem(f"{where}.{key[:64]}", f"is unknown; there are {', '.join(known)}")


def invalid_request(
    error: ValidationError, sent_as: Mapping[str, str] = MappingProxyType({})
) -> InvalidRequestError:
    """Merge all of pydantic's errors into one. Its `param` is the field of the first error.
    `sent_as` has the client's names of fields that have other names here.
    """
    found = error.errors(include_url=False)
    sentences = [_sentence(item, sent_as) for item in found[:MAX_ERRORS]]
    if len(found) > MAX_ERRORS:
        sentences.append(f"and {len(found) - MAX_ERRORS} more.")
    return InvalidRequestError(" ".join(sentences), param=_param(found[0], sent_as))


def _param(item: Mapping[str, Any], sent_as: Mapping[str, str]) -> str:
    # Keys of objects in the body are text from the client and may be long, so they are cut.
    parts = [str(part)[:64] for part in item["loc"]] or ["body"]
    return ".".join([sent_as.get(parts[0], parts[0]), *parts[1:]])


def _sentence(item: Mapping[str, Any], sent_as: Mapping[str, str]) -> str:
    rule = re.sub(r"^(Input|String|List) ", "", item["msg"])
    got = "" if item["type"] == "missing" else f", got {describe(item['input'])}"
    return f"{_param(item, sent_as)}: {rule}{got}."


def _paths_of(app: FastAPI) -> list[str]:
    """The paths without parameters, but for those of the administrator."""
    paths = (getattr(route, "path", "") for route in app.routes)  # routes are Starlette's, too
    return [path for path in paths if "{" not in path and not path.startswith("/v1/admin")]


def _nothing_at(path: str, known: list[str]) -> NotFoundError:
    for prefix, what in _ABSENT.items():
        if f"{path}/".startswith(prefix):
            return NotFoundError(
                f"There is nothing at {path}: this server has no {what}. GET /openapi.json lists"
                " what it has.",
                code="unsupported_endpoint",
            )
    repaired = re.sub(r"^(/v1)+(?=/)", "/v1", path).rstrip("/")
    nearest = [each for each in (repaired, f"/v1{repaired}") if each in known]
    nearest += get_close_matches(path, known, n=1, cutoff=0.75)
    hint = f"did you mean {nearest[0]}?" if nearest else "GET /openapi.json lists what there is."
    return NotFoundError(f"There is nothing at {path}; {hint}")


def install_error_handlers(app: FastAPI) -> None:
    async def engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        record = record_of(request.scope)
        record.error_code, record.error_message = error.error_code, short_message(error)
        if error.param is not None:
            error.param = record.sent_as.get(error.param, error.param)
        return error_response(error, request.scope)

    async def disk_error(request: Request, error: Exception) -> Response:
        if not is_disk_full(error):
            raise error
        logger.error("the disk is full: %r", error)
        return await engine_error(request, disk_full_error())

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        method = request.method[:16]
        path = request.scope["path"][:100]
        known: EngineError
        if error.status_code == 404:
            known = _nothing_at(path, _paths_of(app))
        elif error.status_code == 405:
            allowed = Headers(error.headers).get("allow", "")
            takes = f" It takes {allowed}." if allowed else ""
            known = MethodNotAllowedError(f"{method} is not a method of {path}.{takes}")
        else:
            known = opaque_error()
        response = await engine_error(request, known)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    app.add_exception_handler(EngineError, engine_error)
    app.add_exception_handler(OSError, disk_error)
    app.add_exception_handler(HTTPException, http_error)
