"""A body that is too large is answered with 413, and a full disk with 507: by every route, with the
error of its dialect (SEC-20, SEC-26, FLT-23; T2).
"""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from fastapi import FastAPI

from engine.core import faults
from engine.core.config_types import Dialect
from engine.core.faults import Fault
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.files import form
from engine.servers.http.errors import LLAMACPP_PATHS, is_anthropic, is_kserve, is_ollama
from engine.servers.openapi import BODIES, FORMS
from tests.scoreboard.http.bodies import least_bodies
from tests.security.access.test_key_models import routes
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import LINES, TunedBackend
from tests.support.servers.live_server import chat, make_settings

MEGABYTE = 1 << 20
ADMIN = "admin-key-0123456789abcdef"
JSON = {"content-type": "application/json"}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    keys_file = tmp_path / "keys.json"
    add_key(keys_file, "client")
    settings = make_settings(
        server={
            "keys_file": keys_file,
            "admin_key": ADMIN,
            "dialects": get_args(Dialect),
            "body_limit_mb": 1,
        },
        storage={"path": tmp_path / "kept"},
    )
    return create_app(settings, TunedBackend(), Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """The administrator, who may use every route."""
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {ADMIN}"}
    base = "http://localhost"
    async with httpx.AsyncClient(transport=transport, base_url=base, headers=headers) as client:
        yield client


def check_form(path: str, answer: httpx.Response) -> None:
    """The error has the form of the dialect whose path it is."""
    body = answer.json()
    if is_ollama(path) or is_kserve(path):
        assert isinstance(body["error"], str), (path, body)
    elif is_anthropic(path):
        assert body["type"] == "error" and body["error"]["message"], (path, body)
    elif path in LLAMACPP_PATHS:
        assert body["error"]["code"] == answer.status_code, (path, body)
    else:
        assert {"message", "type", "code"} <= body["error"].keys(), (path, body)


def fill(path: str) -> str:
    """The path with a value for each parameter."""
    model = MODEL if is_kserve(path) or "deployment" in path else "x"
    return re.sub(r"\{(version)?[^}]*\}", lambda found: "1" if found[1] else model, path)


async def endless() -> AsyncIterator[bytes]:
    """A body that announces no length."""
    for _ in range(64):
        yield b" " * 65536


def takes_a_body(method: str, path: str) -> bool:
    """Bodies are those of a POST, except for the one of Ollama."""
    return (
        method == ("DELETE" if path == "/api/delete" else "POST")
        and path.replace(":path}", "}") in BODIES
    )


async def test_every_body_that_is_too_large_is_413(app: FastAPI, client: httpx.AsyncClient) -> None:
    num_checked = 0
    for method, path in routes(app):
        if not takes_a_body(method, path):
            continue
        for content in (b" " * (MEGABYTE + 1), endless()):
            answer = await client.request(method, fill(path), content=content, headers=JSON)
            assert answer.status_code == 413, (method, path, answer.text)
            assert answer.headers["connection"] == "close"
            check_form(fill(path), answer)
            num_checked += 1
    assert num_checked > 100


async def test_every_form_that_is_too_large_is_413(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "MAX_FILE_BYTES", MEGABYTE)
    begun = await client.post("/v1/uploads", json=least_bodies(MODEL)["/v1/uploads"])
    for path, (_, part) in FORMS.items():
        where = path.replace("{upload_id}", begun.json()["id"])
        size = 65 * MEGABYTE if "parts" in path else MEGABYTE + 1
        files = {part: ("x", b" " * size), "purpose": (None, "batch")}
        answer = await client.post(where, files=files)
        assert answer.status_code == 413, (path, answer.text)
        check_form(path, answer)


async def stored_by(client: httpx.AsyncClient) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests that store something, by what they store: a path, and what is sent."""

    async def made(path: str, body: Any) -> str:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, (path, answer.text)
        return str(answer.json()["id"])

    async def uploaded(purpose: str, lines: list[Any]) -> str:
        content = "\n".join(map(json.dumps, lines)).encode()
        files = {"file": ("in.jsonl", content), "purpose": (None, purpose)}
        return str((await client.post("/v1/files", files=files)).json()["id"])

    bodies = least_bodies(MODEL)
    talk = await made("/v1/conversations", {})
    begun = await made("/v1/uploads", bodies["/v1/uploads"])
    training = {"model": MODEL, "training_file": await uploaded("fine-tune", LINES)}
    batch = bodies["/v1/batches"] | {"input_file_id": await uploaded("batch", [{}])}
    items = f"/v1/conversations/{talk}/items"
    file = {"file": ("x.jsonl", b"{}"), "purpose": (None, "batch")}
    return {
        "a file": ("/v1/files", {"files": file}),
        "an upload": ("/v1/uploads", {"json": bodies["/v1/uploads"]}),
        "a part": (f"/v1/uploads/{begun}/parts", {"files": {"data": ("x", b"{}")}}),
        "a batch": ("/v1/batches", {"json": batch}),
        "messages": ("/v1/messages/batches", {"json": bodies["/v1/messages/batches"]}),
        "a job": ("/v1/fine_tuning/jobs", {"json": training}),
        "a conversation": ("/v1/conversations", {"json": {}}),
        "items": (items, {"json": bodies["/v1/conversations/{conversation_id}/items"]}),
        "a response": ("/v1/responses", {"json": bodies["/v1/responses"] | {"store": True}}),
        "a completion": ("/v1/chat/completions", {"json": chat(store=True)}),
        "a key": ("/v1/admin/keys", {"json": {"name": "another"}}),
    }


async def test_storing_anything_on_a_full_disk_is_507(client: httpx.AsyncClient) -> None:
    asked = await stored_by(client)
    for what, (path, sent) in asked.items():
        full = [Fault(point, "disk", times=1000) for point in ("database", "upload", "keep_file")]
        with faults.planned(*full):
            answer = await client.post(path, **sent)
        assert answer.status_code == 507, (what, path, answer.text)
        check_form(path, answer)
    for path, sent in asked.values():  # and nothing is broken
        assert (await client.post(path, **sent)).status_code in (200, 201), path
