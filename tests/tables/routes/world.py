"""A server with tenants, each of whom has an object of every kind that the APIs keep."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
from fastapi import FastAPI

from engine.core.config_types import Dialect
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.fine_tuning import runner
from tests.scoreboard.http.bodies import least_bodies
from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import (
    LINES,
    SHAPES,
    STARTED,
    ScriptedTrainer,
    TunedBackend,
)
from tests.support.files.lora_files import peft_folder
from tests.support.servers.live_server import chat, make_settings

METRICS_TOKEN = "metrics-token-0123456789abcdef"
NODE_TOKEN = "node-token-0123456789abcdef"
ADMIN_KEY = "admin-key-0123456789abcdef"
BODIES = least_bodies(MODEL)
# A text in every prompt of a tenant, by which another tenant would see it.
WORDS = {"alice": "periwinkle", "bob": "saffron", "admin": "vermilion"}


@dataclass(frozen=True)
class World:
    app: FastAPI
    backend: TunedBackend
    keys: dict[str, str]  # by name: alice, bob, `limited` of alice's tenant, and the others
    objects: dict[str, dict[str, str]]  # ids by tenant and kind

    def client(self, name: str | None) -> httpx.AsyncClient:
        return client_for(self.app, None if name is None else self.keys[name])


def client_for(app: FastAPI, key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app, raise_app_exceptions=False),
        base_url="http://localhost",
        headers={} if key is None else {"authorization": f"Bearer {key}"},
    )


def new_app(folder: Path, backend: TunedBackend) -> tuple[FastAPI, dict[str, str]]:
    """An application with all routes, and its keys by name."""
    path = folder / "keys.json"
    keys = {
        "alice": add_key(path, "alice", tenant="alices")[0],
        "limited": add_key(path, "limited", tenant="alices", models=(MODEL,))[0],
        "bob": add_key(path, "bob")[0],
        "admin": ADMIN_KEY,
        "metrics": METRICS_TOKEN,
        "node": NODE_TOKEN,
        "unknown": "unknown-key-0123456789abcdef",
    }
    settings = make_settings(
        server={
            "keys_file": path,
            "admin_key": ADMIN_KEY,
            "node_token": NODE_TOKEN,
            "dialects": get_args(Dialect),
        },
        metrics={"token": METRICS_TOKEN},
        limits={"auth_failures_per_minute": 100_000},
        storage={"path": str(folder / "kept")},
    )
    return create_app(settings, backend, Metrics(MODEL)), keys


@asynccontextmanager
async def new_world(folder: Path, monkeypatch: Any) -> AsyncIterator[World]:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    monkeypatch.setattr(runner, "TrainerProcess", ScriptedTrainer)
    monkeypatch.setattr(runner, "POLL_S", 0.005)
    STARTED.clear()
    backend = TunedBackend()
    backend.reset()
    app, keys = new_app(folder, backend)
    components = app.state.services.components
    for component in components:
        await component.start()
    world = World(app, backend, keys, {})
    try:
        for name in WORDS:
            async with world.client(name) as client:
                world.objects[name] = await _objects_of(app, client, WORDS[name])
        yield world
    finally:
        for component in reversed(components):
            await component.stop()


async def _objects_of(app: FastAPI, client: httpx.AsyncClient, word: str) -> dict[str, str]:
    """One object of each kind, as its tenant makes it. The kinds are those of `rows.py`."""
    objects = await _answers(client, word)
    objects |= await _uploaded(client, word)
    objects |= await _batches(client, word)
    objects |= await _trained(client, word, suffix=word)
    # A fake backend reads no activations, so a result is put where a request would put it.
    tenant = (await _record(app, client)).tenant
    results = app.state.services.interp_results
    results.put(f"interp-{word}-0123456789abcdef", tenant, b"tensors")
    return objects | {"result": f"interp-{word}-0123456789abcdef"}


async def _record(app: FastAPI, client: httpx.AsyncClient) -> Any:
    answer = await _made(client, "/v1/chat/completions", chat())
    found = app.state.services.history.newest(None)
    return next(each for each in found if each.completion_id == answer["id"])


async def _answers(client: httpx.AsyncClient, word: str) -> dict[str, str]:
    asked = chat(messages=[{"role": "user", "content": word}])
    stored = await _made(client, "/v1/chat/completions", asked | {"store": True})
    messages = (await client.get(f"/v1/chat/completions/{stored['id']}/messages")).json()["data"]
    response = await _made(client, "/v1/responses", {"model": MODEL, "input": word})
    inputs = (await client.get(f"/v1/responses/{response['id']}/input_items")).json()["data"]
    talk = {"items": [{"role": "user", "content": word}] * 2, "metadata": {"of": word}}
    conversation = await _made(client, "/v1/conversations", talk)
    path = f"/v1/conversations/{conversation['id']}/items"
    items = (await client.get(path)).json()["data"]
    submission = await _made(client, "/generate", {"prompt": word, "model": MODEL})
    headers = {"x-request-id": f"req-of-{word}"}
    answer = await client.post("/v1/completions", json=BODIES["/v1/completions"], headers=headers)
    return {
        "chat": stored["id"],
        "message": messages[0]["id"],
        "response": response["id"],
        "input_item": inputs[0]["id"],
        "output_item": response["output"][0]["id"],
        "conversation": conversation["id"],
        "item": items[0]["id"],
        "submission": submission["request_id"],
        "request": answer.headers["x-request-id"],
        "completion": answer.json()["id"],
    }


async def _uploaded(client: httpx.AsyncClient, word: str) -> dict[str, str]:
    upload = await _made(client, "/v1/uploads", BODIES["/v1/uploads"])
    path = f"/v1/uploads/{upload['id']}/parts"
    part = (await client.post(path, files={"data": b"x"})).json()
    line = {"custom_id": word, "method": "POST", "url": "/v1/completions"}
    line["body"] = BODIES["/v1/completions"]
    return {
        "upload": upload["id"],
        "part": part["id"],
        "file": await _file(client, "batch", [line]),
        "training_file": await _file(client, "fine-tune", LINES),
    }


async def _batches(client: httpx.AsyncClient, word: str) -> dict[str, str]:
    line = {"custom_id": word, "method": "POST", "url": "/v1/completions"}
    line["body"] = BODIES["/v1/completions"]
    body = BODIES["/v1/batches"] | {"input_file_id": await _file(client, "batch", [line])}
    batch = await _made(client, "/v1/batches", body)
    messages = await _made(client, "/v1/messages/batches", BODIES["/v1/messages/batches"])
    ended = await _wait(client, f"/v1/batches/{batch['id']}", lambda it: it["output_file_id"])
    path = f"/v1/messages/batches/{messages['id']}"
    await _wait(client, path, lambda it: it["processing_status"] == "ended")
    return {
        "batch": batch["id"],
        "output_file": ended["output_file_id"],
        "message_batch": messages["id"],
    }


async def _trained(client: httpx.AsyncClient, word: str, suffix: str) -> dict[str, str]:
    """A job that has ended, with a checkpoint, and one that is paused."""
    file = await _file(client, "fine-tune", LINES)
    body = {"model": MODEL, "training_file": file, "suffix": suffix}
    job = await _made(client, "/v1/fine_tuning/jobs", body)
    trainer = await _trainer(job["id"])
    trainer.tell("metrics", 1, loss=2.0)
    draft = trainer.folder.new_checkpoint(1, ends_epoch=True)
    peft_folder(draft, SHAPES)
    trainer.folder.keep_checkpoint(draft)
    trainer.succeed()
    path = f"/v1/fine_tuning/jobs/{job['id']}"
    ended = await _wait(client, path, lambda it: it["status"] == "succeeded")
    checkpoints = (await client.get(f"{path}/checkpoints")).json()["data"]
    events = (await client.get(f"{path}/events")).json()["data"]
    paused = await _made(client, "/v1/fine_tuning/jobs", body)
    answer = await client.post(f"/v1/fine_tuning/jobs/{paused['id']}/pause")
    assert answer.status_code == 200, answer.text
    return {
        "job": job["id"],
        "paused_job": paused["id"],
        "checkpoint": checkpoints[0]["id"],
        "checkpoint_model": checkpoints[0]["fine_tuned_model_checkpoint"],
        "event": events[0]["id"],
        "model": ended["fine_tuned_model"],
    }


async def _trainer(job_id: str) -> ScriptedTrainer:
    async def find() -> ScriptedTrainer | None:
        return next((each for each in STARTED if each.folder.path.name == job_id), None)

    found = await _until(find)
    assert isinstance(found, ScriptedTrainer)
    return found


async def _file(client: httpx.AsyncClient, purpose: str, lines: list[Any]) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    form = {"file": ("in.jsonl", content), "purpose": (None, purpose)}
    return str((await client.post("/v1/files", files=form)).json()["id"])


async def _made(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code in (200, 202), (path, answer.text)
    return dict(answer.json())


async def _wait(client: httpx.AsyncClient, path: str, is_done: Callable[[Any], Any]) -> Any:
    async def find() -> Any:
        body = (await client.get(path)).json()
        return body if is_done(body) else None

    return await _until(find)


async def _until(find: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(120):
        while (found := await find()) is None:
            await asyncio.sleep(0.002)
    return found
