"""Shared by the tests of /v1/responses: the application with a fake model, and its words."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from engine.core.interfaces.backend import (
    ChatRequest,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

TEXT = "Hello from a fake model."
TOOL = {
    "type": "function",
    "name": "get_time",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "strict": True,
}
CALLED = [
    {"role": "user", "content": "what time is it?"},
    {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"zone":"utc"}'},
]
CALL_MESSAGE = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_time", "arguments": {"zone": "utc"}},
        }
    ],
}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "say hello", "store": False} | fields


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream. Checks that both type fields agree and that the numbers are
    consecutive.
    """
    events: list[dict[str, Any]] = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def app_over(backend: FakeBackend, tmp_path: Path, **server: Any) -> FastAPI:
    settings = make_settings(storage={"path": tmp_path}, server=server)
    return create_app(settings, backend, Metrics(MODEL))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@asynccontextmanager
async def serving(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a new application, which must hold nothing at the end of the test."""
    app = app_over(backend, tmp_path)
    async with client_of(app) as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0
    assert backend.num_open == 0


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json=ask(**fields))
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post("/v1/responses", json=ask(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events_of(response.text)


def asked(backend: FakeBackend) -> ChatRequest:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return request
