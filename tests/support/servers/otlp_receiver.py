"""An OTLP receiver over HTTP and gRPC, which keeps the spans and metrics that it gets."""

import gzip
import http.server
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


@dataclass
class Span:
    name: str
    kind: int  # 1: internal, 2: server, 3: client
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str
    is_error: bool

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass
class Receiver:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, list[Any]] = field(default_factory=dict)  # name -> data points

    def named(self, name: str) -> Span:
        (span,) = [each for each in self.spans if each.name == name]
        return span

    def children(self, parent: Span) -> list[Span]:
        """The children of a span in the order of their starts."""
        own = [each for each in self.spans if each.parent_id == parent.span_id]
        return sorted(own, key=lambda each: each.start_ns)

    def take_spans(self, request: trace_pb2.ExportTraceServiceRequest) -> None:
        for resource_spans in request.resource_spans:
            service = _attributes(resource_spans.resource.attributes)["service.name"]
            for scope in resource_spans.scope_spans:
                self.spans += [_span(each, service) for each in scope.spans]

    def take_metrics(self, request: metrics_pb2.ExportMetricsServiceRequest) -> None:
        for resource_metrics in request.resource_metrics:
            for scope in resource_metrics.scope_metrics:
                for metric in scope.metrics:
                    self.metrics[metric.name] = list(metric.histogram.data_points)


def _span(span: Any, service: str) -> Span:
    return Span(
        name=span.name,
        kind=span.kind,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        service=service,
        is_error=span.status.code == 2,
    )


def _attributes(found: Sequence[Any]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(each) for each in value.array_value.values)
    return getattr(value, kind)


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                receiver.take_spans(trace_pb2.ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                receiver.take_metrics(metrics_pb2.ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Traces(trace_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take_spans(request)
            return trace_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take_metrics(request)
            return metrics_pb2.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
