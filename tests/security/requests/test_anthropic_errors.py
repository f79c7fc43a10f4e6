"""Every failure on Anthropic's routes has Anthropic's shape, whatever noticed it, and tells nothing
that it should not (SEC-02, SEC-03, SEC-04, SEC-06, SEC-24; T1, T2).
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from engine.core.errors import (
    EngineError,
    InvalidRequestError,
    ModelError,
    RateLimitError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, live_server, make_settings

KEY = "correct-horse-battery-staple-0123"
HEADERS = {"x-api-key": KEY}
PATHS = ["/v1/messages", "/v1/messages/count_tokens"]
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hello"}],
}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    body = ASK | fields
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    return body


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    settings = make_settings(server={"api_key": KEY, "body_limit_mb": 1})
    app = create_app(settings, backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=HEADERS
    ) as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"api_key": KEY, "body_limit_mb": 1}) as server:
        yield server


def kind_of(response: httpx.Response, status: int) -> str:
    """The error's type, once the shape has been checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    headers = response.headers
    assert body["request_id"] == headers["request-id"] == headers["x-request-id"]
    assert len(response.content) < 4096
    return str(body["error"]["type"])


@pytest.mark.parametrize("path", PATHS)
async def test_errors_before_the_messages_route_have_anthropics_shape(
    client: httpx.AsyncClient, path: str
) -> None:
    async def kind(status: int, **sent: Any) -> str:
        return kind_of(await client.post(path, **sent), status)

    wrong = {"x-api-key": "wrong"}
    assert await kind(401, json=body_for(path), headers=wrong) == "authentication_error"
    foreign = {"origin": "http://evil.example"}
    assert await kind(403, json=body_for(path), headers=foreign) == "permission_error"
    host = {"host": "evil.example"}
    assert await kind(400, json=body_for(path), headers=host) == "invalid_request_error"
    assert await kind(415, content=b"{}") == "invalid_request_error"
    assert await kind(413, json={"x": "y" * 2**20}) == "request_too_large"
    js = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000):
        assert await kind(400, content=content, headers=js) == "invalid_request_error"
    assert await kind(404, json=body_for(path, model="other")) == "not_found_error"
    assert kind_of(await client.get(path), 405) == "invalid_request_error"


async def test_unknown_paths_below_v1_messages_have_anthropics_error_shape(
    client: httpx.AsyncClient,
) -> None:
    for path in ("/v1/messages/batches/absent", "/v1/messages/", "/v1/messages/a/../b"):
        assert kind_of(await client.get(path), 404) == "not_found_error"
    for path in ("/v1/messagesx", "/v1/message", "/v1"):
        beside = await client.get(path)
        assert beside.status_code == 404
        assert beside.json().keys() == {"error"}
        assert "request-id" not in beside.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "retries"),
    [
        (InvalidRequestError("no"), 400, "invalid_request_error", False),
        (RequestTimeoutError("late"), 408, "timeout_error", False),
        (RateLimitError("full", retry_after=3), 429, "rate_limit_error", True),
        (EngineError("broken"), 500, "api_error", False),
        (ModelError("loading"), 503, "overloaded_error", True),
        (UnavailableError("draining"), 503, "overloaded_error", True),
    ],
)
async def test_backend_errors_map_to_anthropics_error_types(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    stream: bool,
    error: EngineError,
    status: int,
    kind: str,
    retries: bool,
) -> None:
    backend.refusal = error
    response = await client.post("/v1/messages", json=ASK | {"stream": stream})
    assert kind_of(response, status) == kind
    assert ("retry-after" in response.headers) is retries
    assert (response.headers.get("x-should-retry") != "false") is retries


