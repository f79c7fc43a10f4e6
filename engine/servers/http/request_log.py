"""The outermost layer: each request's id, its log line, its HTTP metrics, and the last resort for
bugs.

Plain ASGI, so a disconnect reaches the handler as it happens. The log line has counts and times,
and the labels that a client attached for it (`metadata`); never a prompt or an answer.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.config_schema import Settings
from engine.core.observability.logging import request_context
from engine.core.observability.metrics import Metrics
from engine.servers.http.errors import error_response, opaque_error
from engine.servers.http.record import RequestRecord, new_request_id

logger = logging.getLogger("engine.request")

# Asked for every few seconds by machines, as metrics are; a line each would bury the rest.
_PROBES = frozenset({"/livez", "/readyz", "/health"})


class RequestLog:
    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        metrics: Metrics,
        answered_by: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._app = app
        self._answered_by = answered_by
        self._log_requests = settings.logging.log_requests
        self._quiet_routes = _PROBES | {settings.metrics.endpoint}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(new_request_id(Headers(scope=scope).get("x-request-id")), send=send)
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

        with request_context(record.request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                logger.exception("A request failed unexpectedly.")
                record.error_code = "INTERNAL_ERROR"
                if record.status == 0:
                    await error_response(opaque_error(), scope)(scope, receive, send_with_id)
            finally:
                self._report(scope, record)

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.started
        route = scope["route"].path if "route" in scope else None
        self._metrics.http_request(route, scope["method"], record.status, seconds)
        if not self._log_requests or route in self._quiet_routes:
            return
        fields: dict[str, Any] = {
            "method": scope["method"],
            "route": route or "unmatched",
            "status": record.status,
            "seconds": round(seconds, 6),
        }
        if record.error_code is not None:
            fields["error_code"] = record.error_code
        if record.completion_id is not None:
            record.backends = self._answered_by(record.completion_id)
        logger.info("request", extra=fields | record.work_fields())
