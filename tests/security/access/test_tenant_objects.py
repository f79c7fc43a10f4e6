"""What one tenant left with the server is to another as if it were not there: every route with an
id in its path, every method (SEC-22; T1).
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.scoreboard.http.bodies import least_bodies
from tests.security.access.test_key_models import VARYING, routes
from tests.support.fakes.fake_backend import CARD, MODEL
from tests.support.fakes.scripted_trainer import LINES, TunedBackend
from tests.support.servers.live_server import chat, make_settings

TUNED = f"ft:{MODEL}:own:1"
# Paths whose parameter is no id of a tenant's object.
NO_OBJECTS = re.compile(r"/v1/admin/(keys|plugins)/|/api/blobs/|/ui/static/")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.json"
    return {name: add_key(path, name)[0] for name in ("alice", "bob")}


@pytest.fixture
def app(tmp_path: Path, keys: dict[str, str]) -> FastAPI:
    """A server without an administrator, so each client may do what clients ever may."""
    backend = TunedBackend()
    settings = make_settings(
        server={"keys_file": tmp_path / "keys.json"}, storage={"path": tmp_path / "kept"}
    )
    app = create_app(settings, backend, Metrics(MODEL))
    owner = app.state.services.keys.credentials[0].principal.name
    tuned = msgspec.structs.replace(CARD, id=TUNED, root=MODEL, parent=MODEL, tenant=owner)
    backend.cards = [CARD, tuned]
    app.state.services.interp_results.put("interp-0123456789abcdef", owner, b"tensors")
    return app


def client_for(app: FastAPI, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://localhost",
        headers={"authorization": f"Bearer {key}"},
    )


@pytest.fixture
async def alice(app: FastAPI, keys: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(app, keys["alice"]) as client:
        yield client


@pytest.fixture
async def bob(app: FastAPI, keys: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(app, keys["bob"]) as client:
        yield client


async def made(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code in (200, 202), (path, answer.text)
    return dict(answer.json())


async def upload(client: httpx.AsyncClient, purpose: str, lines: list[Any]) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    form = {"file": ("in.jsonl", content), "purpose": (None, purpose)}
    return str((await client.post("/v1/files", files=form)).json()["id"])


async def objects_of(client: httpx.AsyncClient) -> dict[str, str]:
    """One object of each kind, by the name of the path's parameter."""
    stored = await made(client, "/v1/chat/completions", chat(store=True))
    response = await made(client, "/v1/responses", {"model": MODEL, "input": "a", "store": True})
    talk = await made(client, "/v1/conversations", {"items": [{"role": "user", "content": "a"}]})
    items = (await client.get(f"/v1/conversations/{talk['id']}/items")).json()["data"]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": MODEL, "prompt": "a"}
    batch_file = await upload(client, "batch", [line])
    asked = least_bodies(MODEL)
    batch = await made(client, "/v1/batches", asked["/v1/batches"] | {"input_file_id": batch_file})
    messages = await made(client, "/v1/messages/batches", asked["/v1/messages/batches"])
    training = await upload(client, "fine-tune", LINES)
    job = await made(client, "/v1/fine_tuning/jobs", {"model": MODEL, "training_file": training})
    begun = await made(client, "/v1/uploads", asked["/v1/uploads"])
    submitted = await made(client, "/generate", {"prompt": "a"})
    return {
        "completion_id": stored["id"],
        "response_id": response["id"],
        "conversation_id": talk["id"],
        "item_id": items[0]["id"],
        "file_id": training,
        "upload_id": begun["id"],
        "batch_id": batch["id"],
        "message_batch_id": messages["id"],
        "job_id": job["id"],
        "model_id": TUNED,
        "name": TUNED,
        "deployment": TUNED,
        "version": "1",
        "request_id": submitted["request_id"],
        "result_id": "interp-0123456789abcdef",
    }


def absent(found: str) -> str:
    """An id of the same form that no object has."""
    return (
        found if len(found) < 4 else found[:-4] + ("zzzz" if not found.endswith("zzzz") else "yyyy")
    )


def filled(path: str, objects: dict[str, str]) -> str:
    if path.startswith("/v1/messages/batches"):
        objects = objects | {"batch_id": objects["message_batch_id"]}
    return re.sub(r"\{(\w+)(:path)?\}", lambda found: objects[found[1]], path)


async def asked(client: httpx.AsyncClient, method: str, path: str, body: Any) -> tuple[int, str]:
    async with asyncio.timeout(60):
        answer = await client.request(method, path, json=body)
    return answer.status_code, answer.text


async def test_objects_of_another_tenant_look_like_missing_objects_on_every_route(
    app: FastAPI, alice: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    objects = await objects_of(alice)
    nothing = {name: absent(each) for name, each in objects.items()}
    bodies = least_bodies(MODEL)
    differing = []
    for method, path in routes(app):
        if "{" not in path or NO_OBJECTS.search(path):
            continue
        answers = []
        for those in (objects, nothing):
            status, text = await asked(bob, method, filled(path, those), bodies.get(path, {}))
            for each in those.values():
                text = text.replace(each, "?") if len(each) > 3 else text
            answers.append((status, VARYING.sub("#", text)))
        if answers[0] != answers[1] or answers[0][0] < 400:
            differing.append((method, path, *answers))
    assert not differing


async def test_the_owner_can_still_read_every_object(
    app: FastAPI, alice: httpx.AsyncClient, bob: httpx.AsyncClient
) -> None:
    """Otherwise the test above would pass on a server that has no objects."""
    objects = await objects_of(alice)
    for method, path in routes(app):
        if method == "GET" and "{" in path and not NO_OBJECTS.search(path):
            status, text = await asked(alice, method, filled(path, objects), None)
            is_kept = status == 200 or "/results" in path or "/content" in path
            assert is_kept or path.startswith("/v1/admin/"), (path, status, text)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
async def test_a_response_cannot_continue_another_tenants_conversation(
    alice: httpx.AsyncClient, bob: httpx.AsyncClient, field: str
) -> None:
    objects = await objects_of(alice)
    found = objects["response_id" if field == "previous_response_id" else "conversation_id"]
    answers = []
    for each in (found, absent(found)):
        body = {"model": MODEL, "input": "a", field: each}
        status, text = await asked(bob, "POST", "/v1/responses", body)
        answers.append((status, text.replace(each, "?")))
    assert answers[0] == answers[1] and answers[0][0] in (400, 404)
