"""Whose a request is, how urgent it is and how long it may take: known to the backend, whichever
route it came by; and what one tenant left with the server is nothing to another.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.interfaces.backend import Embeddings, EmbedRequest, GenerationContext
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import Principal
from engine.servers.app import create_app
from engine.servers.batches.caller import Caller
from engine.servers.serving import event_pump as generation
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

TIMES = {"request_timeout_s": 77.0, "queue_timeout_s": 7.0}
ROUTES = {
    "/v1/chat/completions": chat(priority=3),
    "/v1/completions": {"model": MODEL, "prompt": "a b", "priority": 3},
    "/v1/responses": {"model": MODEL, "input": "a b", "store": False, "priority": 3},
    "/v1/messages": {"model": MODEL, "messages": chat()["messages"], "max_tokens": 5},
    "/generate": {"prompt": "a b", "priority": 3, "stream": True},
    "/v1/embeddings": {"model": MODEL, "input": "a b", "priority": 3},
    "/v1/rerank": {"model": MODEL, "query": "a", "documents": ["b"], "priority": 3},
    "/v1/score": {"model": MODEL, "text_1": "a", "text_2": "b", "priority": 3},
}


class Slow(FakeBackend):
    async def embed(self, request: EmbedRequest) -> Embeddings:
        await asyncio.sleep(self.prefill_s)
        return await super().embed(request)


@pytest.fixture
def backend() -> FakeBackend:
    return Slow()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.json"
    return {name: add_key(path, name)[0] for name in ("alice", "bob")}


@pytest.fixture
def app(backend: FakeBackend, keys: dict[str, str], tmp_path: Path) -> FastAPI:
    server = {"keys_file": tmp_path / "keys.json", **TIMES}
    settings = make_settings(server=server, storage={"path": tmp_path / "kept"})
    return create_app(settings, backend, Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def tenant(name: str) -> str:
    return hashlib.sha256(f"tenant\n{name}".encode()).hexdigest()[:32]


def given(backend: FakeBackend) -> GenerationContext | EmbedRequest:
    """The part of the one request that is about its sender."""
    if backend.embed_requests:
        return backend.embed_requests[0]
    return backend.requests[0].context


@pytest.mark.parametrize("path", ROUTES)
async def test_tenant_deadline_and_priority_reach_the_backend_from_every_route(
    client: httpx.AsyncClient, backend: FakeBackend, keys: dict[str, str], path: str
) -> None:
    answer = await client.post(path, json=ROUTES[path], headers=bearer(keys["alice"]))
    assert answer.status_code == 200, answer.text
    asked = given(backend)
    assert (asked.tenant, asked.salt) == (tenant("alice"), tenant("alice"))
    assert (asked.timeout_s, asked.queue_timeout_s) == (77.0, 7.0)
    assert asked.priority == ROUTES[path].get("priority", 0)


async def test_sessions_are_distinguished_without_storing_their_names(
    client: httpx.AsyncClient, backend: FakeBackend, keys: dict[str, str]
) -> None:
    async def session(key: str, *, header: str | None = None, **fields: Any) -> str:
        headers = bearer(keys[key], **({} if header is None else {"x-session-id": header}))
        await client.post("/v1/chat/completions", json=chat(**fields), headers=headers)
        return backend.requests[-1].context.session

    of_alice = await session("alice", header="s1")
    assert of_alice and "s1" not in of_alice
    assert await session("alice", header="s1", user="another") == of_alice
    assert await session("bob", header="s1") != of_alice
    assert await session("alice", prompt_cache_key="s1") == of_alice
    assert await session("alice", user="s1") == of_alice
    assert await session("alice") == ""


async def test_only_the_first_of_several_prompts_may_hit_the_queue_timeout(
    client: httpx.AsyncClient, backend: FakeBackend, keys: dict[str, str]
) -> None:
    body = {"model": MODEL, "prompt": ["a", "b", "c"]}
    await client.post("/v1/completions", json=body, headers=bearer(keys["alice"]))
    assert [each.context.queue_timeout_s for each in backend.requests] == [7.0, None, None]


async def test_background_work_has_no_queue_timeout(
    app: FastAPI, backend: FakeBackend, keys: dict[str, str]
) -> None:
    for path in ("/v1/completions", "/v1/embeddings"):
        body = httpx.Request("POST", "http://x", json=ROUTES[path]).content
        bob = Principal(tenant("bob"), key="bob")
        answer = await Caller(app).post(path, body, bob, asyncio.Event())
        assert answer.status == 200, answer.body
    for asked in (backend.requests[0].context, backend.embed_requests[0]):
        assert (asked.tenant, asked.queue_timeout_s) == (tenant("bob"), None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_the_request_timeout_ends_a_backend_that_ignores_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(generation, "DEADLINE_MARGIN_S", 0.0)
    backend = Slow()
    backend.prefill_s = 60
    settings = make_settings(server={"request_timeout_s": 0.01})
    transport = httpx.ASGITransport(app=create_app(settings, backend, Metrics(MODEL)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(path, json=ROUTES[path])
    assert answer.status_code == 408


async def test_item_references_resolve_only_within_the_tenant(
    client: httpx.AsyncClient, backend: FakeBackend, keys: dict[str, str]
) -> None:
    alice, bob = bearer(keys["alice"]), bearer(keys["bob"])
    body = {"model": MODEL, "input": "a secret"}
    first = (await client.post("/v1/responses", json=body, headers=alice)).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    asked = {"model": MODEL, "input": [reference]}
    assert (await client.post("/v1/responses", json=asked, headers=bob)).status_code == 404
    answer = await client.post("/v1/responses", json=asked, headers=alice)
    assert answer.status_code == 200
    assert backend.requests[-1].messages[0]["content"] == "Hello from a fake model."
