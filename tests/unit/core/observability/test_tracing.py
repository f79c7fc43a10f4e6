"""Traces of requests, as an OTLP receiver gets them."""

import asyncio
import io
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.backends.base import InferenceBackend
from engine.core.config_schema import TracingSettings
from engine.core.errors import ConfigError, UnavailableError
from engine.core.interfaces.backend import ModelCard
from engine.core.observability import otel
from engine.core.observability.logging import setup_logging
from engine.core.observability.metrics import Metrics
from engine.core.observability.tracing import Answered, client_trace, new_telemetry
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend, call_script
from tests.support.fakes.openai_requests import started
from tests.support.fakes.routed_replicas import replica, router
from tests.support.fakes.scripted_server import ENDING, HELLO, scripted_server, stream
from tests.support.servers.live_server import free_port, live_server, make_settings
from tests.support.servers.otlp_receiver import Receiver, Span, grpc_receiver, http_receiver
from tests.support.toy_engine.backend import ToyBackend

CLIENT_TRACE, CLIENT_SPAN = "a" * 32, "b" * 16
PARENT = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SECRET = "a secret of the client"
PHASES = ["prepare", "queue", "prefill", "decode", "respond"]
pytestmark = pytest.mark.seconds  # each test starts exporters and a receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with http_receiver() as made:
        yield made


def tracing(receiver: Receiver, **fields: Any) -> dict[str, Any]:
    return {"enabled": True, "endpoint": receiver.url} | fields


