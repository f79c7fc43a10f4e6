"""Routes that come after the server is ready: there when asked for, and never in the way before."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from fastapi import FastAPI

from engine.core.listening import bind_socket
from engine.core.observability.metrics import Metrics
from engine.servers.app import DIALECTS, create_app
from engine.servers.run import HttpServer
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[FastAPI]:
    settings = make_settings(storage={"path": tmp_path})
    app = create_app(settings, FakeBackend(), Metrics(MODEL), starts_soon=True)
    yield app
    for component in app.state.services.components:
        await component.stop()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def paths(app: FastAPI) -> set[str]:
    return {route.path for route in app.routes}


async def test_a_chat_does_not_wait_for_late_routes(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    before = paths(app)
    assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
    assert paths(app) == before
    assert "/v1/responses" not in before
    # This route has the same path and comes late.
    assert (await client.get("/v1/chat/completions")).status_code == 200
    assert "/v1/responses" in paths(app)


async def test_the_first_request_adds_the_late_routes(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    both = await asyncio.gather(
        client.post("/v1/responses", json={"model": MODEL, "input": "hi"}),
        client.post("/tokenize", json={"model": MODEL, "prompt": "hi"}),
    )
    assert [answer.status_code for answer in both] == [200, 200]
    whole = create_app(app.state.services.settings, FakeBackend(), Metrics(MODEL))
    assert paths(app) == paths(whole)
    assert (await client.get("/nowhere")).status_code == 404


@pytest.mark.parametrize("starts_soon", [False, True])
async def test_only_configured_dialects_add_late_routes(
    monkeypatch: pytest.MonkeyPatch, starts_soon: bool
) -> None:
    def add(app: FastAPI, services: object) -> None:
        app.get("/azure-room")(lambda: None)

    room = ModuleType("engine.servers.azure_room")
    vars(room)["add"] = add
    monkeypatch.setitem(sys.modules, room.__name__, room)
    monkeypatch.setitem(DIALECTS, "azure", ("azure_room:add",))
    for listed in (["azure"], []):
        settings = make_settings(server={"dialects": listed})
        app = create_app(settings, FakeBackend(), Metrics(MODEL), starts_soon=starts_soon)
        await app.state.late_routes.add()
        assert ("/azure-room" in paths(app)) is bool(listed)


async def test_adding_late_routes_twice_has_no_effect(app: FastAPI) -> None:
    await app.state.late_routes.add()
    count = len(app.routes)
    await app.state.late_routes.add()
    assert len(app.routes) == count


async def test_late_routes_are_added_after_the_first_requests(app: FastAPI) -> None:
    when_ready: list[bool] = []
    sock = bind_socket(make_settings(server={"port": 0}))
    server = HttpServer(app, sock, lambda seconds: when_ready.append("/v1/responses" in paths(app)))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while "/v1/responses" not in paths(app):
            await asyncio.sleep(0.05)
        server.handle_signal()
        await serving
    assert when_ready == [False]
