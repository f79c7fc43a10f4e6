"""A request for several choices gets all of them, or is refused, on every route that knows `n`."""

from typing import Any

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.openapi import document
from tests.scoreboard.http.bodies import least_bodies
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

APP = create_app(make_settings(), FakeBackend(), Metrics(MODEL))
BODIES = least_bodies(MODEL)


def _paths_with_choices() -> list[str]:
    description: dict[str, Any] = document(APP)
    schemas = description["components"]["schemas"]
    found = []
    for path, operations in description["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        if "n" in schemas.get(name.rpartition("/")[2], {}).get("properties", {}):
            found.append(path)
    return found


@pytest.mark.parametrize("name", ["n", "n_cmpl"])
@pytest.mark.parametrize("path", _paths_with_choices())
async def test_requests_for_several_choices_are_answered_or_refused_completely(
    path: str, name: str
) -> None:
    target = path.replace("{name}", MODEL).replace("{deployment}", MODEL)
    body = BODIES[path] | {name: 2, "stream": False}
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post(target.replace("{version}", "1"), json=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 200:
        told = answer.json()
        assert len(told if isinstance(told, list) else told["choices"]) == 2
