"""The administrator's routes open to the administrator's key alone, and no web page changes
anything through any route (SEC-22, SEC-27; T1).
"""

import re
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import ADMIN_PATH, TENANT_ROUTES
from engine.servers.app import create_app
from engine.servers.http.errors import is_kserve, is_ollama
from engine.servers.openapi import BODIES, BODILESS, FORMS, api_routes
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, live_server, make_settings

USER, ADMIN = "user-key-0123456789abcdef", "admin-key-0123456789abcdef"
TOKEN = "scrape-token-0123456789abcdef"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")
CHANGING = ("POST", "PUT", "PATCH", "DELETE")
KEYS = {"api_key": USER, "admin_key": ADMIN}
JSON = {"content-type": "application/json"}
ENDLESS = {"/v1/admin/live"}  # this stream ends only when its client leaves


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def reads_any_type(path: str) -> bool:
    return is_ollama(path) or is_kserve(path)


def place(path: str) -> str:
    return re.sub(r"\{[^}]+\}", "x", path)


@pytest.fixture
def app() -> FastAPI:
    limits = {"auth_failures_per_minute": 100_000}
    settings = make_settings(server=KEYS, metrics={"token": TOKEN}, limits=limits)
    return create_app(settings, FakeBackend(), Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_a_client_key_opens_no_admin_route(app: FastAPI, client: httpx.AsyncClient) -> None:
    routes = [(method, path) for method, path in api_routes(app) if path.startswith(ADMIN_PATH)]
    assert len(routes) >= 20
    for registered, path in routes:
        for method in METHODS:
            for headers, refused in (
                ({}, 401),
                (bearer("wrong"), 401),
                (bearer(TOKEN), 401),
                (bearer(USER), 403),
                (bearer(USER) | {"x-api-key": "wrong"}, 403),
            ):
                response = await client.request(method, place(path), headers=headers)
                if path in TENANT_ROUTES and refused == 403:
                    refused = 405 if method != registered else 404 if "{" in path else 200
                expected = (refused,) if method == registered else (refused, 405)
                assert response.status_code in expected, (method, path, headers)
        if path in ENDLESS:
            continue
        opened = await client.request(registered, place(path), headers=bearer(ADMIN) | JSON)
        assert opened.status_code not in (401, 403), (registered, path)
    assert not app.state.services.lifecycle.is_draining


@pytest.fixture(scope="module")
def locked_server() -> Iterator[LiveServer]:
    with live_server(server=KEYS) as server:
        yield server


@pytest.mark.parametrize(
    "target",
    [
        "//v1/admin/status",
        "/v1//admin/status",
        "/v1/./admin/status",
        "/v1/models/../admin/status",
        "/v1/models/%2e%2e/admin/status",
        "/v1/admin%2fstatus",
        "/V1/ADMIN/STATUS",
        "/v1/admin/status/",
        "/v1/admin/status?x=/v1/models",
        "/v1/admin/status;x",
        "http://localhost/v1/admin/status",
        "http://evil.example/v1/admin/status",
    ],
)
def test_alternative_path_spellings_do_not_bypass_admin_authentication(
    locked_server: LiveServer, target: str
) -> None:
    for extra in ("", "X-Original-URL: /v1/models\r\n", "X-Forwarded-Prefix: /v1/models\r\n"):
        head = (
            f"GET {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {USER}\r\n"
            f"{extra}Connection: close\r\n\r\n"
        )
        answer = b""
        with locked_server.connect() as connection:
            connection.sendall(head.encode())
            while data := connection.recv(65536):
                answer += data
        assert answer[:12] in (b"HTTP/1.1 403", b"HTTP/1.1 404", b"HTTP/1.1 400"), answer[:200]
        assert b"audit_log" not in answer


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:9999"])
async def test_cross_origin_requests_change_nothing_on_any_route(
    app: FastAPI, client: httpx.AsyncClient, origin: str
) -> None:
    for _, path in api_routes(app):
        for method in CHANGING:
            headers = bearer(ADMIN) | JSON | {"origin": origin}
            response = await client.request(method, place(path), headers=headers, content=b"{}")
            assert response.status_code == 403, (method, path)
            assert not any(name.startswith("access-control") for name in response.headers)
    lifecycle = app.state.services.lifecycle
    assert not lifecycle.is_draining and lifecycle.total_requests == 0


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
async def test_bodies_that_browsers_send_without_preflight_are_not_read_as_json(
    app: FastAPI, client: httpx.AsyncClient, kind: str | None
) -> None:
    """Forms and plain text need no preflight, so they are never read as JSON. Routes of Ollama and
    KServe read them if no browser sent them.
    """
    headers = bearer(ADMIN) | ({} if kind is None else {"content-type": kind})
    for path in BODIES:
        from_page = {"sec-fetch-site": "same-site"} if reads_any_type(path) else {}
        response = await client.post(place(path), headers=headers | from_page, content=b"{}")
        assert response.status_code == 415, path
    assert not app.state.services.lifecycle.is_draining


def test_every_route_that_reads_a_body_is_in_the_tables_of_this_file(app: FastAPI) -> None:
    posts = {path for method, path in api_routes(app) if method in CHANGING and method != "DELETE"}
    assert posts == {*BODILESS, *BODIES, *FORMS}
