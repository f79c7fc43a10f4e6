"""Ollama's API for models: what is listed, and how models come, change and go."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.observability.metrics import Metrics
from engine.core.store import fetch
from engine.core.store.model_store import ModelStore, StoredModel, StoredModelFile
from engine.routing import build
from engine.routing.router import Router
from engine.servers.app import create_app
from engine.servers.http.errors import AbortedError
from engine.servers.ollama import changes
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings
from tests.support.servers.model_site import GGUF, Page, digest, serve_site

ADMIN = "admin-key-0123456789abcdef"
HELLO = [{"role": "user", "content": "hi"}]
CALL = {"index": 0, "id": "call_1", "function": {"name": "look", "arguments": {}}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ModelStore()


@pytest.fixture
def tiny(store: ModelStore) -> str:
    """The name of a model in the store."""
    with store.lock("tiny", lambda: None):
        staging = store.staging("tiny")
        (staging / "tiny.gguf").write_bytes(GGUF)
        file = StoredModelFile("tiny.gguf", len(GGUF), digest(GGUF))
        model = StoredModel("tiny", "file", "2026-01-01T00:00:00+00:00", (file,), "tiny.gguf")
        store.publish(staging, model)
    return "tiny"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """The backends that were made for models which were added later."""
    made: list[FakeBackend] = []

    def make(kind: str, model: str, options: Any) -> FakeBackend:
        made.append(FakeBackend())
        return made[-1]

    monkeypatch.setattr(build, "make_backend", make)
    return made


def make_app(tmp_path: Path, **server: Any) -> FastAPI:
    settings = make_settings(server=server, storage={"path": tmp_path / "data"})
    return create_app(settings, FakeBackend(), Metrics(MODEL), rebuild=FakeBackend)


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.fixture
async def app(tmp_path: Path, store: ModelStore) -> AsyncIterator[FastAPI]:
    app = make_app(tmp_path)
    yield app
    await app.state.services.backend.stop()


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


async def names(client: httpx.AsyncClient, path: str = "/api/tags") -> list[str]:
    return [each["name"] for each in (await client.get(path)).json()["models"]]


async def chat(client: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "stream": False}
    return await client.post("/api/chat", json=body | fields)


def statuses(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def test_ollama_health_and_version_probes_are_answered(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).text == "Ollama is running"
    assert (await client.head("/")).status_code == 200
    version = (await client.get("/api/version")).json()
    assert [int(part) for part in version["version"].split(".")] >= [0, 6, 4]
    assert version["engine"]["name"] == "engine"


async def test_tags_and_ps_list_models(client: httpx.AsyncClient, tiny: str) -> None:
    assert await names(client) == [f"{MODEL}:latest", "tiny:latest"]
    assert await names(client, "/api/ps") == [f"{MODEL}:latest"]
    (running,) = (await client.get("/api/ps")).json()["models"]
    assert running["context_length"] == 4096 and running["expires_at"].startswith("9999")
    stored = (await client.get("/api/tags")).json()["models"][1]
    assert (stored["size"], stored["digest"]) == (len(GGUF), digest(GGUF))
    assert (await client.head(f"/api/blobs/sha256:{digest(GGUF)}")).status_code == 200
    assert (await client.head(f"/api/blobs/sha256:{'0' * 64}")).status_code == 404


async def test_show_describes_the_model(client: httpx.AsyncClient, tiny: str) -> None:
    shown = (await client.post("/api/show", json={"model": MODEL})).json()
    assert shown["capabilities"] == ["completion", "embedding", "tools", "insert", "thinking"]
    arch = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{arch}.context_length"] == 4096
    assert shown["template"] == "{{ messages }}"
    stored = (await client.post("/api/show", json={"name": "tiny:latest"})).json()
    assert stored["details"]["format"] == "gguf"
    missing = await client.post("/api/show", json={"model": "absent"})
    assert missing.status_code == 404 and "absent" in missing.json()["error"]


async def test_a_stored_model_is_loaded_by_its_first_request(
    app: FastAPI, client: httpx.AsyncClient, tiny: str, loaded: list[FakeBackend]
) -> None:
    assert (await chat(client, "tiny")).status_code == 200
    assert len(loaded) == 1 and len(loaded[0].requests) == 1
    assert set(await names(client, "/api/ps")) == {f"{MODEL}:latest", "tiny:latest"}
    assert (await chat(client, "tiny")).status_code == 200 and len(loaded) == 1


async def test_keep_alive_0_unloads_the_model(
    app: FastAPI, client: httpx.AsyncClient, tiny: str, loaded: list[FakeBackend]
) -> None:
    await chat(client, "tiny", keep_alive="10m")
    expires = {
        each["name"]: each["expires_at"] for each in (await client.get("/api/ps")).json()["models"]
    }
    assert expires[f"{MODEL}:latest"].startswith("9999")
    assert not expires["tiny:latest"].startswith("9999")
    gone = await client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
    assert gone.json()["done_reason"] == "unload"
    assert await names(client, "/api/ps") == [f"{MODEL}:latest"]
    assert loaded[0].is_stopped
    await chat(client, "tiny", keep_alive=0)
    router = app.state.services.backend.unwrapped
    assert isinstance(router, Router)
    router.residency.tick()
    while not loaded[1].is_stopped:
        await asyncio.sleep(0.001)
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
    router.residency.tick()
    await asyncio.sleep(0.01)
    assert len(loaded) == 3 and not loaded[2].is_stopped  # it stays, as the settings say
    await client.post("/api/generate", json={"model": "tiny", "keep_alive": 0})
    back = await client.post("/api/generate", json={"model": "tiny"})
    assert back.json()["done_reason"] == "load" and len(loaded) == 4


async def test_create_makes_a_model_with_a_system_message(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    body = {
        "model": "mario",
        "from": MODEL,
        "system": "You are Mario.",
        "parameters": {"temperature": 0.2, "num_predict": 4, "stop": ["END"], "num_ctx": 512},
    }
    made = await client.post("/api/create", json=body)
    assert statuses(made)[-1] == {"status": "success"}
    assert "parameters.num_ctx" in made.headers["x-engine-warnings"]
    await chat(client, "mario:latest")
    await client.post("/v1/chat/completions", json={"model": "mario", "messages": HELLO})
    backend = app.state.services.backend.unwrapped.routes[0].members[0].replica.backend
    for request in backend._inner.requests:
        params = request.context.params
        assert (params.temperature, params.max_tokens, params.stop) == (0.2, 4, ("END",))
        assert request.messages[0]["content"] == "You are Mario."
    shown = (await client.post("/api/show", json={"model": "mario"})).json()
    assert shown["system"] == "You are Mario." and "temperature 0.2" in shown["parameters"]
    body = {"model": "luigi", "from": "mario", "parameters": {"temperature": 0.9}, "stream": False}
    assert (await client.post("/api/create", json=body)).json() == {"status": "success"}
    preset = app.state.services.presets["luigi"]
    assert (preset.system, preset.defaults["temperature"]) == ("You are Mario.", 0.9)
    assert preset.defaults["max_tokens"] == 4


async def test_models_are_copied_and_deleted(client: httpx.AsyncClient, tiny: str) -> None:
    copied = {"source": MODEL, "destination": "other"}
    assert (await client.post("/api/copy", json=copied)).status_code == 200
    assert (await chat(client, "other")).status_code == 200
    taken = {"source": MODEL, "destination": "tiny"}
    assert (await client.post("/api/copy", json=taken)).status_code == 409
    for name, status in (("other", 200), ("other", 404), ("tiny", 200), (MODEL, 409)):
        gone = await client.request("DELETE", "/api/delete", json={"model": name})
        assert gone.status_code == status, (name, gone.text)
    assert await names(client) == [f"{MODEL}:latest"]
    assert not ModelStore().models()


async def test_a_served_model_of_the_store_can_be_deleted(
    client: httpx.AsyncClient, tiny: str, loaded: list[FakeBackend]
) -> None:
    await chat(client, "tiny")
    await client.post("/api/copy", json={"source": "tiny", "destination": "other"})
    kept = await client.request("DELETE", "/api/delete", json={"name": "tiny"})
    assert kept.status_code == 409 and "other" in kept.json()["error"]
    await client.request("DELETE", "/api/delete", json={"name": "other"})
    gone = await client.request("DELETE", "/api/delete", json={"name": "tiny"})
    assert gone.status_code == 200 and loaded[0].is_stopped
    assert (await chat(client, "tiny")).status_code == 404


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "from"),
        ({"from": MODEL, "template": "{{ .Prompt }}"}, "template"),
        ({"from": MODEL, "files": {"a.gguf": "sha256:0"}}, "files"),
        ({"from": MODEL, "quantize": "q4_0"}, "quantize"),
        ({"from": MODEL, "parameters": {"temprature": 1}}, "temprature"),
        ({"from": MODEL, "parameters": {"temperature": 9}}, "temperature"),
    ],
)
async def test_unsupported_create_options_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], word: str
) -> None:
    refused = await client.post("/api/create", json={"model": "mario"} | fields)
    assert refused.status_code == 400 and word in refused.json()["error"]
    assert await names(client) == [f"{MODEL}:latest"]


async def test_a_pull_streams_its_progress(tmp_path: Path, store: ModelStore) -> None:
    site, server = serve_site()
    site.pages["/a/Tiny.gguf"] = Page(GGUF)
    url = f"{site.url}/a/Tiny.gguf"
    async with client_of(make_app(tmp_path, admin_key=ADMIN), authorization=f"Bearer {ADMIN}") as c:
        told = statuses(await c.post("/api/pull", json={"model": url}))
        again = await c.post("/api/pull", json={"model": url, "stream": False})
        failed = statuses(await c.post("/api/pull", json={"model": f"{site.url}/a/None.gguf"}))
    server.shutdown()
    server.server_close()
    assert told[0] == {"status": "pulling manifest"} and told[-1] == {"status": "success"}
    assert any(each.get("completed") == each.get("total") == len(GGUF) for each in told)
    assert again.json() == {"status": "success"}
    assert list(failed[-1]) == ["error"]
    assert "tiny" in store.models()


async def test_a_client_disconnect_cancels_a_pull(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[type[Exception]] = []

    def long(spec: str, progress: Any) -> None:
        try:
            for _ in range(20_000):
                progress.update("file", 1, 2)
                time.sleep(0.001)
        except Exception as error:
            ends.append(type(error))
            raise

    monkeypatch.setattr(changes, "pull", long)
    progress = changes._pulled("smollm2-135m-instruct")
    assert await anext(progress) == {"status": "pulling manifest"}
    assert (await anext(progress))["completed"] == 1
    await progress.aclose()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert ends == [AbortedError]


async def test_only_the_admin_may_pull_models(tmp_path: Path, tiny: str) -> None:
    open_to_all = client_of(make_app(tmp_path))
    url = await open_to_all.post("/api/pull", json={"model": "https://example.com/a.gguf"})
    assert url.status_code == 403 and "administrator's key" in url.json()["error"]
    unknown = await open_to_all.post("/api/pull", json={"model": "smolm2:135m"})
    assert unknown.status_code == 400 and "did you mean smollm2" in unknown.json()["error"]
    guarded = make_app(tmp_path, api_key="k" * 32, admin_key=ADMIN)
    async with client_of(guarded, authorization=f"Bearer {'k' * 32}") as user:
        assert await names(user) == [f"{MODEL}:latest"]
        assert (await chat(user, "tiny")).status_code == 404
        unload = await user.post("/api/generate", json={"model": MODEL, "keep_alive": 0})
        assert unload.status_code == 403
        told = await chat(user, MODEL, keep_alive=1)
        assert "administrator" in told.headers["x-engine-warnings"]
        for method, path in (
            ("POST", "/api/pull"),
            ("POST", "/api/copy"),
            ("POST", "/api/create"),
            ("DELETE", "/api/delete"),
        ):
            refused = await user.request(method, path, json={"model": "tiny"})
            assert refused.status_code == 403, path
    async with client_of(guarded, authorization=f"Bearer {ADMIN}") as admin:
        assert "tiny:latest" in await names(admin)
    await open_to_all.aclose()


async def test_requests_of_open_webui_are_accepted(client: httpx.AsyncClient, tiny: str) -> None:
    """Its forms have both names of a model, and it pulls with `insecure`."""
    both = {"name": MODEL, "model": MODEL}
    assert (await client.post("/api/show", json=both)).status_code == 200
    pulled = await client.post("/api/pull", json={"model": "tiny:1b", "insecure": True})
    assert pulled.status_code == 400
    unload = {"model": MODEL, "keep_alive": 0, "prompt": ""}
    assert (await client.post("/api/generate", json=unload)).json()["done_reason"] == "unload"
    assert (await client.get("/api/ps")).json() == {"models": []}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "call_1"},
    ]
    options = {"temperature": 0.5, "num_predict": 3, "use_mmap": True, "use_mlock": False}
    answered = await chat(client, f"{MODEL}:latest", messages=messages, options=options)
    assert answered.json()["eval_count"] == 3 and "x-engine-warnings" not in answered.headers


async def test_requests_of_the_ollama_cli_are_accepted(
    client: httpx.AsyncClient, tiny: str
) -> None:
    """Its bodies have empty texts and null for all that is not used."""
    empty = {"system": "", "template": "", "verbose": False, "options": None, "name": ""}
    assert (await client.post("/api/show", json={"model": MODEL} | empty)).status_code == 200
    told = await client.post("/api/show", json={"model": MODEL, "system": "s"})
    assert told.status_code == 400 and "system" in told.json()["error"]
    body = {"model": "absent", "username": "", "password": "", "name": ""}
    assert "catalogue" in (await client.post("/api/pull", json=body)).json()["error"]
    blank = {"suffix": "", "system": "", "template": "", "options": None}
    text = {"model": MODEL, "prompt": "a", "stream": False} | blank
    assert (await client.post("/api/generate", json=text)).status_code == 200
    assert (await chat(client, MODEL, options=None, format="")).status_code == 200
    gone = await client.request("DELETE", "/api/delete", json={"model": "tiny", "name": ""})
    assert gone.status_code == 200
    assert (await client.post("/api/show", json={"model": ""})).status_code == 400


async def test_the_ollama_dialect_can_be_turned_off(tmp_path: Path) -> None:
    async with client_of(make_app(tmp_path, dialects=[])) as client:
        for path in ("/api/tags", "/api/version"):
            assert (await client.get(path)).status_code == 404
