"""Nobody gets in without the key, and no page gets a visitor's browser to use the server
(SEC-22, SEC-27; T1).
"""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from engine.core.observability.metrics import Metrics
from engine.servers.access import auth
from engine.servers.app import create_app
from engine.servers.http.errors import is_kserve
from engine.servers.ui.routes import PageRoute
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, chat, live_server, make_settings

KEY = "correct-horse-battery-staple-0123"
TOKEN = "scrape-token-0123456789abcdef"
BEARER = {"authorization": f"Bearer {KEY}"}
OPEN_WITHOUT_KEY = {
    *("/livez", "/readyz", "/health", "/healthz", "/v2/health/live", "/v2/health/ready")
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def app_with(**sections: dict[str, Any]) -> FastAPI:
    return create_app(make_settings(**sections), FakeBackend(), Metrics(MODEL))


def client_for(app: FastAPI, host: str = "localhost") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=f"http://{host}")


@pytest.fixture
def app() -> FastAPI:
    limits = {"auth_failures_per_minute": 10_000}
    return app_with(server={"api_key": KEY}, metrics={"token": TOKEN}, limits=limits)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(app) as client:
        yield client


@pytest.fixture(scope="module")
def locked_server() -> Iterator[LiveServer]:
    with live_server(server={"api_key": KEY}) as server:
        yield server


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    found = []
    for route in app.routes:
        if isinstance(
            route, PageRoute
        ):  # the page's files; see tests/unit/servers/test_server_ui.py
            continue
        assert isinstance(route, APIRoute), f"{route} is not covered by the matrix"
        path = re.sub(r"\{[^}]+\}", "x", route.path_format)
        found += [(method, path) for method in route.methods]
    return found


async def test_every_route_needs_the_key(app: FastAPI, client: httpx.AsyncClient) -> None:
    routes = routes_of(app)
    assert len(routes) >= 14
    for registered, path in routes:
        for method in METHODS:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
                response = await client.request(method, path, headers=headers)
                if path in OPEN_WITHOUT_KEY and (method, path) in routes:
                    assert response.status_code == 200
                    assert method == "HEAD" or list(response.json()) == ["status"]
                else:
                    assert response.status_code in (401, 405), (method, path)
        if path not in OPEN_WITHOUT_KEY:
            refused = await client.request(registered, path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            # Anthropic's own routes have its shape: ../requests/test_anthropic_errors.py.
            if (path.startswith("/api/") or is_kserve(path)) and registered != "HEAD":
                assert isinstance(refused.json()["error"], str)
            elif not path.startswith("/v1/messages") and registered != "HEAD":
                assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_only_probes_are_public() -> None:
    assert auth.PUBLIC_ROUTES == OPEN_WITHOUT_KEY


@pytest.mark.parametrize(
    "headers",
    [
        BEARER,
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"authorization": "Bearer other", "api-key": KEY},
    ],
)
async def test_the_api_key_is_accepted_in_every_header_that_clients_use(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"],
)
async def test_malformed_authorization_headers_are_401(
    client: httpx.AsyncClient, value: str
) -> None:
    response = await client.get("/v1/models", headers={"authorization": value})
    assert response.status_code == 401
    assert KEY not in response.text


async def test_the_metrics_token_opens_only_metrics(client: httpx.AsyncClient) -> None:
    scraper = {"authorization": f"Bearer {TOKEN}"}
    assert (await client.get("/metrics", headers=scraper)).status_code == 200
    assert (await client.get("/metrics", headers=BEARER)).status_code == 200
    assert (await client.get("/metrics")).status_code == 401
    assert (await client.get("/v1/models", headers=scraper)).status_code == 401
    assert list((await client.get("/health", headers=scraper)).json()) == ["status"]


async def test_a_metrics_token_without_an_api_key_protects_metrics() -> None:
    async with client_for(app_with(metrics={"token": TOKEN})) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/v1/models")).status_code == 200


async def test_requests_carry_the_tenant_of_their_key() -> None:
    backend = FakeBackend()
    app = create_app(make_settings(server={"api_key": KEY}), backend, Metrics(MODEL))
    async with client_for(app) as client:
        await client.post("/v1/chat/completions", json=chat(), headers=BEARER)
    salt = backend.requests[0].context.salt
    assert salt and KEY not in salt


