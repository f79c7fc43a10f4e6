"""What one tenant leaves with the server never displaces what another one has, and each limit is
the tenant's own. Tenant A fills every store; B's objects stay, and B can create more.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers import generate
from engine.servers.app import create_app
from engine.servers.batches import store as batch_store
from engine.servers.files import store as file_store
from engine.servers.files import uploads
from engine.servers.fine_tuning import store as job_store
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

MOST = 8
CHARGED = 32 * 1024  # bytes of each small file, so that a few fill the storage
Make = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {name: add_key(tmp_path / "keys.json", name)[0] for name in ("a", "b")}


@pytest.fixture
def app(tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    for module, name in (
        (batch_store, "MAX_OPEN_BATCHES"),
        (uploads, "MAX_OPEN_UPLOADS"),
        (job_store, "MAX_OPEN_JOBS"),
        (generate, "MAX_SUBMISSIONS"),
    ):
        monkeypatch.setattr(module, name, MOST)
    monkeypatch.setattr(file_store, "MIN_CHARGE_BYTES", CHARGED)
    settings = make_settings(
        server={"keys_file": tmp_path / "keys.json"},
        storage={"path": tmp_path / "kept", "max_responses": MOST, "max_size_mb": 1},
    )
    return create_app(settings, FakeBackend(), Metrics(MODEL))


@pytest.fixture
async def clients(app: FastAPI, keys: dict[str, str]) -> AsyncIterator[list[httpx.AsyncClient]]:
    transport = httpx.ASGITransport(app=app)
    made = [
        httpx.AsyncClient(
            transport=transport,
            base_url="http://localhost",
            headers={"authorization": f"Bearer {key}"},
        )
        for key in keys.values()
    ]
    yield made
    for each in made:
        await each.aclose()


async def file(client: httpx.AsyncClient) -> httpx.Response:
    files = {"file": ("in.jsonl", b"{}", "application/json")}
    return await client.post("/v1/files", data={"purpose": "batch"}, files=files)


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    body = {"filename": "a", "purpose": "batch", "bytes": 3, "mime_type": "text/plain"}
    return await client.post("/v1/uploads", json=body)


async def conversation(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/conversations", json={})


async def response(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/responses", json={"model": MODEL, "input": "a", "store": True})


async def stored_chat(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=chat(store=True))


async def submission(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/generate", json={"prompt": "a b"})


def stored_at(kind: Make, made: dict[str, Any]) -> str:
    places = {
        file: "/v1/files/{}",
        conversation: "/v1/conversations/{}",
        response: "/v1/responses/{}",
        stored_chat: "/v1/chat/completions/{}",
        submission: "/generate/{}",
    }
    return places[kind].format(made.get("id") or made["request_id"])


@pytest.mark.parametrize("kind", [file, conversation, response, stored_chat, submission])
async def test_objects_of_one_tenant_never_displace_anothers(
    clients: list[httpx.AsyncClient], kind: Make
) -> None:
    a, b = clients
    first = await kind(b)
    assert first.status_code in (200, 202), first.text
    filled = [await kind(a) for _ in range(5 * MOST)]
    for each in filled:
        assert each.status_code in (200, 202, 413, 429, 507), each.text
        if each.status_code >= 400:
            assert "storage" in each.text or "Retry" in each.text
    kept = await b.get(stored_at(kind, first.json()))
    assert kept.status_code == 200, kept.text
    more = await kind(b)
    assert more.status_code in (200, 202), more.text


@pytest.mark.parametrize("kind", [upload])
async def test_unfinished_uploads_are_limited_per_tenant(
    clients: list[httpx.AsyncClient], kind: Make
) -> None:
    a, b = clients
    statuses = [(await kind(a)).status_code for _ in range(MOST + 1)]
    assert statuses == [200] * MOST + [429]
    refused = await kind(a)
    assert f"{MOST} of your" in refused.text and int(refused.headers["retry-after"]) > 1
    assert (await kind(b)).status_code == 200


async def test_batches_are_limited_per_tenant(clients: list[httpx.AsyncClient]) -> None:
    a, b = clients

    async def batch(client: httpx.AsyncClient) -> httpx.Response:
        made = await file(client)
        assert made.status_code == 200, made.text
        body = {"input_file_id": made.json()["id"], "endpoint": "/v1/chat/completions"}
        created = await client.post("/v1/batches", json=body | {"completion_window": "24h"})
        await client.delete(f"/v1/files/{made.json()['id']}")
        return created

    kept = await batch(b)
    assert kept.status_code == 200, kept.text
    refused = [each for each in [await batch(a) for _ in range(4)] if each.status_code != 200]
    assert all(each.status_code == 429 and "of your batches" in each.text for each in refused)
    assert (await b.get(f"/v1/batches/{kept.json()['id']}")).status_code == 200


async def test_files_are_limited_per_tenant(
    clients: list[httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of all files are added up, so small ones must not be too many."""
    monkeypatch.setattr(file_store, "MAX_FILES", 5)
    a, b = clients
    made = [await file(a) for _ in range(6)]
    assert [each.status_code for each in made] == [200] * 5 + [507]
    assert "Delete some" in made[-1].text
    body = {"input_file_id": made[0].json()["id"], "endpoint": "/v1/chat/completions"}
    refused = await a.post("/v1/batches", json=body | {"completion_window": "24h"})
    assert refused.status_code == 507, "its results would be files, too"
    assert (await file(b)).status_code == 200


async def test_finished_uploads_are_forgotten(
    clients: list[httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "MAX_KEPT_UPLOADS", 2)
    a, b = clients
    other = (await upload(b)).json()["id"]
    ids = []
    for _ in range(6):
        ids.append((await upload(a)).json()["id"])
        assert (await a.post(f"/v1/uploads/{ids[-1]}/cancel")).status_code == 200
    statuses = [(await a.post(f"/v1/uploads/{each}/cancel")).status_code for each in ids]
    assert statuses == [404] * 3 + [409] * 3
    assert (await b.post(f"/v1/uploads/{other}/cancel")).status_code == 200