async def test_an_internal_error_is_answered_without_its_text(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure = RuntimeError("secret at 0xdeadbeef")
    assert kind_of(await client.post("/v1/messages", json=ASK), 500) == "api_error"
    streamed = await client.post("/v1/messages", json=ASK | {"stream": True})
    assert "secret" not in streamed.text
    assert "message_stop" not in streamed.text

    async def broken(*_: Any, **__: Any) -> tuple[int, ...]:
        raise RuntimeError("secret at 0xdeadbeef")

    backend.tokenize = broken  # type: ignore[method-assign]
    counted = await client.post(PATHS[1], json=body_for(PATHS[1]))
    assert kind_of(counted, 500) == "api_error"
    assert "secret" not in counted.text


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


HOSTILE: list[dict[str, Any]] = [
    {"messages": ["x"] * 200_000},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 5_000}]},
    {"messages": [{"role": "x" * 100_000, "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]},
    {"messages": [{"role": "user", "content": "x", "y" * 100_000: 1}]},
    {"messages": [{"role": ["user"], "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]},
    {"system": [{"type": "text", "text": {"a": 1}}]},
    {"system": [["x"]] * 5_000},
    {"tools": [{}] * 5_000},
    {"tools": [{"name": "f" * 100_000, "input_schema": {}}]},
    {"tools": [{"name": "f\n", "input_schema": {}}]},
    {"tools": [{"name": "f", "input_schema": nested(70)}]},
    {"tools": [{"name": "f", "input_schema": {}, "description": "x" * 100_000}]},
    {"tool_choice": {"type": "tool", "name": "x" * 100_000}},
    {"thinking": {"type": "enabled", "budget_tokens": 2**80}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"x": "y" * 300_000}}}},
    {"cache_control": {"type": "ephemeral", "z" * 100_000: 1}},
    {"cache_control": {"type": ["ephemeral"], "ttl": {}}},
    {"context_management": nested(50)},
    {"x" * 100_000: 1},
    {f"k{i}": i for i in range(50_000)},
    {"model": "m" * 100_000},
]


@pytest.mark.parametrize("path", PATHS)
async def test_malformed_fields_are_refused_with_small_errors(
    client: httpx.AsyncClient, path: str
) -> None:
    for fields in HOSTILE:
        response = await client.post(path, json=body_for(path, **fields))
        assert kind_of(response, 400) == "invalid_request_error", str(fields)[:60]


async def post_with(client: httpx.AsyncClient, field: str, stream: bool = False) -> httpx.Response:
    """With a field as JSON text, since Python's own encoder would not write some values."""
    text = json.dumps(ASK | {"stream": stream})[:-1] + f", {field}}}"
    headers = {"content-type": "application/json"}
    return await client.post("/v1/messages", content=text.encode(), headers=headers)


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "top_k"])
async def test_numbers_out_of_range_are_invalid_request_errors(
    client: httpx.AsyncClient, name: str
) -> None:
    never = ["NaN", "Infinity", '"1"', "true", "[]", "9" * 5000]
    for value in ["-1", "1e308", str(2**65), *never]:
        response = await post_with(client, f'"{name}": {value}')
        assert kind_of(response, 400) == "invalid_request_error", value


@pytest.mark.parametrize("stream", [False, True])
async def test_lone_surrogates_are_invalid_request_errors(
    client: httpx.AsyncClient, stream: bool
) -> None:
    for field in (
        '"system": "\\ud800"',
        '"messages": [{"role": "user", "content": "\\udfff"}]',
        '"stop_sequences": ["\\ud800"]',
        '"metadata": {"user_id": "\\ud800"}',
        '"tools": [{"name": "f", "input_schema": {"title": "\\ud800"}}]',
    ):
        response = await post_with(client, field, stream)
        assert kind_of(response, 400) == "invalid_request_error", field


async def test_warnings_contain_no_client_text(client: httpx.AsyncClient) -> None:
    hostile = {"anthropic-version": "x-evil: 1"}
    scope = {"type": "ephemeral", "scope": "a\r\nx-evil: 1"}
    response = await client.post(
        "/v1/messages", json=ASK | {"cache_control": scope}, headers=hostile
    )
    assert response.status_code == 200
    assert "evil" not in str(response.headers)


@pytest.mark.parametrize(
    ("fields", "key", "expected"),
    [
        ({"max_tokens": 0}, KEY, anthropic.BadRequestError),
        ({}, "wrong", anthropic.AuthenticationError),
        ({"model": "other"}, KEY, anthropic.NotFoundError),
        ({"system": "x" * 2**20}, KEY, anthropic.ContentTooLargeError),
    ],
)
def test_the_anthropic_client_raises_its_own_exceptions(
    server: LiveServer, fields: dict[str, Any], key: str, expected: type[anthropic.APIStatusError]
) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)
    with client, pytest.raises(expected) as caught:
        client.messages.create(**ASK | fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert caught.value.request_id == body["request_id"]


def test_the_anthropic_client_retries_a_busy_server(server: LiveServer) -> None:
    server.backend.reset()
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    for error, expected in (
        (RateLimitError("full"), anthropic.RateLimitError),
        (UnavailableError("draining"), anthropic.InternalServerError),
    ):
        server.backend.refusal = error
        with pytest.raises(expected) as caught:
            client.messages.create(**ASK)
        assert caught.value.response.headers["retry-after"] == "1"
        assert "x-should-retry" not in caught.value.response.headers
    client.close()
