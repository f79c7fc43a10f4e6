"""The trace that a request belongs to. This module does not import OpenTelemetry.

A `RequestTrace` passes the trace headers of a client on to other servers, and log lines carry its
id. If `tracing.enabled` is set, requests have an `otel.RecordedTrace` instead, which also records
spans. All times are those of `time.monotonic`.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.config_schema import TracingSettings
    from engine.core.interfaces.backend import ChatRequest, CompletionRequest, Event, UsageEvent
    from engine.core.interfaces.timeline import Preparation, Timeline
    from engine.core.observability.otel import Telemetry

# Version, trace id, span id and flags, as the W3C defines the header `traceparent`.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-.{2}")
_TRACESTATE = re.compile(r"[ -~]{1,512}")

Attribute = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendWork:
    """What a backend did for one HTTP request. Times that are not known are None."""

    request: "ChatRequest | CompletionRequest | None"  # the first prompt; None for embeddings
    submitted_at: float | None  # when the prompt was checked and sent to the engine
    first_token_at: float | None
    ended_at: float
    usage: "UsageEvent | None"  # None if the request did not finish
    finish_reasons: tuple[str, ...]  # of each choice
    preparations: "Sequence[Preparation]" = ()
    timelines: "Sequence[Timeline]" = ()  # of each choice; only our own engine tells them
    longest: int  # generated tokens of the longest choice
    error_code: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How an HTTP request was answered."""

    method: str
    route: str
    status: int
    is_stream: bool
    error_code: str | None
    model: str | None  # the model that answered
    completion_id: str | None
    backends: tuple[str, ...]
    ttft_s: float | None


class RequestTrace:
    """The trace of one request. This class only knows the client's ids, and records nothing."""

    def __init__(self, trace_id: str, span_id: str, headers: Mapping[str, str]) -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self._headers = headers

    def note(
        self, name: str, began_at: float, ended_at: float, **attributes: Attribute | None
    ) -> None:
        """Record that a part of the work took place between these two times."""

    @contextmanager
    def call(self, operation: str, model: str, provider: str) -> Iterator[Mapping[str, str]]:
        """Record a call to another server. The block gets the headers that the server needs to
        join the trace.
        """
        yield self._headers

    def tap(self, request: "ChatRequest | CompletionRequest") -> "Callable[[Event], None] | None":
        """A function that wants to see all events of the answer, or None."""
        return None

    def worked(self, work: BackendWork) -> None:
        """Record what the backend did. This may be called after `end`, for background work."""

    def end(self, answered: Answered) -> None:
        """The HTTP request has ended."""


# The trace of the request that a task or thread serves. None if it has no trace.
TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)


def client_trace(headers: Mapping[str, str]) -> RequestTrace | None:
    """The trace that the client's headers name. None if they name none, or if they are invalid."""
    parent = headers.get("traceparent")
    if parent is None or (match := _TRACEPARENT.match(parent)) is None:
        return None
    passed = {"traceparent": match.group()}
    state = headers.get("tracestate")
    if state is not None and _TRACESTATE.fullmatch(state):
        passed["tracestate"] = state
    return RequestTrace(match[1], match[2], passed)


@contextmanager
def backend_call(operation: str, model: str, provider: str) -> Iterator[Mapping[str, str]]:
    """Record a call to another server in the current trace. The block gets the headers to send."""
    trace = TRACE.get()
    if trace is None:
        yield {}
        return
    with trace.call(operation, model, provider) as headers:
        yield headers


def new_telemetry(settings: "TracingSettings") -> "Telemetry | None":
    """What records and sends traces. None if `tracing.enabled` is not set, or if the usual
    variable of OpenTelemetry turns it off.
    """
    if not settings.enabled or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from engine.core.observability.otel import Telemetry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tracing.enabled needs {error.name}, which is missing: pip install 'engine[otel]'",
            param="tracing.enabled",
        ) from None
    return Telemetry(settings)
