"""Sends traces and metrics of requests by OTLP. Only a server with `tracing.enabled` imports this.

A request's spans are made when it ends, from the times that the server and the engine noted. Only
the request's own span and those of calls to other servers exist before, because their ids are sent
on. Names follow OpenTelemetry's semantic conventions for generative AI.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)

from engine import __version__
from engine.core.config_schema import TracingSettings
from engine.core.interfaces.backend import ChatRequest, CompletionRequest, Event
from engine.core.observability.otel_content import AnswerTap, input_text
from engine.core.observability.otel_exporters import ServerMetrics, span_exporter
from engine.core.observability.trace_phases import PlannedSpan, details_of, phases_of
from engine.core.observability.tracing import Answered, Attribute, BackendWork, RequestTrace

PROVIDER = "engine"
# Spans that wait to be sent. OpenTelemetry's default of 2,048 is less than two seconds of a busy
# server.
MAX_QUEUED_SPANS = 65_536
# Max seconds that a stopping server waits for its collector.
STOP_S = 5.0


class Telemetry:
    """The exporters of a server, and the settings of its traces."""

    def __init__(self, settings: TracingSettings) -> None:
        found = OTELResourceDetector().detect().attributes
        resource = Resource.create(
            {"service.name": "engine", "service.version": __version__, **found}
        )
        ratio = settings.sample_ratio
        self._provider = TracerProvider(
            resource=resource,
            # Without a sampler, the provider reads OTEL_TRACES_SAMPLER.
            sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
            shutdown_on_exit=False,
        )
        exporter = span_exporter(settings)
        if exporter is not None:
            queue = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else MAX_QUEUED_SPANS
            self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=queue))
        self.tracer = self._provider.get_tracer("engine", __version__)
        self.metrics = ServerMetrics(settings, resource)
        self.slow_s = settings.slow_s
        self.captures_content = settings.capture_content

    def begin(self, headers: Mapping[str, str], started: float) -> "RecordedTrace":
        return RecordedTrace(self, headers, started)

    async def start(self) -> None:
        """Does nothing: the exporters' threads already run."""

    async def stop(self) -> None:
        """Send what is waiting to be sent, in at most `STOP_S` seconds."""
        # If the collector can't be reached, the exporters try again for many seconds. Threads that
        # are daemons do not keep the process alive meanwhile.
        closings = (self._provider.shutdown, self.metrics.close)
        threads = [threading.Thread(target=each, daemon=True) for each in closings]
        for thread in threads:
            thread.start()
        until = time.monotonic() + STOP_S
        for thread in threads:
            await asyncio.to_thread(thread.join, max(until - time.monotonic(), 0.0))


