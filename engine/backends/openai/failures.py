"""Converts errors of other servers to ours.

Errors caused by the client's request and rate limits keep the other server's message. For all other
failures, the client only gets the message that the model is not available. The reason is logged.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.core.errors import (
    ConflictError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    PayloadTooLargeError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)

log = logging.getLogger(__name__)

MAX_MESSAGE = 2_000
# Retry delay (seconds) suggested to clients after a failure of the server.
RETRY_S = 2.0
MAX_RETRY_S = 3600.0
_KINDS: dict[int, type[EngineError]] = {
    404: NotFoundError,
    408: RequestTimeoutError,
    409: ConflictError,
    413: PayloadTooLargeError,
    429: RateLimitError,
}
# Error type -> HTTP status, for errors inside a stream, which have no status.
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "bad_request_error": 400,
    "validation": 422,
    "exceed_context_size_error": 400,
    "not_found_error": 404,
    "notfounderror": 404,
    "timeout_error": 408,
    "rate_limit_error": 429,
    "authentication_error": 401,
    "permission_error": 403,
}
_CONTEXT_WORDS = ("maximum context length", "context size", "context length")


class KeyRefusedError(UnavailableError):
    """The other server refused our server's key. The client's key is not involved."""


def error_of(
    status: int, headers: Mapping[bytes, bytes], body: bytes, grammar_param: str | None = None
) -> EngineError:
    """Convert an unsuccessful response. `grammar_param` is the client's parameter for the output
    constraint. We may have sent it under another name, which is replaced in the error.
    """
    decoded: Any = None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        decoded = msgspec.json.decode(body)
    return _build(status, _fields(decoded), grammar_param, _retry_after(headers))


def error_in_stream(error: Any, grammar_param: str | None = None) -> EngineError:
    """Convert an error that arrived instead of a chunk."""
    fields = _fields(error)
    code = fields.get("code")
    status = code if isinstance(code, int) and not isinstance(code, bool) else None
    if status is None:
        kind = str(fields.get("type") or fields.get("error_type") or "").lower()
        status = _STATUS_OF_TYPE.get(kind, 503)
    return _build(status, fields, grammar_param, None)


def unavailable(why: str) -> UnavailableError:
    return UnavailableError(f"The model's server is not available: {why}.", retry_after=RETRY_S)


def _build(
    status: int, fields: dict[str, Any], grammar_param: str | None, retry_after: float | None
) -> EngineError:
    message = _message(fields)
    if status in (401, 403):
        log.error("the server refuses our key (%d): %s", status, message or "no reason given")
        return KeyRefusedError("The model's server does not accept this server's key.")
    if not 400 <= status < 500:
        log.warning("the server failed with status %d: %s", status, message or "no reason given")
        return unavailable(f"it failed with status {status}")
    kind = _KINDS.get(status, InvalidRequestError)
    param = fields.get("param")
    if not isinstance(param, str):
        param = None
    elif grammar_param is not None and _is_grammar(param):
        if message.startswith(param):
            message = grammar_param + message.removeprefix(param)
        param = grammar_param
    code = fields.get("code")
    if not isinstance(code, str) or not code:
        code = None
        if status == 400 and any(words in message for words in _CONTEXT_WORDS):
            code = "context_length_exceeded"
    return kind(
        message or f"The model's server refused the request with status {status}.",
        param=param,
        code=code,
        retry_after=retry_after if kind is RateLimitError else None,
    )


def _fields(body: Any) -> dict[str, Any]:
    """The fields of an error. Servers send them under `error`, as the whole body, or send only a
    text.
    """
    if isinstance(body, dict) and body.get("error"):
        inner = body["error"]
        return inner if isinstance(inner, dict) else body | {"message": inner}
    if isinstance(body, dict):
        return body
    return {"message": body} if isinstance(body, str) else {}


def _message(fields: dict[str, Any]) -> str:
    """The error message. FastAPI's own errors have a `detail`, which may be a list."""
    for name in ("message", "detail"):
        found = fields.get(name)
        if found:
            text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
            return text[:MAX_MESSAGE]
    return ""


def _is_grammar(param: str) -> bool:
    """Whether `param` is a name under which we send grammars."""
    return param.partition(".")[0] in (
        "response_format",
        "structured_outputs",
        "regex",
        "ebnf",
        "grammar",
        "json_schema",
    )


def _retry_after(headers: Mapping[bytes, bytes]) -> float | None:
    """Seconds from the `retry-after` header. Its form with a date is not read, because inference
    servers don't use it.
    """
    for name, scale in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            seconds = float(headers[name]) * scale
            if 0.0 <= seconds <= MAX_RETRY_S:
                return seconds
    return None
