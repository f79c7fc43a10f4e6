"""A key that is limited to some models learns nothing of the others, by any route (SEC-22; T1).

The server has the model of the key, another model that comes first, a LoRA adapter of that, and a
model that another tenant trained. A request that does not name them gets no answer that does. A
request that names one gets the answer that it would get if there were no such model.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from engine.core.config_types import Dialect
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.access.auth import ADMIN_PATH
from engine.servers.app import create_app
from tests.scoreboard.http.bodies import least_bodies
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

SECRET = "zz-secret"
HIDDEN = (f"{SECRET}-model", f"{SECRET}-adapter", f"ft:{MODEL}:{SECRET}:1")
ABSENT = "zz-absent"  # as long as `SECRET`
ADMIN = "admin-key-0123456789abcdef"
# What differs between two answers to the same request.
VARYING = re.compile(
    r"[0-9a-f]{16,}|\d+\.\d+|\d{9,}|\d{4}-\d\d-\d\d\w[\d:.]+|(?<=_duration\":)\d+", re.IGNORECASE
)


def cards() -> list[Any]:
    hidden, adapter, trained = HIDDEN
    return [
        msgspec.structs.replace(CARD, id=hidden),
        msgspec.structs.replace(CARD, id=adapter, root=hidden, parent=hidden),
        CARD,
        msgspec.structs.replace(CARD, id=trained, root=MODEL, parent=MODEL, tenant="another"),
    ]


def make_app(tmp_path: Path, **server: Any) -> tuple[FastAPI, FakeBackend, dict[str, str]]:
    """The server, and keys by name: `limited` to one model, `free`, and `stranger`."""
    keys_file = tmp_path / "keys.json"
    keys = {
        "limited": add_key(keys_file, "limited", tenant="team", models=(MODEL,))[0],
        "free": add_key(keys_file, "free", tenant="team")[0],
        "stranger": add_key(keys_file, "stranger")[0],
        "admin": ADMIN,
    }
    backend = FakeBackend()
    backend.cards = cards()
    settings = make_settings(
        server={
            "keys_file": keys_file,
            "admin_key": ADMIN,
            "dialects": get_args(Dialect),
            **server,
        },
        storage={"path": str(tmp_path)},
    )
    return create_app(settings, backend, Metrics(MODEL)), backend, keys


def client_for(app: FastAPI, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://localhost",
        headers={"authorization": f"Bearer {key}"},
    )


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in sorted(route.methods))


def body_of(path: str, model: str | None) -> dict[str, Any] | None:
    """The least body of a route, which names `model`; None: it names none."""
    found = least_bodies(model or MODEL).get(path.replace(":path}", "}"))
    if found is None or model is not None:
        return found
    return {name: value for name, value in found.items() if name != "model"}


async def send(
    client: httpx.AsyncClient, method: str, path: str, body: Any, **more: Any
) -> tuple[int, str]:
    """The status of an answer, and all of its text with the headers."""
    async with asyncio.timeout(120):
        answer = await client.request(method, path, json=body, **more)
    return answer.status_code, f"{answer.headers!r}\n{answer.text}"


def with_model(body: Any, model: str) -> Any:
    """The body with the field `model`, for routes whose model may be left out."""
    return {"model": model} | body if isinstance(body, dict) else body


async def test_no_answer_names_a_model_that_the_key_may_not_use(tmp_path: Path) -> None:
    app, backend, keys = make_app(tmp_path)
    told = []
    async with client_for(app, keys["limited"]) as client:
        for method, path in routes(app):
            filled = re.sub(r"\{[^}]+\}", "x", path)
            for model in (MODEL, None):
                for body in (body_of(path, model), None):
                    _, text = await send(client, method, filled, body)
                    if SECRET in text:
                        told.append((method, path, text[:300]))
    assert not told
    # A probe of the server's health is not the client's request.
    asked = [each.context for each in backend.requests if each.context.request_id[:6] != "health"]
    assert {context.model for context in asked} == {MODEL}


@pytest.mark.parametrize("name", HIDDEN)
async def test_a_model_that_the_key_may_not_use_looks_like_a_missing_one(
    tmp_path: Path, name: str
) -> None:
    app, backend, keys = make_app(tmp_path)
    differing = []
    async with client_for(app, keys["limited"]) as client:
        for method, path in routes(app):
            if path.startswith(ADMIN_PATH):
                continue
            answers = []
            for model in (name, name.replace(SECRET, ABSENT)):
                filled = re.sub(r"\{[^}]+\}", model, path)
                body = with_model(body_of(path, model), model)
                more = {"params": {"model": model}} if method == "GET" else {}
                status, text = await send(client, method, filled, body, **more)
                answers.append((status, VARYING.sub("#", text.replace(model, "?"))))
            if answers[0] != answers[1]:
                differing.append((method, path, *answers))
    assert not differing
    assert not backend.embed_requests


async def test_a_tenant_that_may_use_all_models_sees_no_model_that_another_trained(
    tmp_path: Path,
) -> None:
    app, backend, keys = make_app(tmp_path)
    trained = HIDDEN[2]
    async with client_for(app, keys["free"]) as client:
        listed = (await client.get("/v1/models")).text
        refused = await client.post("/v1/completions", json={"model": trained, "prompt": "a"})
        assert HIDDEN[0] in listed and trained not in listed
        assert refused.status_code == 404 and trained not in refused.text
        assert (await client.delete(f"/v1/models/{trained}")).status_code == 404
    async with client_for(app, ADMIN) as client:
        assert trained in (await client.get("/v1/models")).text
    assert not backend.requests


async def test_the_model_name_may_be_omitted_if_the_key_is_limited_to_one_model(
    tmp_path: Path,
) -> None:
    app, backend, keys = make_app(tmp_path)
    async with client_for(app, keys["limited"]) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 200 and answer.json()["model"] == MODEL
    async with client_for(app, keys["free"]) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400 and "several models" in answer.text
    assert [request.context.model for request in backend.requests] == [MODEL]


async def test_moderation_needs_a_key_that_may_use_the_moderation_model(tmp_path: Path) -> None:
    app, backend, keys = make_app(tmp_path, moderation_model=HIDDEN[0])
    async with client_for(app, keys["limited"]) as client:
        status, text = await send(client, "POST", "/v1/moderations", {"input": "a"})
    assert status == 400 and SECRET not in text
    assert not backend.requests


async def test_metrics_of_all_requests_are_refused_if_there_are_several_tenants(
    tmp_path: Path,
) -> None:
    for names, status in ((("one",), 200), (("one", "two"), 403)):
        keys_file = tmp_path / f"{len(names)}.json"
        key = [add_key(keys_file, name)[0] for name in names][0]
        settings = make_settings(server={"keys_file": keys_file})
        app = create_app(settings, FakeBackend(), Metrics(MODEL))
        async with client_for(app, key) as client:
            for path in ("/v1/admin/routes", "/v1/admin/shadow"):
                assert (await client.get(path)).status_code == status