@asynccontextmanager
async def traced(
    backend: InferenceBackend, receiver: Receiver, **fields: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app whose spans have all arrived when the block ends."""
    app = create_app(
        make_settings(tracing=tracing(receiver, **fields)), backend, Metrics("engine-test")
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    for component in app.state.services.components:
        await component.stop()


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", PARENT)
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5} | fields
    return await client.post("/v1/chat/completions", json=body, headers=headers)


def root_of(receiver: Receiver) -> Span:
    (root,) = [span for span in receiver.spans if span.parent_id == CLIENT_SPAN]
    return root


def check_sum(receiver: Receiver, parent: Span) -> None:
    """The children follow one another and fill their parent."""
    children = receiver.children(parent)
    assert abs(sum(each.seconds for each in children) - parent.seconds) < 0.002
    for one, next_one in zip(children, children[1:], strict=False):
        assert abs(next_one.start_ns - one.end_ns) < 1_000_000


async def test_a_request_through_router_and_server_is_one_trace(receiver: Receiver) -> None:
    backend = FakeBackend()
    backend.prefill_s, backend.token_s = 0.02, 0.002
    with live_server(backend, tracing=tracing(receiver)) as server:
        async with started(f"{server.url}/v1") as remote:
            made = router(replica("far", remote))
            async with traced(made, receiver) as client:
                assert (await chat(client, stream=True)).status_code == 200
    assert {span.trace_id for span in receiver.spans} == {CLIENT_TRACE}
    ids = {span.span_id for span in receiver.spans} | {CLIENT_SPAN}
    assert all(span.parent_id in ids for span in receiver.spans)
    front = root_of(receiver)
    prepare, call, respond = receiver.children(front)
    assert [prepare.name, call.kind, respond.name] == ["prepare", 3, "respond"]
    assert [each.name for each in receiver.children(prepare)] == ["route"]
    (back,) = receiver.children(call)
    assert back.kind == 2 and [each.name for each in receiver.children(back)] == PHASES
    for span in (front, back):
        check_sum(receiver, span)


class Toy(ToyBackend):
    """The real engine with a toy model, which has no card of its own."""

    def models(self) -> list[ModelCard]:
        return [CARD]

    async def tokenizer_info(self, *, model: str = "") -> None:
        return None


async def test_engine_timings_become_spans(receiver: Receiver) -> None:
    backend = Toy()
    await backend.start()
    try:
        async with traced(router(replica("toy", backend)), receiver) as client:
            body = {"prompt": [1, 2, 3] * 6, "max_tokens": 4}
            answer = await client.post("/v1/completions", json=body, headers=PARENT)
            assert answer.status_code == 200, answer.text
    finally:
        await backend.stop()
    root = root_of(receiver)
    assert root.name == "text_completion m" and root.kind == 2
    phases = receiver.children(root)
    assert [each.name for each in phases] == PHASES
    check_sum(receiver, root)
    prepare, _, prefill, decode, _ = phases
    assert [each.name for each in receiver.children(prepare)] == ["route", "tokenize"]
    chunks = receiver.children(prefill)
    assert {each.name for each in chunks} == {"chunk"}
    assert sum(each.attributes["engine.chunk_tokens"] for each in chunks) == 18
    # The first step begins the prefill, and its last one has the first token.
    assert abs(chunks[0].start_ns - prefill.start_ns) < 1_000_000
    assert abs(chunks[-1].end_ns - prefill.end_ns) < 1_000_000
    assert decode.attributes["engine.steps"] == 3


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_spans_and_metrics_follow_the_otel_conventions(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-llm")
    make = grpc_receiver if protocol == "grpc" else http_receiver
    with make() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        async with traced(FakeBackend(), receiver, endpoint=None) as client:
            await chat(client, stream=True, temperature=0.5)
    root = root_of(receiver)
    assert root.name == f"chat {MODEL}" and root.service == "my-llm"
    expected = {
        "gen_ai.provider.name": "engine",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {key: root.attributes.get(key) for key in expected} == expected
    assert 0 < root.attributes["gen_ai.response.time_to_first_chunk"] <= root.seconds
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        (point,) = receiver.metrics[f"gen_ai.server.{name}"]
        assert point.count == 1 and 0 < point.sum < root.seconds + 1e-6


async def test_the_prefill_span_is_as_long_as_the_engine_reports(receiver: Receiver) -> None:
    backend = FakeBackend()
    backend.prefill_s = 0.05
    async with traced(backend, receiver) as client:
        await chat(client)
    assert abs(receiver.named("prefill").seconds - backend.prefill_s) < 1e-6


@pytest.mark.parametrize("captures", [False, True])
async def test_prompt_and_answer_are_in_traces_only_if_enabled(
    receiver: Receiver, captures: bool
) -> None:
    backend = FakeBackend()
    backend.script = call_script(("look", '{"where": "there"}'), said="Wait.")
    async with traced(backend, receiver, capture_content=captures) as client:
        await chat(client, tools=[TOOL])
    root = root_of(receiver)
    assert root.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
    sent = json.dumps([span.attributes for span in receiver.spans])
    for text in (SECRET, "there", "Wait."):
        assert (text in sent) == captures
    if captures:
        (answer,) = json.loads(root.attributes["gen_ai.output.messages"])
        call = {"type": "tool_call", "id": "call_0", "name": "look"}
        assert answer["parts"][1] == call | {"arguments": '{"where": "there"}'}


async def test_records_of_finished_requests_hold_no_trace(receiver: Receiver) -> None:
    app = create_app(
        make_settings(tracing=tracing(receiver)), FakeBackend(), Metrics("engine-test")
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await chat(client)
    services = app.state.services
    (record,) = services.history.newest(None)
    assert record.trace is None, "the trace has the prompt and the answer"
    for component in services.components:
        await component.stop()


async def test_tool_call_parsing_is_inside_the_decode_span(receiver: Receiver) -> None:
    backend = FakeBackend()
    backend.script = call_script(("look", "{}"), ("look", "{}"))
    async with traced(backend, receiver) as client:
        await chat(client, tools=[TOOL])
    parsing = receiver.named("parse tool calls")
    assert parsing.parent_id == receiver.named("decode").span_id
    assert parsing.attributes == {"engine.tool_calls": 2}


async def test_200_requests_at_once_lose_no_span(receiver: Receiver) -> None:
    async with traced(FakeBackend(), receiver) as client:
        answers = [chat(client, headers={}) for _ in range(200)]
        assert {each.status_code for each in await asyncio.gather(*answers)} == {200}
    assert len(receiver.spans) == 200 * (1 + len(PHASES))
    assert len({span.trace_id for span in receiver.spans}) == 200


@pytest.mark.parametrize(
    ("fields", "flags", "is_sent"),
    [
        ({"sample_ratio": 0.0}, None, False),
        ({"sample_ratio": 0.0}, "01", True),  # the client decides
        ({"sample_ratio": 1.0}, "00", False),
        ({"slow_s": 60.0}, "01", False),
        ({"slow_s": 0.0}, "01", True),
    ],
)
async def test_sampling_ratio_and_parent_flags_decide_which_traces_are_sent(
    receiver: Receiver, fields: dict[str, Any], flags: str | None, is_sent: bool
) -> None:
    parent = {} if flags is None else {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-{flags}"}
    async with traced(FakeBackend(), receiver, **fields) as client:
        await chat(client, headers=parent)
        await client.get("/v1/models", headers=parent)  # no model works for it
    assert len(receiver.spans) == is_sent * (1 + len(PHASES))
    (point,) = receiver.metrics["gen_ai.server.request.duration"]  # metrics are not sampled
    assert point.count == 1


async def test_the_span_of_a_failed_retry_ends_after_it_began(receiver: Receiver) -> None:
    telemetry = new_telemetry(TracingSettings(**tracing(receiver)))
    assert telemetry is not None
    trace = telemetry.begin(PARENT, time.monotonic())
    with trace.call("chat", "first", "other"):
        pass
    with pytest.raises(UnavailableError), trace.call("chat", "second", "other"):
        raise UnavailableError("gone")
    trace.end(
        Answered(
            method="POST",
            route="/v1/completions",
            status=503,
            is_stream=False,
            error_code=None,
            model=MODEL,
            completion_id=None,
            backends=(),
            ttft_s=None,
        )
    )
    await telemetry.stop()
    calls = receiver.children(root_of(receiver))
    assert [each.name for each in calls] == ["chat first", "chat second"]
    assert all(each.start_ns <= each.end_ns for each in calls)


async def test_a_failed_request_is_traced_however_quick_it_was(receiver: Receiver) -> None:
    backend = FakeBackend()
    backend.failure = UnavailableError("it is gone")
    async with traced(backend, receiver, slow_s=60.0) as client:
        assert (await chat(client)).status_code == 503
    root = root_of(receiver)
    assert root.is_error and root.attributes["error.type"] == "service_unavailable"
    (point,) = receiver.metrics["gen_ai.server.request.duration"]
    assert "error.type" in {each.key for each in point.attributes}
    assert "gen_ai.server.time_to_first_token" not in receiver.metrics


async def test_without_tracing_traceparent_headers_are_forwarded() -> None:
    answer = stream(*HELLO, *ENDING)
    async with scripted_server(answer) as server, started(server.url) as backend:
        app = create_app(make_settings(), backend, Metrics("m"))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await chat(client, headers=PARENT | {"tracestate": "vendor=1"}, max_tokens=None)
            await chat(client, headers={"traceparent": "00-zz-1-01"}, max_tokens=None)
    first, second = (post.headers for post in server.posts)
    assert first["traceparent"] == PARENT["traceparent"] and first["tracestate"] == "vendor=1"
    assert "traceparent" not in second


@pytest.mark.parametrize("format", ["json", "pretty"])
async def test_log_lines_carry_the_trace_id(format: str) -> None:
    text, root = io.StringIO(), logging.getLogger()
    before = root.level, list(root.handlers)
    setup_logging("info", format, text)
    try:
        app = create_app(make_settings(), FakeBackend(), Metrics("m"))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await chat(client)
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    if format == "json":
        line = json.loads(text.getvalue())
        assert (line["trace_id"], line["span_id"]) == (CLIENT_TRACE, CLIENT_SPAN)
    else:
        assert f"trace_id={CLIENT_TRACE}" in text.getvalue()


@pytest.mark.parametrize(
    "header",
    [
        f"00-{'0' * 32}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE}-{'0' * 16}-01",
        f"ff-{CLIENT_TRACE}-{CLIENT_SPAN}-01",
        f"00-{CLIENT_TRACE.upper()}-{CLIENT_SPAN}-01",
        "00-\r\nX-Evil: 1",
    ],
)
def test_invalid_traceparent_headers_are_ignored(header: str) -> None:
    assert client_trace({"traceparent": header}) is None


async def test_a_server_stops_although_its_trace_collector_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "STOP_S", 0.2)
    nowhere = {"enabled": True, "endpoint": f"http://127.0.0.1:{free_port()}"}
    app = create_app(make_settings(tracing=nowhere), FakeBackend(), Metrics("engine-test"))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await chat(client)
    began = time.monotonic()
    for component in app.state.services.components:
        await component.stop()
    assert time.monotonic() - began < 5, "the exporters try again for longer"


def test_otel_sdk_disabled_turns_tracing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert new_telemetry(TracingSettings(enabled=True)) is None


def test_a_missing_opentelemetry_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.core.observability.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'engine\[otel\]'"):
        create_app(make_settings(tracing={"enabled": True}), FakeBackend(), Metrics("m"))
