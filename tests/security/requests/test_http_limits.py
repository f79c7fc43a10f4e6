"""Hostile bytes: too many, too deep, too slow, or not what they say they are (SEC-03, SEC-04,
SEC-06, SEC-20, SEC-26; T2).
"""

import json
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.http import limits, protocol
from engine.servers.http.limits import MAX_DEPTH, check_depth, decode_object
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import (
    LiveServer,
    chat,
    live_server,
    make_settings,
    wait_until,
)

JSON = {"content-type": "application/json"}
MEGABYTE = 2**20


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(server={"body_limit_mb": 1}), FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"body_limit_mb": 1}) as server:
        yield server


async def post(client: httpx.AsyncClient, body: bytes) -> httpx.Response:
    return await client.post("/v1/chat/completions", content=body, headers=JSON)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        (JSON | {"content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        (JSON | {"content-encoding": "identity"}, 200),
    ],
)
async def test_content_type_must_be_json(
    client: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    body = json.dumps(chat()).encode()
    response = await client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{} {}",
        b"\xef\xbb\xbf{}",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "\xed\xa0\x80"}',
    ],
)
async def test_bodies_that_are_not_json_objects_are_400(
    client: httpx.AsyncClient, body: bytes
) -> None:
    response = await post(client, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert len(response.content) < 1000


async def test_invalid_utf_8_is_reported_with_its_position(client: httpx.AsyncClient) -> None:
    response = await post(client, b'{"model": "m", "messages": [{"content": "a\xffb"}]}')
    message = response.json()["error"]["message"]
    assert message == "The request body is not UTF-8: invalid start byte (0xff)."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        '"model": "\\ud800x"',
        '"user": "\\udfff"',
        '"stop": ["\\ud800"]',
        '"logit_bias": {"\\ud800": 1}',
        '"messages": [{"role": "user", "content": "\\ud800"}]',
        '"\\ud800": 1',
        '"metadata": {"a": "\\ud800"}',
        '"tools": [{"type": "function", "function": {"name": "f", "description": "\\ud800"}}]',
        '"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "\\ud800"}}}',
        r'"guided_json": "{\"const\": \"\\ud800\"}"',
    ],
)
async def test_lone_surrogates_in_request_fields_are_400(
    client: httpx.AsyncClient, field: str, stream: bool
) -> None:
    text = json.dumps(chat(stream=stream))[:-1] + f", {field}}}"
    assert (await post(client, text.encode())).status_code == 400


async def test_unusual_unicode_is_accepted_as_text(client: httpx.AsyncClient) -> None:
    for text in ("\x00", "\u2028", "e" + "\u0301" * 100_000, "\u200b" * 1000, "\u202e", "😀"):
        messages = [{"role": "user", "content": text}]
        response = await post(client, json.dumps(chat(messages=messages)).encode())
        assert response.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{}] * 100_000},
        {"tools": [{"type": "function", "function": {"name": "f" * 500_000}}]},
        {"tool_choice": {"x" * 500_000: 1}},
        {"tool_choice": "x" * 500_000},
        {"guided_choice": ["x"] * 100_000},
        {"guided_json": "[" * 500_000},
        {"guided_regex": "(" * 500_000},
        {"response_format": {"type": "x" * 500_000}},
        {"structured_outputs": {"x" * 500_000: 1}},
        {"metadata": {str(i): "" for i in range(50_000)}},
        {"chat_template_kwargs": {str(i): 0 for i in range(50_000)}},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 100_000}]},
        {"messages": [{"role": "x" * 500_000}]},
        {"messages": [{"role": "user", "content": "a", "x" * 500_000: 1}]},
    ],
)
async def test_large_invalid_fields_get_small_error_responses(
    client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    response = await post(client, json.dumps(chat(**fields)).encode())
    assert response.status_code == 400
    assert len(response.content) < 1000


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_json_nesting_depth_is_counted_outside_strings() -> None:
    decode_object(nested(MAX_DEPTH))
    with pytest.raises(InvalidRequestError, match="levels deep"):
        decode_object(nested(MAX_DEPTH + 1))
    brackets = "[{" * 1000
    for text in (brackets, brackets + '"', '\\"' + brackets, "\\\\" + brackets, '"[' * 500):
        assert decode_object(json.dumps({"a": text}).encode()) == {"a": text}
    wide = json.dumps({"a": [[1]] * 1000}).encode()
    assert len(decode_object(wide)["a"]) == 1000
    with pytest.raises(InvalidRequestError, match="levels deep"):
        check_depth(b'{"\\\\":' + nested(MAX_DEPTH) + b"}")


async def test_bodies_over_the_size_limit_are_413(client: httpx.AsyncClient) -> None:
    announced = await post(client, b" " * (MEGABYTE + 1))
    assert announced.status_code == 413
    assert announced.json()["error"]["code"] == "context_length_exceeded"
    assert announced.headers["connection"] == "close"
    just_fits = json.dumps(chat(user="x" * 400)).encode()
    just_fits += b" " * (MEGABYTE - len(just_fits))
    assert (await post(client, just_fits)).status_code == 200


async def test_a_chunked_body_is_refused_as_soon_as_it_exceeds_the_limit(
    client: httpx.AsyncClient,
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100 * MEGABYTE:
            sent += 65536
            yield b" " * 65536

    response = await client.post("/v1/chat/completions", content=endless(), headers=JSON)
    assert response.status_code == 413
    assert sent < 2 * MEGABYTE


async def test_a_body_over_the_limit_that_might_fit_the_context_is_413() -> None:
    backend = FakeBackend()
    backend.set_card(max_model_len=MEGABYTE)
    app = create_app(make_settings(server={"body_limit_mb": 1}), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await post(client, b" " * (MEGABYTE + 1))).status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        {"model": MODEL, "prompt": [1] * 200_000 + ["x"]},
        {"model": MODEL, "prompt": ["x"] * 200_000},
        {"model": MODEL, "prompt": "x", "stop_token_ids": ["x"] * 200_000},
        {"model": MODEL, "prompt": "x", "logit_bias": {str(i): "x" for i in range(50_000)}},
        {"model": MODEL, "prompt": "x", "x" * 100_000: 1},
        {"model": "m" * 500_000, "prompt": "x"},
        {"model": "m" * 256, "prompt": "x"},
        {f"k{i}": i for i in range(50_000)},
    ],
)
async def test_error_responses_stay_small(
    client: httpx.AsyncClient, body: dict[str, object]
) -> None:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 8192


