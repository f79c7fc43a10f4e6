"""Logging setup: one line per record on standard error, as text or as JSON.

A record may contain text from clients, such as a model name or a request id. So control characters,
line separators and terminal escapes are escaped in both formats. Otherwise a client could forge
records. Prompts and answers are never logged. Callers pass counts and times as `extra={...}`.
"""

import json
import logging
import math
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from engine.core.observability.tracing import TRACE

# Id of the HTTP request that a task or thread serves. Every record logged there carries it.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

# Attributes that every log record has. All other attributes came from `extra`.
_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "color_message",  # uvicorn's message again, with terminal colours
    "taskName",
}
# Characters that are escaped: control characters, Unicode line separators, bidirectional marks and
# lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_COLORS = {"DEBUG": 36, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
HANDLER_NAME = "engine"


def current_request_id() -> str | None:
    """The id of the HTTP request that the current task or thread serves, or None."""
    return REQUEST_ID.get()


def setup_logging(level: str, format: str, stream: TextIO | None = None) -> None:
    """Make the root logger write records to `stream` in the format "pretty" or "json". A later call
    replaces the setup of an earlier one.
    """
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.name = HANDLER_NAME
    if format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(PrettyFormatter(color=target.isatty()))
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # The server logs each request itself, with its id and times, and it says when it is ready and
    # when it stops. These loggers would say it again.
    for name in ("uvicorn.access", "uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def current_setup() -> tuple[str, str]:
    """The level and the format of this process's logs, with which a child can set up its own."""
    root = logging.getLogger()
    is_json = any(isinstance(each.formatter, JsonFormatter) for each in root.handlers)
    return logging.getLevelName(root.level).lower(), "json" if is_json else "pretty"


def set_level(level: str) -> str:
    """Set the level of all logs in this process. Returns the previous level."""
    root = logging.getLogger()
    before = logging.getLevelName(root.level).lower()
    root.setLevel(level.upper())
    return str(before)


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _RECORD_FIELDS}


def _request_id_of(record: logging.LogRecord) -> str | None:
    """The request id in the record's `extra`. If there is none, the id of the current request."""
    given = vars(record).get("request_id")
    return str(given) if given is not None else REQUEST_ID.get()


def _plain(value: Any) -> Any:
    """Convert a value for JSON. Values that JSON can represent are returned as they are. All
    others, such as NaN, become text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object. The object has the keys ts, level, logger,
    message and request_id, trace_id and span_id if the request has a trace, then the values of
    `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id_of(record),
        }
        trace = TRACE.get()
        if trace is not None:
            fields |= {"trace_id": trace.trace_id, "span_id": trace.span_id}
        fields |= {key: _plain(value) for key, value in _extra(record).items() if key not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # ASCII output escapes every control character and separator except DEL.
        return json.dumps(fields, ensure_ascii=True).replace("\x7f", "\\u007f")


class PrettyFormatter(logging.Formatter):
    """Formats a record as the line `time level logger: message key=value [request id]`. A traceback
    follows on indented lines.
    """

    def __init__(self, color: bool) -> None:
        super().__init__()
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname:<8}"
        if self._color:
            level = f"\x1b[{_COLORS.get(record.levelname, 0)}m{level}\x1b[0m"
        extra = _extra(record)
        request_id = _request_id_of(record)
        extra.pop("request_id", None)
        parts = [_escape(record.getMessage())]
        parts += [f"{key}={_escape(_short(value))}" for key, value in extra.items()]
        if (trace := TRACE.get()) is not None:
            parts.append(f"trace_id={trace.trace_id}")
        if request_id is not None:
            parts.append(f"[{_escape(request_id)}]")
        line = f"{time} {level} {record.name}: {' '.join(parts)}"
        if record.exc_info:
            traceback = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    | {_escape(each)}" for each in traceback)
        return line


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
