"""Reads and checks the lines of a batch's input file. Each line is one request.

Errors found here stop the whole batch before any line is run. The body of each request is validated
by its endpoint when the line is run. An error there affects only that line.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from engine.core.errors import EngineError, NotFoundError
from engine.servers.batches.schema import LineError
from engine.servers.http.errors import describe
from engine.servers.http.limits import decode_object

MAX_LINES = 50_000
MAX_ERRORS = 50
MAX_CUSTOM_ID_LENGTH = 512
_KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an input file, which is one request, and its position in the file in bytes."""

    number: int  # line number, from 1
    custom_id: str
    start: int
    num_bytes: int


@dataclass(slots=True)
class Scan:
    lines: list[Line] = field(default_factory=list)
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)


class _LineMistake(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code = code
        self.message = message
        self.param = param


def scan(
    path: Path, endpoint: str, max_line_bytes: int, find_model: Callable[[str], object]
) -> Scan:
    """Read all lines and find their errors. `find_model` must raise `NotFoundError` for an unknown
    model. This function is slow, so call it in a thread.
    """
    found = Scan()
    custom_ids: set[str] = set()
    start = number = 0
    with path.open("rb") as file:
        while raw := file.readline(max_line_bytes + 1):
            number += 1
            try:
                if len(raw) > max_line_bytes:
                    _fail("line_too_long", f"A line may have at most {max_line_bytes} bytes.")
                if raw.strip():
                    if len(found.lines) == MAX_LINES:
                        _fail("too_many_lines", f"A batch may have at most {MAX_LINES} requests.")
                    request = _parse(raw, endpoint)
                    _check_custom_id(request["custom_id"], custom_ids)
                    found.model = _check_model(request["body"], found.model, find_model)
                    found.lines.append(Line(number, request["custom_id"], start, len(raw)))
            except _LineMistake as mistake:
                found.errors.append(
                    LineError(
                        code=mistake.code,
                        message=mistake.message,
                        line=number,
                        param=mistake.param,
                    )
                )
                # After these two errors, the rest of the file is not read.
                if mistake.code in ("line_too_long", "too_many_lines"):
                    break
                if len(found.errors) == MAX_ERRORS:
                    break
            start += len(raw)
    if number == 0 or not (found.lines or found.errors):
        found.errors.append(LineError(code="empty_file", message="The file has no requests."))
    return found


def read_body(path: Path, line: Line) -> dict[str, Any]:
    """Read the request body of a line that was checked before. Raises `OSError` if the file is
    gone.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        raw = os.pread(fd, line.num_bytes, line.start)
    finally:
        os.close(fd)
    return msgspec.json.decode(raw)["body"]


def _parse(raw: bytes, endpoint: str) -> dict[str, Any]:
    try:
        request = decode_object(raw)
    except EngineError as error:
        message = error.message.replace("The request body", "The line")
        raise _LineMistake("invalid_json_line", message) from None
    for key in _KEYS:
        if key not in request:
            _fail("missing_required_parameter", f"{key} is missing.", key)
    for key in request:
        if key not in _KEYS:
            _fail("unknown_parameter", f"A line has {', '.join(_KEYS)}, nothing else.", key[:64])
    if request["method"] != "POST":
        _fail("invalid_method", f"method: should be POST, got {describe(request['method'])}.")
    if request["url"] != endpoint:
        given = describe(request["url"])
        _fail("invalid_url", f"url: should be the batch's endpoint {endpoint}, got {given}.")
    body = request["body"]
    if not isinstance(body, dict):
        _fail("invalid_request", f"body: should be an object, got {describe(body)}.", "body")
    if body.get("stream"):
        _fail("invalid_request", "stream: a batch has nowhere to stream to.", "body.stream")
    return request


def _check_custom_id(value: Any, seen: set[str]) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID_LENGTH:
        rule = f"should be a string of 1 to {MAX_CUSTOM_ID_LENGTH} characters"
        _fail("invalid_custom_id", f"custom_id: {rule}, got {describe(value)}.")
    if value in seen:
        _fail("duplicate_custom_id", f"custom_id {describe(value)} was used by an earlier line.")
    seen.add(value)


def _check_model(
    body: dict[str, Any], expected: str | None, find_model: Callable[[str], object]
) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        _fail("missing_required_parameter", "body.model is missing.", "body.model")
    if expected is not None and model != expected:
        message = f"All lines must name one model; the first names {describe(expected)}."
        _fail("mismatched_model", message, "body.model")
    if expected is None:
        try:
            find_model(model)
        except NotFoundError as error:
            _fail(error.error_code, error.message, "body.model")
    return model


def _fail(code: str, message: str, param: str | None = None) -> NoReturn:
    raise _LineMistake(code, message, param)