def exchange(server: LiveServer, *pieces: bytes) -> bytes:
    """Everything the server says until it closes the connection."""
    answer = b""
    with server.connect() as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while data := connection.recv(65536):
                answer += data
        except ConnectionError:
            pass
    return answer


GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "extra",
    [
        b"X: " + b"y" * 70_000 + b"\r\n",
        b"X: " + b"y" * 400_000 + b"\r\n",
        b"".join(b"X-%d: y\r\n" % i for i in range(120)),
        b"Content-Length: -1\r\n",
        b"Content-Length: x\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Host: localhost\r\n",
        b"Bad Name: x\r\n",
    ],
)
def test_invalid_http_request_heads_are_refused(server: LiveServer, extra: bytes) -> None:
    assert exchange(server, GET, b"\r\n").startswith(b"HTTP/1.1 200")
    answer = exchange(server, GET, extra, b"\r\n")
    if extra.startswith(b"Host"):
        assert answer.startswith(b"HTTP/1.1 200")  # probes answer to any host
        answer = exchange(server, GET.replace(b"/livez", b"/v1/models"), extra, b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400"), answer[:100]
    long_line = GET.replace(b"/livez", b"/" + b"x" * 9000)
    assert exchange(server, long_line, b"\r\n").startswith(b"HTTP/1.1 400")


def test_silent_and_slow_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.1)
    with live_server() as server:
        assert exchange(server) == b""
        assert exchange(server, b"GET /livez HT") == b""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        slow_body = head + b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        assert exchange(server, slow_body).startswith(b"HTTP/1.1 408")
        # A second request on one connection has its own deadline.
        keep_alive = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert exchange(server, keep_alive, b"GET /li").startswith(b"HTTP/1.1 200")


def test_the_oldest_idle_connection_is_closed_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 3)
    backend = FakeBackend()
    backend.token_s = 60
    with live_server(backend) as server, server.connect() as busy:
        server.post_raw(busy, "/v1/chat/completions", chat(stream=True))
        wait_until(lambda: backend.num_open == 1)
        idle = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(2)]
        assert httpx.get(server.url + "/livez").status_code == 200
        assert idle[0].recv(1) == b""  # closed by the server
        assert backend.num_open == 1
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "connections"),
    [
        (1024, 20_000, 8704, 8192),
        (1024, resource.RLIM_INFINITY, 8704, 8192),
        (1024, 1024, 1024, 512),
        (256, 256, 256, 64),
        (65_536, 65_536, 65_536, 8192),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192),
    ],
)
def test_connections_never_use_every_file_descriptor(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, connections: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: limits.append(pair))
    protocol.raise_file_limit()
    assert limits[-1] == (raised, hard)
    assert protocol.max_connections() == connections