class RecordedTrace(RequestTrace):
    def __init__(self, telemetry: Telemetry, headers: Mapping[str, str], started: float) -> None:
        self._telemetry = telemetry
        self._started = started
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        parent = propagate.extract(headers)
        self._root = telemetry.tracer.start_span(
            PROVIDER, parent, SpanKind.SERVER, start_time=self._ns(started)
        )
        self._context = set_span_in_context(self._root, parent)
        ids = self._root.get_span_context()
        super().__init__(format_trace_id(ids.trace_id), format_span_id(ids.span_id), {})
        self._notes: list[PlannedSpan] = []
        self._calls: list[tuple[Span, float]] = []  # calls to other servers, and when they ended
        # When the call to the server that answered began and ended. None: no other server did.
        self._remote: tuple[float, float] | None = None
        self._tap: AnswerTap | None = None
        self._work: BackendWork | None = None
        # Whether the trace is sent. It is decided when the request ends.
        self._is_kept: bool | None = None

    def note(
        self, name: str, began_at: float, ended_at: float, **attributes: Attribute | None
    ) -> None:
        known = {f"engine.{key}": value for key, value in attributes.items() if value is not None}
        self._notes.append(PlannedSpan(name, began_at, ended_at, known))

    @contextmanager
    def call(self, operation: str, model: str, provider: str) -> Iterator[Mapping[str, str]]:
        began_at = time.monotonic()
        span = self._telemetry.tracer.start_span(
            f"{operation} {model}",
            self._context,
            SpanKind.CLIENT,
            _operation(operation, model) | {"gen_ai.provider.name": provider},
            start_time=self._ns(began_at),
        )
        headers: dict[str, str] = {}
        propagate.inject(headers, set_span_in_context(span, self._context))
        is_answered = False
        try:
            yield headers
            is_answered = True
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise
        finally:
            ended_at = time.monotonic()
            if is_answered:
                self._remote = began_at, ended_at
            self._calls.append((span, ended_at))
            if self._is_kept is not None:  # shadow traffic may end after its request
                self._flush()

    def tap(self, request: ChatRequest | CompletionRequest) -> Callable[[Event], None] | None:
        captures = self._telemetry.captures_content
        has_tools = isinstance(request, ChatRequest) and bool(request.tools)
        if not self._root.is_recording() or not (captures or has_tools):
            return None
        self._tap = AnswerTap(captures)
        return self._tap

    def worked(self, work: BackendWork) -> None:
        self._work = work
        if self._is_kept is not None:
            self._add_phases(work, None)
            self._flush()

    def end(self, answered: Answered) -> None:
        now = time.monotonic()
        work, error = self._work, _error(answered, self._work)
        operation = _operation_name(work)
        if work is not None:
            self._telemetry.metrics.record(
                _operation(operation, answered.model or "") | {"gen_ai.provider.name": PROVIDER},
                work,
                seconds=now - self._started,
                ttft_s=answered.ttft_s,
                error=error,
            )
        slow_s = self._telemetry.slow_s
        is_wanted = slow_s is None or error is not None or now - self._started > slow_s
        self._is_kept = self._root.is_recording() and is_wanted
        if not self._is_kept:
            return
        model = answered.model
        self._root.update_name(
            f"{answered.method} {answered.route}" if model is None else f"{operation} {model}"
        )
        self._root.set_attributes(_answer_attributes(answered))
        if error is not None:
            self._root.set_attribute("error.type", error)
            self._root.set_status(Status(StatusCode.ERROR))
        if work is not None:
            self._describe(work, operation)
            self._add_phases(work, now)
        self._flush()
        self._root.end(self._ns(now))

    def _describe(self, work: BackendWork, operation: str) -> None:
        self._root.set_attributes(_work_attributes(work, operation))
        reasons = self._tap.finish_reasons if self._tap is not None else ()
        self._root.set_attribute("gen_ai.response.finish_reasons", reasons or work.finish_reasons)
        if self._telemetry.captures_content and work.request is not None:
            self._root.set_attribute("gen_ai.input.messages", input_text(work.request))
            if self._tap is not None:
                self._root.set_attribute("gen_ai.output.messages", self._tap.output_text())

    def _add_phases(self, work: BackendWork, ended_at: float | None) -> None:
        """Make the spans of the request's phases, and inside of them those of its notes."""
        if not self._is_kept:
            return
        phases = phases_of(work, self._started, self._remote)
        if ended_at is not None and phases:
            answered_at = work.ended_at if self._remote is None else self._remote[1]
            phases.append(PlannedSpan("respond", answered_at, ended_at))
        self._notes += details_of(work)
        if self._tap is not None and self._tap.num_calls:
            calls = {"engine.tool_calls": self._tap.num_calls}
            # Tokens are parsed before their arrival is noted, so a call may seem to begin earlier.
            began_at = max(self._tap.first_call_at, work.first_token_at or 0.0)
            last_at = max(self._tap.last_call_at, began_at)
            self._notes.append(PlannedSpan("parse tool calls", began_at, last_at, calls))
        parents = [(phase.began_at, self._make(phase, self._context)) for phase in phases]
        for note in self._notes:
            middle = (note.began_at + note.ended_at) / 2
            around = (context for began_at, context in reversed(parents) if began_at <= middle)
            self._make(note, next(around, self._context))
        self._notes.clear()

    def _flush(self) -> None:
        """Hand the spans that exist to the exporter."""
        if self._is_kept:
            for note in self._notes:
                self._make(note, self._context)
            for span, ended_at in self._calls:
                span.end(self._ns(ended_at))
        self._notes.clear()
        self._calls.clear()

    def _make(self, part: PlannedSpan, parent: Context) -> Context:
        span = self._telemetry.tracer.start_span(
            part.name, parent, attributes=part.attributes, start_time=self._ns(part.began_at)
        )
        span.end(self._ns(part.ended_at))
        return set_span_in_context(span, parent)

    def _ns(self, moment: float) -> int:
        return int(moment * 1e9) + self._offset_ns


def _operation_name(work: BackendWork | None) -> str:
    if work is None or isinstance(work.request, ChatRequest):
        return "chat"
    return "embeddings" if work.request is None else "text_completion"


def _operation(operation: str, model: str) -> dict[str, Attribute]:
    return {"gen_ai.operation.name": operation, "gen_ai.request.model": model}


def _error(answered: Answered, work: BackendWork | None) -> str | None:
    """The type of the error that the server is to blame for, or None."""
    if work is not None and work.error_code is not None:
        return work.error_code
    if answered.status >= 500 or answered.status == 0:
        return answered.error_code or str(answered.status)
    return None


def _answer_attributes(answered: Answered) -> dict[str, Attribute]:
    found: dict[str, Attribute | None] = {
        "gen_ai.provider.name": PROVIDER,
        "http.request.method": answered.method,
        "http.route": answered.route,
        "http.response.status_code": answered.status,
        "gen_ai.request.stream": answered.is_stream,
        "gen_ai.response.id": answered.completion_id,
        "gen_ai.response.model": answered.model,
        "gen_ai.response.time_to_first_chunk": answered.ttft_s if answered.is_stream else None,
        "engine.backends": answered.backends or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _work_attributes(work: BackendWork, operation: str) -> dict[str, Attribute]:
    found: dict[str, Attribute | None] = {"gen_ai.operation.name": operation}
    if work.request is not None:
        params = work.request.context.params
        found |= {
            "gen_ai.request.model": work.request.context.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        }
    usage = work.usage
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
            "engine.revivals": usage.num_revivals or None,
        }
    return {name: value for name, value in found.items() if value is not None}
