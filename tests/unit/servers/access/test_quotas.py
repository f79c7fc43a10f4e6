"""What a key may ask for: counted before the work, put right after it, told in headers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.config_schema import LimitsSettings
from engine.core.errors import RateLimitError
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.access import rate_windows as windows
from engine.servers.access.auth import Principal
from engine.servers.access.quotas import BYTES_PER_TOKEN, AuthThrottle, Quotas
from engine.servers.access.rate_windows import WINDOW_S
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import DEFAULT_WORDS, MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

NUM_WORDS = len(DEFAULT_WORDS)
CHAT, JSON = "/v1/chat/completions", {"content-type": "application/json"}
CHAT_TOKENS = len(httpx.Request("POST", "http://localhost", json=chat()).content) // BYTES_PER_TOKEN


class Clock:
    """Clocks that a test holds."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0 // WINDOW_S * WINDOW_S

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(windows, "time", clock)
    return clock


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def app_with(backend: FakeBackend, **sections: dict[str, Any]) -> FastAPI:
    return create_app(make_settings(**sections), backend, Metrics(MODEL))


def client_for(app: FastAPI, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.fixture
async def limited(backend: FakeBackend, clock: Clock) -> AsyncIterator[httpx.AsyncClient]:
    app = app_with(backend, limits={"requests_per_minute": 3, "tokens_per_minute": 1000})
    async with client_for(app) as client:
        yield client
    assert not list(app.state.services.quotas.in_use())
    assert app.state.services.lifecycle.num_admitted == 0


async def test_requests_per_minute_are_limited(limited: httpx.AsyncClient, clock: Clock) -> None:
    for left in (2, 1, 0):
        answer = await limited.post("/v1/chat/completions", json=chat(max_tokens=8))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = await limited.post("/v1/chat/completions", content=b"not even JSON")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    wait_s = int(refused.headers["retry-after"])
    clock.now += wait_s - 2
    assert (await limited.post("/v1/chat/completions", json=chat())).status_code == 429
    clock.now += 2
    assert (await limited.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_tokens_are_charged_before_a_request_and_corrected_after(
    limited: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.prefill_s = 30
    running = asyncio.create_task(
        limited.post("/v1/chat/completions", json=chat(max_tokens=300, n=3))
    )
    while not backend.num_open:
        await asyncio.sleep(0.001)
    refused = await limited.post("/v1/chat/completions", json=chat(max_tokens=300))
    assert refused.status_code == 429
    assert "tokens" in refused.json()["error"]["message"]
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) < 100
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    backend.prefill_s = 0
    answer = await limited.post("/v1/chat/completions", json=chat(max_tokens=300, n=3))
    assert answer.status_code == 200
    used = answer.json()["usage"]["total_tokens"]
    assert used == 3 * NUM_WORDS + 2
    state = await limited.get("/v1/models")
    assert state.status_code == 200  # not a request for work: nothing is counted


async def test_only_the_tokens_used_in_the_end_are_counted(
    backend: FakeBackend, clock: Clock
) -> None:
    app = app_with(backend, limits={"tokens_per_minute": 500})
    async with client_for(app) as client:
        for _ in range(20):
            answer = await client.post("/v1/chat/completions", json=chat(max_tokens=300))
            assert answer.status_code == 200
        window = await app.state.services.quotas.windows.look("tokens/")
        assert window.current == 20 * (NUM_WORDS + 2)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", chat(n=0), 400),
        ("/v1/chat/completions", chat(model="other"), 404),
        ("/v1/completions", {"model": MODEL}, 400),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 100}, 200),
        ("/v1/messages", {"model": MODEL, "messages": []}, 400),
        ("/v1/embeddings", {"model": MODEL, "input": ["one two"]}, 200),
        ("/v1/responses", {"model": MODEL, "input": "x", "store": False}, 200),
        ("/generate", {"model": MODEL, "prompt": "x"}, 200),
        ("/tokenize", {"prompt": "x"}, 200),
    ],
)
async def test_every_kind_of_ending_refunds_the_charge(
    backend: FakeBackend, clock: Clock, path: str, body: dict[str, Any], status: int
) -> None:
    app = app_with(backend, limits={"tokens_per_minute": 2000, "max_concurrent": 1})
    quotas = app.state.services.quotas
    async with client_for(app) as client:
        for _ in range(2):
            answer = await client.post(path, json=body)
            assert answer.status_code == status, answer.text
            while list(quotas.in_use()):  # a submission runs on its own
                await asyncio.sleep(0.001)
    window = await quotas.windows.look("tokens/")
    assert window.current <= 2 * (NUM_WORDS + 2)


async def test_a_request_beyond_the_token_limit_is_refused_without_retry(
    limited: httpx.AsyncClient,
) -> None:
    answer = await limited.post("/v1/chat/completions", json=chat(max_tokens=400, n=3))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"


async def test_concurrent_and_queued_requests_are_limited(
    backend: FakeBackend, clock: Clock
) -> None:
    backend.prefill_s = 30
    refusals = (
        ({"max_concurrent": 2}, "at work"),
        ({"max_queued": 2}, "requests waiting, which"),
        ({"max_queued_tokens": 2 * CHAT_TOKENS}, f"waiting with about {2 * CHAT_TOKENS} tokens"),
    )
    for limits, word in refusals:
        app = app_with(backend, limits=limits)
        async with client_for(app) as client:
            running = [
                asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
                for _ in range(2)
            ]
            while backend.num_open < 2:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/chat/completions", json=chat())
            assert refused.status_code == 429
            assert word in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            assert not list(app.state.services.quotas.in_use())


