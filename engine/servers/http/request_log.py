"""The outermost ASGI layer. It gives each request an id, writes the request log and HTTP metrics,
and answers requests whose handler failed with an unexpected exception.

A `RequestRecord` collects facts about a request until its log line is written. The log line has
counts, times and the client's `metadata`, but never a prompt or an answer. The layer is plain ASGI,
so a handler learns of a disconnect at once.
"""

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.config_schema import Settings
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.notes import RequestNotes
from engine.core.observability.logging import REQUEST_ID
from engine.core.observability.metrics import Metrics
from engine.core.observability.tracing import TRACE, Answered, RequestTrace, client_trace

if TYPE_CHECKING:
    from engine.core.observability.otel import Telemetry

logger = logging.getLogger("engine.request")

# Routes that are not logged, because machines poll them every few seconds, or because a browser
# loads dozens of files at once. Their lines would hide the other log lines. Requests for metrics
# are not logged either.
STATIC_ROUTE = "/ui/static/{name:path}"
_QUIET = frozenset(
    {
        *("/livez", "/readyz", "/health", "/healthz", "/v2/health/live", "/v2/health/ready"),
        STATIC_ROUTE,
    }
)
# Routes that `engine top` and dashboards read every second. An answer of status 200 is logged at
# level debug.
_POLLED = frozenset(
    {"/v1/models", "/v1/admin/routes", "/v1/admin/snapshot", "/v1/admin/live", "/v1/admin/requests"}
)

MAX_LOGGED_PATH = 200
_UNPRINTABLE = re.compile(r"[^!-~]")
_SAFE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request, set while it is handled and logged at its end."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    num_body_bytes: int = 0  # size of the request body, once it has fully arrived
    body_at: float | None = None  # when the request body had fully arrived
    accepted_at: float | None = None  # when the request was checked, and the backend was asked
    answered_at: float | None = None  # when the backend had sent the whole answer
    ended_at: float | None = None  # when the last byte was sent
    route: str = ""
    tenant: str = ""
    model: str = ""  # id of the model that answers
    notes: RequestNotes = field(default_factory=RequestNotes)
    status: int = 0
    error_code: str | None = None
    error_message: str | None = None
    completion_id: str | None = None  # the request's id in the backend
    backends: tuple[str, ...] = ()  # replicas that answered, if there are several
    user_hash: str | None = None
    ttft_s: float | None = None
    usage: UsageEvent | None = None  # set when the answer is complete
    warnings: list[str] = field(default_factory=list)  # for the X-Engine-Warnings header
    metadata: dict[str, str] | None = None  # labels that the client attached
    # The client's names of parameters that have other names here.
    sent_as: Mapping[str, str] = field(default_factory=dict)
    limit_headers: dict[str, str] = field(default_factory=dict)  # remaining quota of the key
    trace: RequestTrace | None = None
    is_stream: bool = False  # whether the answer is a stream of events
    send: Send | None = None  # sends directly to the HTTP server, bypassing all layers

    def work_fields(self) -> dict[str, Any]:
        """Log fields about the generation. Fields that are not known are left out."""
        fields: dict[str, Any] = {
            "completion_id": self.completion_id,
            "backend": ", ".join(self.backends) or None,
            "user_hash": self.user_hash,
            "metadata": self.metadata,
            "warnings": self.warnings or None,
        }
        if self.ttft_s is not None:
            fields["ttft_s"] = round(self.ttft_s, 6)
        if self.usage is not None:
            fields |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "queue_s": round(self.usage.queue_s, 6),
                "prefill_s": round(self.usage.prefill_s, 6),
                "decode_s": round(self.usage.decode_s, 6),
            }
        return {name: value for name, value in fields.items() if value is not None}


def new_request_id(supplied: str | None) -> str:
    """The id that the client supplied, if it is safe in a log and in a header. Otherwise a new
    id.
    """
    if supplied is not None and _SAFE_ID.fullmatch(supplied):
        return supplied
    return f"req-{secrets.token_hex(16)}"


def record_of(scope: Mapping[str, Any]) -> RequestRecord:
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


class RequestLog:
    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        answered_by: Callable[[str], tuple[str, ...]],
        keep: Callable[[RequestRecord], None],
        telemetry: "Telemetry | None" = None,
    ) -> None:
        self._app = app
        self._keep = keep
        self._telemetry = telemetry
        self._answered_by = answered_by
        self._log_requests = settings.logging.log_requests
        self._quiet_routes = _QUIET | {settings.metrics.endpoint}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(new_request_id(headers.get("x-request-id")), send=send)
        record.trace = self._begin_trace(scope["method"], headers, record.started)
        scope.setdefault("state", {})["record"] = record
        id_header = (b"x-request-id", record.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), id_header]
                if record.warnings:
                    text = "; ".join(record.warnings)
                    headers.append((b"x-engine-warnings", text.encode("ascii", "replace")))
                if record.completion_id is not None:
                    record.backends = self._answered_by(record.completion_id)
                    if record.backends:
                        names = ", ".join(record.backends)
                        headers.append((b"x-engine-backend", names.encode("ascii", "replace")))
                for name, value in record.limit_headers.items():
                    headers.append((name.encode(), value.encode()))
                message["headers"] = headers
            await send(message)

        token = REQUEST_ID.set(record.request_id)
        trace_token = TRACE.set(record.trace)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            from engine.servers.http.errors import error_response, opaque_error

            logger.exception("A request failed unexpectedly.")
            record.error_code = "INTERNAL_ERROR"
            if record.status == 0:
                await error_response(opaque_error(), scope)(scope, receive, send_with_id)
        finally:
            self._report(scope, record)
            REQUEST_ID.reset(token)
            TRACE.reset(trace_token)

    def _begin_trace(self, method: str, headers: Headers, started: float) -> RequestTrace | None:
        """The trace of a request. Only POST requests make the models work, so others are not
        recorded.
        """
        if self._telemetry is None or method != "POST":
            return client_trace(headers)
        return self._telemetry.begin(headers, started)

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.started
        route = scope["route"].path if "route" in scope else None
        self._metrics.http_request(route, scope["method"], record.status, seconds)
        if record.completion_id is not None:
            record.backends = self._answered_by(record.completion_id)
            record.route, record.ended_at = route or "", record.started + seconds
            record.send = None  # it would keep the connection in memory
            self._keep(record)
        if record.trace is not None:
            record.trace.end(_answered(scope["method"], route, record))
            record.trace = None  # it has the request's texts, and the record is kept
        if not self._log_requests or route in self._quiet_routes:
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "route": route or "unmatched",
            "status": record.status,
            "seconds": round(seconds, 6),
        }
        if route is None:
            # It tells which route a client needs, and may hold any byte.
            path = scope["path"][:MAX_LOGGED_PATH]
            fields["path"] = _UNPRINTABLE.sub("?", path)
        if record.error_code is not None:
            fields["error_code"] = record.error_code
        is_poll = scope["method"] == "GET" and route in _POLLED and record.status == 200
        level = logging.DEBUG if is_poll else logging.INFO
        logger.log(level, "request", extra=fields | record.work_fields())


def _answered(method: str, route: str | None, record: RequestRecord) -> Answered:
    return Answered(
        method=method,
        route=route or "unmatched",
        status=record.status,
        is_stream=record.is_stream,
        error_code=record.error_code,
        model=record.model or None,
        completion_id=record.completion_id,
        backends=record.backends,
        ttft_s=record.ttft_s,
    )