@pytest.mark.parametrize(
    "request_line",
    [
        "GET //v1/models HTTP/1.1",
        "GET /v1/%2e%2e/v1/models HTTP/1.1",
        "GET /livez/../v1/models HTTP/1.1",
        "GET /livez/..%2fv1/models HTTP/1.1",
        "GET /v1/models. HTTP/1.1",
        "GET /v1/models;/livez HTTP/1.1",
        "GET /v1/models?/livez HTTP/1.1",
        "GET /v1/models%00/livez HTTP/1.1",
        "GET http://localhost/livez/../v1/models HTTP/1.1",
        "GET http://localhost/v1/models HTTP/1.1",
        "HEAD /v1/models HTTP/1.1",
        "OPTIONS /v1/models HTTP/1.1",
    ],
)
def test_path_tricks_do_not_bypass_authentication(
    locked_server: LiveServer, request_line: str
) -> None:
    for host in ("localhost", "localhost/livez?", "localhost/../livez", "evil.example"):
        head = f"{request_line}\r\nHost: {host}\r\nX-Forwarded-Prefix: /livez\r\n"
        answer = b""
        with locked_server.connect() as connection:
            connection.sendall((head + "Connection: close\r\n\r\n").encode())
            while data := connection.recv(65536):
                answer += data
        assert answer.startswith(b"HTTP/1.1 4"), (host, answer[:200])
        assert MODEL.encode() not in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8080", 200),
        ("gpu.internal", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("evil.example:127.0.0.1", 400),
        ("192.168.0.7", 400),
        ("localhost@evil.example", 400),
        ("", 400),
    ],
)
async def test_host_header_is_checked_against_allowed_hosts(host: str, status: int) -> None:
    async with client_for(app_with(server={"allowed_hosts": ["gpu.internal"]})) as client:
        response = await client.get("/v1/models", headers={"host": host})
        assert response.status_code == status
        probe = await client.get("/livez", headers={"host": host})
        assert probe.status_code == 200


async def test_any_ip_address_is_an_allowed_host_when_listening_on_all_interfaces() -> None:
    async with client_for(app_with(server={"host": "0.0.0.0", "api_key": KEY})) as client:
        for host, status in (("192.168.0.7:80", 200), ("[fe80::1]", 200), ("evil.example", 400)):
            response = await client.get("/v1/models", headers=BEARER | {"host": host})
            assert response.status_code == status


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:9999", "file://", "http://[bad"]
)
async def test_cross_origin_requests_may_not_change_anything(origin: str) -> None:
    backend = FakeBackend()
    app = create_app(make_settings(), backend, Metrics(MODEL))
    async with client_for(app) as client:
        for method, path in (("POST", "/v1/chat/completions"), ("DELETE", "/generate/x")):
            response = await client.request(method, path, json=chat(), headers={"origin": origin})
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
        own = await client.post(
            "/v1/chat/completions", json=chat(), headers={"origin": "http://localhost"}
        )
        assert own.status_code == 200
        assert not any(name.startswith("access-control") for name in own.headers)
    assert len(backend.requests) == 1


async def test_cors_headers_are_sent_for_listed_origins_only() -> None:
    listed = {"enable_cors": True, "cors_origins": ["https://app.example"], "api_key": KEY}
    async with client_for(app_with(server=listed)) as client:
        preflight = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-lang,x-stainless-os",
        }
        allowed = await client.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
        origin = {"origin": "https://app.example"}
        answer = await client.post("/v1/chat/completions", json=chat(), headers=BEARER | origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        exposed = answer.headers["access-control-expose-headers"]
        for name in ("x-request-id", "request-id", "x-engine-warnings", "x-should-retry"):
            assert name in exposed.split(", ")
        foreign = {"origin": "https://evil.example"}
        refused = await client.options("/v1/models", headers=preflight | foreign)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        posted = await client.post("/v1/chat/completions", json=chat(), headers=BEARER | foreign)
        assert posted.status_code == 403


async def test_localhost_stands_for_all_origins_of_this_machine() -> None:
    local = {"enable_cors": True, "cors_origins": ["localhost"], "api_key": KEY}
    async with client_for(app_with(server=local)) as client:
        for origin, allowed in (
            ("http://localhost:3000", "http://localhost:3000"),
            ("https://127.0.0.1", "https://127.0.0.1"),
            ("http://[::1]:1", "http://[::1]:1"),
            ("http://localhost.evil.example", None),
            ("http://notlocalhost", None),
            ("http://localhost:3000/x", None),
        ):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            answer = await client.options("/v1/chat/completions", headers=asked)
            assert answer.headers.get("access-control-allow-origin") == allowed
            sent = BEARER | {"origin": origin}
            posted = await client.post("/v1/chat/completions", json=chat(), headers=sent)
            assert posted.status_code == (403 if allowed is None else 200)


async def test_interactive_api_docs_are_not_served() -> None:
    async with client_for(app_with()) as client:
        for path in ("/docs", "/redoc"):
            assert (await client.get(path)).status_code == 404
