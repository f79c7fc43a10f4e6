"""A lone surrogate in any field of any request is a 400, streamed or not (SEC-06; T2)."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.openapi import BODIES, QUERIES
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

JSON = {"content-type": "application/json"}
LONE = ('"\\ud800"', '["a\\udfffb"]', '{"\\ud800": 1}')


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(make_settings(), FakeBackend(), Metrics(MODEL))


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_lone_surrogates_in_every_body_field_are_400(
    client: httpx.AsyncClient, path: str
) -> None:
    kind = BODIES[path]
    streams = (False, True) if "stream" in kind.model_fields else (None,)
    for name in (*kind.model_json_schema().get("properties", {}), "unknown"):
        for value in LONE:
            for stream in streams:
                rest = "" if stream is None or name == "stream" else json.dumps(stream)
                body = f'{{"{name}": {value}' + (f', "stream": {rest}' if rest else "") + "}"
                response = await client.post(
                    path.replace("{name}", "x"), content=body.encode(), headers=JSON
                )
                assert response.status_code == 400, (name, value)
                assert len(response.content) < 4096 and "Traceback" not in response.text


@pytest.mark.parametrize("path", sorted(QUERIES))
async def test_lone_surrogates_in_every_query_parameter_are_no_500(
    client: httpx.AsyncClient, path: str
) -> None:
    place = path.replace("{response_id}", "%ED%A0%80")
    for name in QUERIES[path].model_json_schema()["properties"]:
        response = await client.get(f"{place}?{name}=%ED%A0%80")
        assert response.status_code < 500, (name, response.text)


async def test_lone_surrogates_in_path_parameters_are_4xx(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models/", "/v1/responses/", "/v1/files/", "/v1/batches/", "/generate/"):
        response = await client.get(path + "%ED%A0%80x")
        assert 400 <= response.status_code < 500, path