async def test_a_prompt_beyond_max_queued_tokens_is_refused_without_retry(
    backend: FakeBackend,
) -> None:
    app = app_with(backend, limits={"max_queued_tokens": CHAT_TOKENS - 1})
    async with client_for(app) as client:
        refused = await client.post("/v1/chat/completions", json=chat())
    assert refused.status_code == 400
    assert "Send a shorter prompt" in refused.json()["error"]["message"]


async def test_a_chunked_body_is_charged_like_any_other(backend: FakeBackend, clock: Clock) -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        said = chat(messages=[{"role": "user", "content": "a" * size}], max_tokens=1)
        yield httpx.Request("POST", "http://x", json=said).content

    for limits in ({"tokens_per_minute": 500}, {"max_queued_tokens": 500}):
        app = app_with(backend, limits=limits)
        async with client_for(app) as client:
            answered = await client.post(CHAT, content=pieces(200 * 4), headers=JSON)
            refused = await client.post(CHAT, content=pieces(600 * 4), headers=JSON)
        assert (answered.status_code, refused.status_code) == (200, 400)
        assert "shorter prompt" in refused.json()["error"]["message"]
        assert not list(app.state.services.quotas.in_use())


async def test_a_client_that_disconnects_before_the_first_token_is_charged_the_prompt(
    backend: FakeBackend, clock: Clock
) -> None:
    backend.prefill_s = 30
    app = app_with(backend, limits={"tokens_per_minute": 5000})
    async with client_for(app) as client:
        leaving = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
        while not backend.num_open:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    window = await app.state.services.quotas.windows.look("tokens/")
    assert window.current == CHAT_TOKENS


async def test_keys_have_their_own_limits(
    backend: FakeBackend, clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    tight, _ = add_key(path, "tight", limits={"requests_per_minute": 1})
    loose, _ = add_key(path, "loose", limits={"requests_per_minute": 100})
    usual, _ = add_key(path, "usual")
    limits = {"requests_per_minute": 2}
    app = app_with(backend, server={"keys_file": path}, limits=limits)
    for key, allowed in ((tight, 1), (loose, 5), (usual, 2)):
        async with client_for(app, key) as client:
            statuses = [
                (await client.post("/v1/chat/completions", json=chat())).status_code
                for _ in range(5)
            ]
        assert statuses == [200] * allowed + [429] * (5 - allowed)


async def test_an_answer_longer_than_charged_is_charged_afterwards(clock: Clock) -> None:
    quotas = Quotas(LimitsSettings(tokens_per_minute=500))
    lease = await quotas.enter(Principal("t"), 40, {})
    assert lease is not None
    await lease.close(100)
    await lease.close(100)
    assert (await quotas.windows.look("tokens/t")).current == 100


async def test_an_exhausted_token_quota_refuses_even_an_empty_body(
    clock: Clock,
) -> None:
    quotas = Quotas(LimitsSettings(tokens_per_minute=10))
    who = Principal("t")
    assert await quotas.enter(who, 10 * BYTES_PER_TOKEN, {}) is not None
    with pytest.raises(RateLimitError):
        await quotas.enter(who, 0, {})


async def test_keys_of_one_tenant_are_counted_separately_and_the_admin_is_not(
    clock: Clock,
) -> None:
    quotas = Quotas(LimitsSettings(requests_per_minute=1))
    for key in ("one", "two"):
        assert await quotas.enter(Principal("t", key=key), 0, {}) is not None
        with pytest.raises(RateLimitError):
            await quotas.enter(Principal("t", key=key), 0, {})
    for _ in range(3):
        assert await quotas.enter(Principal("admin", key="admin", is_admin=True), 0, {}) is None


async def test_every_choice_of_every_prompt_is_charged(backend: FakeBackend, clock: Clock) -> None:
    app = app_with(backend, limits={"tokens_per_minute": 450})
    asked = {"model": MODEL, "prompt": ["a", "b"], "n": 2}
    async with client_for(app) as client:
        fits = await client.post("/v1/completions", json=asked | {"max_tokens": 100})
        never = await client.post("/v1/completions", json=asked | {"max_tokens": 120})
    assert (fits.status_code, never.status_code) == (200, 400)
    assert never.json()["error"]["param"] == "max_tokens"


async def test_embeddings_are_charged_for_prompt_tokens_only(
    backend: FakeBackend, clock: Clock
) -> None:
    app = app_with(backend, limits={"tokens_per_minute": 100})
    async with client_for(app) as client:
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "one two"})
    assert answer.status_code == 200
    assert (await app.state.services.quotas.windows.look("tokens/")).current == 2


async def test_addresses_of_one_network_count_as_one_client(clock: Clock) -> None:
    throttle = AuthThrottle(1)
    for first, second, other in (
        ("2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
    ):
        await throttle.note_failure(first)
        with pytest.raises(RateLimitError):
            await throttle.note_failure(second)
        await throttle.note_failure(other)
