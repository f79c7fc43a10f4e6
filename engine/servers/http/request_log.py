"""The outermost ASGI layer. It gives each request an id, writes the request log and HTTP metrics,
and answers requests whose handler failed with an unexpected exception.

A `RequestRecord` collects facts about a request until its log line is written. The log line has
counts, times and the client's `metadata`, but never a prompt or an answer. The layer is plain ASGI,
so a handler learns of a disconnect at once. `RequestHistory` keeps the records of the last
requests, so that they can be explained.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.backends.base import BackendHolder
from engine.core.config_schema import Settings
from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import RequestNotes
from engine.core.observability.logging import REQUEST_ID
from engine.core.observability.metrics import Metrics
from engine.core.observability.tracing import TRACE, Answered, RequestTrace, client_trace

if TYPE_CHECKING:
    from engine.core.observability.otel import Telemetry
    from engine.servers.http.recorder import Recorder

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
    started: float = field(default_factory=lambda: time.monotonic())
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
    is_ending: bool = False  # whether the client may have seen the end of the answer
    ended: asyncio.Event | None = None  # set at the end, if somebody waits for it
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
        backends: BackendHolder,
        history: "RequestHistory",
        telemetry: "Telemetry | None" = None,
    ) -> None:
        self._app = app
        self._history = history
        self._telemetry = telemetry
        self._backends = backends
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
        self._history.begin(record)
        id_header = (b"x-request-id", record.request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = [*message.get("headers", ()), id_header]
                if record.warnings:
                    text = "; ".join(record.warnings)
                    headers.append((b"x-engine-warnings", text.encode("ascii", "replace")))
                if record.completion_id is not None:
                    record.backends = self._backends.current.answered_by(record.completion_id)
                    if record.backends:
                        names = ", ".join(record.backends)
                        headers.append((b"x-engine-backend", names.encode("ascii", "replace")))
                for name, value in record.limit_headers.items():
                    headers.append((name.encode(), value.encode()))
                message["headers"] = headers
            elif not message.get("more_body"):
                record.is_ending = True
            await send(message)

        token = REQUEST_ID.set(record.request_id)
        trace_token = TRACE.set(record.trace)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            from engine.servers.http.errors import error_response, opaque_error

            logger.exception("A request failed unexpectedly.")
            record.error_code = "internal_error"
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
            return client_trace(headers) if "traceparent" in headers else None
        return self._telemetry.begin(headers, started)

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.started
        route = scope["route"].path if "route" in scope else None
        self._metrics.http_request(route, scope["method"], record.status, seconds)
        if record.completion_id is not None:
            record.backends = self._backends.current.answered_by(record.completion_id)
            record.route, record.ended_at = route or "", record.started + seconds
            record.send = None  # it would keep the connection in memory
        self._history.end(record)
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


# Max seconds that `find` waits for a request whose answer is written, but not yet accounted.
MAX_ENDING_S = 10.0


class RequestHistory:
    """The records of the last requests that have ended. Records have no text of a request. With a
    `recorder`, the tokens of requests are stored, too.

    If there are too many records, the oldest one goes of the tenant that has most. So a flood of
    one tenant's requests leaves those of others.
    """

    def __init__(self, max_records: int = 0, recorder: "Recorder | None" = None) -> None:
        self._max_records = max_records
        self._records: dict[int, RequestRecord] = {}  # by number, the oldest first
        self._numbers: dict[str, deque[int]] = {}  # of each tenant's records, the oldest first
        self._next = count()
        self._open: dict[int, RequestRecord] = {}  # of requests that have not ended, by `id`
        self.recorder = recorder

    def notes_of(self, record: RequestRecord) -> "RequestNotes | None":
        """What the backend adds to while it runs the request. None if nobody reads it."""
        if self.recorder is not None:
            record.notes.recorded = []
            return record.notes
        is_read = self._max_records != 0 or record.trace is not None
        return record.notes if is_read else None

    def begin(self, record: RequestRecord) -> None:
        self._open[id(record)] = record

    def end(self, record: RequestRecord) -> None:
        """Keep the record of a request that has ended, if it was one to a model."""
        del self._open[id(record)]
        if record.completion_id is not None:
            self._add(record)
        if record.ended is not None:
            record.ended.set()

    def _add(self, record: RequestRecord) -> None:
        number = next(self._next)
        self._records[number] = record
        self._numbers.setdefault(record.tenant, deque()).append(number)
        if len(self._records) > self._max_records:
            self._drop()
        if self.recorder is not None:
            self.recorder.keep(record)

    def _drop(self) -> None:
        numbers = self._numbers
        tenant = max(numbers, key=lambda each: (len(numbers[each]), -numbers[each][0]))
        del self._records[numbers[tenant].popleft()]
        if not numbers[tenant]:
            del numbers[tenant]

    def newest(self, tenant: str | None) -> Iterator[RequestRecord]:
        """The records, newest first. If `tenant` is given, only those of its requests."""
        if tenant is None:
            return reversed(self._records.values())
        numbers = self._numbers.get(tenant, deque())
        return (self._records[number] for number in reversed(numbers))

    async def find(self, request_id: str, tenant: str | None) -> RequestRecord | None:
        """The newest record with this id, which is the id of the HTTP request or of the answer. A
        client that has just read the end of an answer finds its record.
        """
        ends = []
        for each in self._open.values():
            if each.is_ending and _is_meant(each, request_id) and tenant in (None, each.tenant):
                each.ended = each.ended or asyncio.Event()
                ends.append(each.ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_ENDING_S):
                for end in ends:
                    await end.wait()
        found = (each for each in self.newest(tenant) if _is_meant(each, request_id))
        return next(found, None)


def _is_meant(record: RequestRecord, request_id: str) -> bool:
    return request_id in (record.request_id, record.completion_id)
