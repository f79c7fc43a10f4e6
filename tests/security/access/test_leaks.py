"""Errors say what a client may know, whatever failed; caches and labels do not grow with what
clients send; names lead nowhere (SEC-17, SEC-24, SEC-32, SEC-42; T1, T2).
"""

import gc
import io
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import Any

import httpx
import pytest

from engine.core.observability.logging import setup_logging
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

SECRETS = (
    "/home/operator/models/private.gguf",
    "0x7f3a5c001230",
    "/dev/shm/engine-4711",
    "gpu-host-17.internal",
    "the words of another client",
)
LEAK = RuntimeError(f"failed: {', '.join(SECRETS)}, {os.environ.get('PATH', '')}")
SUSPICIOUS = re.compile(r"0x[0-9a-f]{6,}|Traceback|File \"|/(home|dev|usr|tmp|proc)/|\.py\b")
MESSAGES = [{"role": "user", "content": "hello"}]
GENERATING = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/completions": {"model": MODEL, "prompt": "hello"},
    "/v1/responses": {"model": MODEL, "input": "hello", "store": False},
    "/v1/messages": {"model": MODEL, "max_tokens": 5, "messages": MESSAGES},
    "/generate": {"prompt": "hello"},
}
OTHERS = {
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/tokenize": {"model": MODEL, "prompt": "hello"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
}


class BrokenBackend(FakeBackend):
    """Raises a bug where it is told to."""

    broken: str | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "broken"):
            raise LEAK
        return super().__getattribute__(name)


@pytest.fixture
def backend() -> BrokenBackend:
    return BrokenBackend()


@pytest.fixture
async def client(backend: BrokenBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    stream = io.StringIO()
    setup_logging("info", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def check(text: str) -> None:
    assert not SUSPICIOUS.search(text), text
    assert not any(secret in text for secret in SECRETS), text
    assert len(text) < 8192


@pytest.mark.parametrize("broken", ["chat", "complete", "resolve", "models", "health", None])
async def test_internal_errors_in_generation_leak_no_details(
    client: httpx.AsyncClient, backend: BrokenBackend, broken: str | None
) -> None:
    backend.failure, backend.broken = LEAK, broken
    for fail_after in (0, 2) if broken is None else (0,):
        backend.fail_after = fail_after
        for path, body in GENERATING.items():
            for stream in (False, True):
                response = await client.post(path, json=body | {"stream": stream})
                check(response.text)


@pytest.mark.parametrize("broken", ["embed", "tokenize", "detokenize", "models", "stats"])
async def test_internal_errors_beside_generation_leak_no_details(
    client: httpx.AsyncClient, backend: BrokenBackend, broken: str
) -> None:
    backend.broken = broken
    for path, body in OTHERS.items():
        check((await client.post(path, json=body)).text)
    for path in ("/v1/models", "/health", "/v1/admin/routes", "/v1/capabilities"):
        response = await client.get(path)
        if response.status_code >= 400:
            check(response.text)


@pytest.mark.parametrize("hostile", ["a\r\nb", "\x1b[31m", "\u2028", '{"level":"x"}\n', "\x00"])
async def test_a_request_is_logged_on_one_line(
    log: io.StringIO, client: httpx.AsyncClient, hostile: str
) -> None:
    header = hostile.encode("utf-8").replace(b"\r\n", b" ").replace(b"\n", b" ").replace(b"\0", b"")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"the prompt's own words {hostile}"}],
        "user": f"u{hostile}",
        "metadata": {"key": f"m{hostile}"},
    }
    headers = {b"x-request-id": header, b"user-agent": header, b"x-session-id": header}
    await client.post("/v1/chat/completions", json=body, headers=headers)
    await client.post("/v1/chat/completions", json=body | {"model": f"m{hostile}"})
    lines = [line for line in log.getvalue().splitlines() if line]
    assert len(lines) >= 2
    for line in lines:
        assert isinstance(json.loads(line), dict) and line.isprintable()
    assert "the prompt's own words" not in log.getvalue() and "fake model" not in log.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "..\\..\\windows",
        "/etc/passwd",
        "sha256:../../etc/passwd",
        "a\x00b",
        "file:///etc/passwd",
        "~/.ssh/id_rsa",
    ],
)
async def test_model_names_are_never_used_as_paths(client: httpx.AsyncClient, name: str) -> None:
    for path, body in (GENERATING | OTHERS).items():
        if "model" in body:
            response = await client.post(path, json=body | {"model": name})
            assert response.status_code == 404, path
            assert "root:" not in response.text and name not in response.text
    quoted = httpx.URL(f"http://localhost/{name}".replace("\x00", "%00")).raw_path.decode()
    for prefix in ("/v1/models", "/v1/responses", "/v1/files", "/v1/batches", "/generate"):
        response = await client.get(prefix + quoted)
        assert 400 <= response.status_code < 500
        assert "root:" not in response.text


async def test_memory_and_metrics_do_not_grow_with_client_chosen_names_keys_and_salts() -> None:
    metrics, backend = Metrics(MODEL), FakeBackend(["x"])
    # The last requests are kept on purpose, with their ids.
    settings = make_settings(server={"api_key": "k" * 32}, requests={"keep": 10})
    app = create_app(settings, backend, metrics)
    transport = httpx.ASGITransport(app=app)
    good = {"authorization": "Bearer " + "k" * 32}

    async def ask(number: int) -> None:
        unique = f"{number}-{MARK}"
        body = {"model": MODEL, "messages": MESSAGES, "user": unique, "cache_salt": unique}
        headers = {"x-request-id": unique, "x-session-id": unique}
        await client.post("/v1/chat/completions", json=body, headers=headers | good)
        await client.post("/v1/chat/completions", json=body | {"model": unique}, headers=good)
        await client.get("/v1/models", headers={"authorization": f"Bearer {unique}"})
        await client.get("/v1/models", headers=good | {"host": unique})
        backend.requests.clear()

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for number in range(20):
            await ask(number)
        series = len(metrics.render()[0].splitlines())
        for number in range(20, 120):
            await ask(number)
        assert len(metrics.render()[0].splitlines()) == series
        gc.collect()
        assert num_kept() <= 20


MARK = "unmistakable-" * 3


def num_kept() -> int:
    """Texts with the mark that anything holds."""
    kept = set()
    for each in gc.get_objects():
        if isinstance(each, FrameType):
            continue
        for held in gc.get_referents(each):
            if isinstance(held, str | bytes) and (
                MARK in held if isinstance(held, str) else MARK.encode() in held
            ):
                kept.add(id(held))
    return len(kept)
