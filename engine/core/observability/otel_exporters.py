"""Makes the OTLP exporters, and records OpenTelemetry's metrics of generative AI servers."""

import os
from collections.abc import Mapping

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from engine.core.config_schema import TracingSettings
from engine.core.errors import ConfigError
from engine.core.observability.tracing import Attribute, BackendWork

# Bucket edges in seconds, as the semantic conventions advise.
_REQUEST_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def span_exporter(settings: TracingSettings) -> SpanExporter | None:
    """The exporter of traces. None if OTEL_TRACES_EXPORTER is "none"."""
    kind = _exporter_kind("TRACES")
    if kind == "none":
        return None
    if kind == "console":
        return ConsoleSpanExporter()
    if _protocol(settings, "TRACES") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=settings.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=_http_endpoint(settings, "traces"))


def _metric_exporter(settings: TracingSettings) -> MetricExporter | None:
    kind = _exporter_kind("METRICS")
    if kind == "none":
        return None
    if kind == "console":
        return ConsoleMetricExporter()
    if _protocol(settings, "METRICS") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
            OTLPMetricExporter as GrpcExporter,
        )

        return GrpcExporter(endpoint=settings.endpoint)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(endpoint=_http_endpoint(settings, "metrics"))


def _exporter_kind(signal: str) -> str:
    variable = f"OTEL_{signal}_EXPORTER"
    kind = os.environ.get(variable, "").strip() or "otlp"
    if kind not in ("otlp", "console", "none"):
        raise ConfigError(f"{variable}={kind}: supported are otlp, console and none")
    return kind


def _protocol(settings: TracingSettings, signal: str) -> str:
    if settings.protocol is not None:
        return settings.protocol
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "").strip()
        if protocol in ("http/protobuf", "grpc"):
            return protocol
        if protocol:
            raise ConfigError(f"{variable}={protocol}: supported are http/protobuf and grpc")
    return "http/protobuf"


def _http_endpoint(settings: TracingSettings, signal: str) -> str | None:
    """The URL of a signal below `tracing.endpoint`. If None, the exporter reads OTEL_*."""
    return None if settings.endpoint is None else f"{settings.endpoint.rstrip('/')}/v1/{signal}"


class ServerMetrics:
    """The histograms `gen_ai.server.*`, sent in intervals. All requests count, traced or not."""

    def __init__(self, settings: TracingSettings, resource: Resource) -> None:
        exporter = _metric_exporter(settings)
        readers = () if exporter is None else (PeriodicExportingMetricReader(exporter),)
        self._provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("engine")
        self._request = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time from arrival to the end",
            explicit_bucket_boundaries_advisory=_REQUEST_S,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from arrival to the first token of requests without error",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_S,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Mean time per token after the first, of requests without error",
            explicit_bucket_boundaries_advisory=_PER_TOKEN_S,
        )

    def record(
        self,
        attributes: Mapping[str, Attribute],
        work: BackendWork,
        *,
        seconds: float,
        ttft_s: float | None,
        error: str | None,
    ) -> None:
        if error is not None:
            self._request.record(seconds, {**attributes, "error.type": error})
            return
        self._request.record(seconds, attributes)
        if ttft_s is not None:
            self._first_token.record(ttft_s, attributes)
            if work.longest > 1 and work.first_token_at is not None:
                decode_s = work.ended_at - work.first_token_at
                self._per_token.record(decode_s / (work.longest - 1), attributes)

    def close(self) -> None:
        self._provider.shutdown()
