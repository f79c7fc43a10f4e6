"""By default, serving fetches nothing: what names an address is refused, and no connection is made
(SEC-23, SEC-25; T5). The model here reads no images; test_images.py has hosts that are allowed.
"""

import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

URLS = (
    "http://169.254.169.254/latest/meta-data",
    "http://ok\\@169.254.169.254/",
    "http://2852039166/",
    "http://[::ffff:127.0.0.1]/",
    "file:///etc/passwd",
    "https://example.com/cat.png",
    "data:image/png;base64,AAAA",
)


def bodies(url: str) -> list[tuple[str, dict[str, Any]]]:
    def chat(part: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}

    def response(part: dict[str, Any]) -> dict[str, Any]:
        return {"model": MODEL, "input": [{"role": "user", "content": [part]}]}

    def message(kind: str) -> dict[str, Any]:
        part = {"type": kind, "source": {"type": "url", "url": url}}
        return chat(part) | {"max_tokens": 5}

    openai = "/v1/chat/completions"
    return [
        (openai, chat({"type": "image_url", "image_url": {"url": url}})),
        (openai, chat({"type": "video_url", "video_url": {"url": url}})),
        (openai, chat({"type": "input_audio", "input_audio": {"data": url, "format": "wav"}})),
        (openai, chat({"type": "file", "file": {"file_data": url}})),
        ("/v1/responses", response({"type": "input_image", "image_url": url})),
        ("/v1/responses", response({"type": "input_file", "file_url": url})),
        ("/v1/messages", message("image")),
        ("/v1/messages", message("document")),
    ]


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection is made")

    backend = FakeBackend()
    app = create_app(make_settings(), backend, Metrics(MODEL))
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, connect, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert not backend.requests


@pytest.mark.parametrize("url", URLS)
async def test_urls_in_requests_are_refused_and_not_echoed(
    client: httpx.AsyncClient, url: str
) -> None:
    for path, body in bodies(url):
        response = await client.post(path, json=body)
        assert response.status_code == 400, (path, body, response.text)
        assert url not in response.text and len(response.content) < 2048
