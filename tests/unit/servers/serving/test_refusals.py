"""Refusals: each says when to come back, is an HTTP status in every dialect, streaming or not, and
is explained by its own words.
"""

import ast
import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.types import Message, Scope

import engine
from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

REFUSALS: list[EngineError] = [
    RateLimitError("This request would wait about 41 s.", retry_after=41.2),
    RateLimitError("Too many requests are waiting; try again later.", retry_after=7.0),
    InvalidRequestError("The request needs room for 9 tokens; the KV cache holds 8."),
    InvalidRequestError("This engine serves no LoRA adapters.", param="model"),
    InvalidRequestError("The grammar is wrong.", param="response_format"),
    RequestTimeoutError("The request's time limit passed before it began."),
    UnavailableError("The engine is restarting; try again.", retry_after=2.0),
]
MESSAGES = chat()["messages"]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": MODEL, "prompt": "a b"},
    "/v1/responses": {"model": MODEL, "input": "a b", "store": False},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 5},
    "/generate": {"prompt": "a b"},
    "/completion": {"prompt": "a b"},
    "/api/chat": {"model": MODEL, "messages": MESSAGES},
    "/api/generate": {"model": MODEL, "prompt": "a b"},
    f"/v2/models/{MODEL}/generate": {"text_input": "a b"},
    f"/v2/models/{MODEL}/generate_stream": {"text_input": "a b"},
}


UNSTREAMED = f"/v2/models/{MODEL}/generate"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def app(backend: FakeBackend, tmp_path: Path) -> FastAPI:
    return create_app(make_settings(storage={"path": tmp_path}), backend, Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_refusal_is_an_http_status_in_every_dialect(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, stream: bool
) -> None:
    body = ROUTES[path] if path.startswith("/v2") else ROUTES[path] | {"stream": stream}
    for refusal in REFUSALS:
        backend.refusal = refusal
        answer = await client.post(path, json=body)
        assert answer.status_code == refusal.status, (refusal, answer.text)
        assert refusal.message in answer.text
        if refusal.status in (429, 503):
            assert refusal.retry_after is not None
            told = int(answer.headers["retry-after"])
            assert refusal.retry_after <= told < refusal.retry_after + 1


@pytest.mark.parametrize("path", ROUTES)
async def test_a_refusal_after_a_long_queue_time_is_an_http_status_in_every_dialect(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.0)
    body = ROUTES[path] if path.startswith("/v2") else ROUTES[path] | {"stream": True}
    for refusal in REFUSALS:
        backend.refusal, backend.turn = refusal, asyncio.Event()
        asking = asyncio.create_task(client.post(path, json=body))
        await asyncio.wait([asking], timeout=0.05)
        backend.turn.set()
        answer = await asking
        assert answer.status_code == refusal.status, (refusal, answer.text)
        assert refusal.message in answer.text


@pytest.mark.parametrize("path", [each for each in ROUTES if each != UNSTREAMED])
async def test_stream_headers_are_sent_as_soon_as_the_request_is_scheduled_and_not_before(
    app: FastAPI, backend: FakeBackend, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.0)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    backend.turn, backend.prefill_s = asyncio.Event(), 3600.0
    asked = ROUTES[path] if path.startswith("/v2") else ROUTES[path] | {"stream": True}
    body = msgspec.json.encode(asked)
    sent: asyncio.Queue[Message] = asyncio.Queue()
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        if (part := next(parts, None)) is None:
            await asyncio.Event().wait()
        return part

    asking = asyncio.create_task(app(_scope(path), receive, sent.put))
    try:
        while not backend.requests:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert sent.empty()
        backend.turn.set()
        assert (await sent.get())["status"] == 200  # the prompt takes an hour
    finally:
        asking.cancel()
        await asyncio.wait([asking])


def _scope(path: str) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.message[:24])
async def test_a_refused_request_is_explained(
    client: httpx.AsyncClient, backend: FakeBackend, refusal: EngineError, stream: bool
) -> None:
    backend.refusal = refusal
    answer = await client.post("/v1/chat/completions", json=chat(stream=stream))
    told = await client.get(f"/v1/admin/requests/{answer.headers['x-request-id']}")
    assert told.status_code == 200, told.text
    explained = told.json()
    assert explained["cause"] == "refused"
    assert refusal.message in explained["explanation"]
    assert explained["error_code"] == refusal.error_code


def calls_without_retry_after(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        is_told = any(keyword.arg == "retry_after" for keyword in node.keywords)
        if node.func.id == "RateLimitError" and not is_told:
            found.append(f"{path}:{node.lineno}")
    return found


def test_every_overload_error_has_a_retry_after() -> None:
    files = Path(engine.__file__).parent.rglob("*.py")
    assert [call for path in files for call in calls_without_retry_after(path)] == []
