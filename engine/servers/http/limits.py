"""Reads a request body as a JSON object. Size and nesting are checked before the body is decoded.

Bytes are counted as they arrive, because a chunked body announces no length. The nesting depth is
measured without recursion. Large bodies are parsed in a thread, so that they don't block the event
loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.core.errors import (
    InvalidRequestError,
    PayloadTooLargeError,
    RequestTimeoutError,
    UnsupportedMediaTypeError,
)
from engine.core.text.long_texts import after_other_long_texts
from engine.servers.http.errors import ClientDisconnectedError, problem
from engine.servers.http.request_log import record_of

MAX_DEPTH = 64
BODY_TIMEOUT_S = 60.0
# Bodies up to this size are parsed on the event loop, because handing them to a thread would take
# longer than parsing.
INLINE_BYTES = 32_768

_OPENING = frozenset(b"[{")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

T = TypeVar("T")


def decode_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise InvalidRequestError("The request body is empty; send a JSON object.")
    check_depth(raw)
    try:
        decoded = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        # `error.start` is a position in a JSON string, not in the body. So it is not reported.
        byte = error.object[error.start]
        raise InvalidRequestError(
            f"The request body is not UTF-8: {error.reason} (0x{byte:02x})."
        ) from None
    except (msgspec.MsgspecError, ValueError) as error:
        # The causes of these exceptions are syntax errors, lone surrogates, NaN, and numbers out of
        # range.
        raise InvalidRequestError(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(decoded, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    return decoded


async def read_parsed(
    request: Request,
    max_bytes: int,
    parse: Callable[[dict[str, Any]], T],
    any_type: bool = False,
    decode: Callable[[bytes], dict[str, Any]] = decode_object,
) -> T:
    """Read the body, decode it as a JSON object, and return `parse(object)`. Raises an
    `EngineError` if the body is invalid, too large or too slow. If `any_type`, the Content-Type
    only matters in requests of browsers. `decode` is for bodies with more than JSON.
    """
    _check_headers(request, any_type)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeoutError(
            f"The request body did not arrive within {BODY_TIMEOUT_S:.0f} seconds."
        ) from None
    except ClientDisconnect:
        raise ClientDisconnectedError("The client left while sending its request.") from None
    record = record_of(request.scope)
    record.num_body_bytes, record.body_at = len(raw), time.monotonic()
    if len(raw) <= INLINE_BYTES:
        return parse(decode(raw))
    return await after_other_long_texts(lambda: parse(decode(raw)))


def decode_text(text: str, where: str) -> Any:
    """Parse JSON text inside a JSON string. It has the same nesting limit as a request body."""
    raw = text.encode()
    try:
        check_depth(raw)
        return msgspec.json.decode(raw)
    except InvalidRequestError:
        raise problem(where, f"is nested more than {MAX_DEPTH} levels deep") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise problem(where, f"is not valid JSON: {error}") from None


def check_depth(raw: bytes) -> None:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    # Remove escaped backslashes and escaped quotes, so that each remaining quote opens or closes a
    # string. Then brackets outside of strings are in every second part.
    parts = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    depth = 0
    for bracket in b"".join(parts[::2]).translate(None, _NOT_BRACKETS):
        if bracket in _OPENING:
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidRequestError(
                    f"The request body is nested more than {MAX_DEPTH} levels deep."
                )
        else:
            depth -= 1


def _check_headers(request: Request, any_type: bool) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not (any_type and not _is_browser(request)):
        raise UnsupportedMediaTypeError("Content-Type must be application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(
            "Content-Encoding is not supported; send the body uncompressed."
        )


def _is_browser(request: Request) -> bool:
    """Whether the request may come from a web page. Then another Content-Type than JSON could evade
    the browser's own check, the CORS preflight.
    """
    return any(name in request.headers for name in ("origin", "sec-fetch-site", "referer"))


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        body += chunk
    return bytes(body)


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {max_bytes} bytes.")
