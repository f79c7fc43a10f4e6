"""What a client learns of its prompt's length: a 400 if it is too long, and the number of tokens
before the answer.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from engine.core.interfaces.backend import FinishEvent, TextEvent
from engine.core.observability.metrics import Metrics
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router
from engine.servers.app import create_app
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import CONTEXT_LENGTH, MODEL, FakeBackend, call_script
from tests.support.servers.live_server import chat, make_settings
from tests.support.servers.responses_api import app_over, client_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOO_LONG = "w " * CONTEXT_LENGTH
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def bodies(text: str) -> dict[str, dict[str, Any]]:
    return {
        CHAT: chat(messages=[{"role": "user", "content": text}]),
        COMPLETIONS: {"model": MODEL, "prompt": text},
        "/v1/responses": {"model": MODEL, "input": text},
        "/v1/messages": chat(messages=[{"role": "user", "content": text}], max_tokens=5),
        "/generate": {"prompt": text},
    }


def routed(backend: FakeBackend) -> FastAPI:
    replica = Replica("f", "fake", backend)
    replica.has_started = True
    route = Route(MODEL, [Member(replica, 1.0)], "round_robin", make_policy("round_robin"))
    router = Router([replica], [route], RouterMetrics(CollectorRegistry()))
    return create_app(make_settings(), router, Metrics(MODEL))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app_over(backend, tmp_path, body_limit_mb=1)) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", bodies(""))
async def test_a_prompt_that_is_too_long_is_a_400(
    backend: FakeBackend, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tokenizing takes longer than the wait for the first event, as with megabytes of text.
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.0)
    backend.check_s = 0.02
    body = bodies(TOO_LONG)[path] | {"stream": stream}
    async with client_of(routed(backend)) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"maximum context length is {CONTEXT_LENGTH} tokens" in message
    # Claude Code shortens its conversation if it reads these words.
    assert message.startswith("prompt is too long") == (path == "/v1/messages")


@pytest.mark.parametrize("path", bodies(""))
async def test_a_413_for_a_large_body_names_the_context_length(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.post(path, json=bodies("w " * 2**20)[path])
    assert answer.status_code == 413, answer.text
    message = answer.json()["error"]["message"]
    assert f"This model's maximum context length is {CONTEXT_LENGTH} tokens." in message


async def test_too_large_max_tokens_is_not_reported_as_a_long_prompt(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.post(
        "/v1/messages", json=bodies("a")["/v1/messages"] | {"max_tokens": 10**6}
    )
    assert answer.status_code == 400
    assert "prompt is too long" not in answer.text


@pytest.mark.parametrize("tells_prompt", [True, False])
async def test_a_messages_stream_starts_with_its_input_tokens(
    client: httpx.AsyncClient, backend: FakeBackend, tells_prompt: bool
) -> None:
    backend.tells_prompt = tells_prompt
    body = bodies("one two three")["/v1/messages"] | {"stream": True}
    events = [
        json.loads(line.removeprefix("data: "))
        for line in (await client.post("/v1/messages", json=body)).text.splitlines()
        if line.startswith("data: ")
    ]
    started = events[0]["message"]["usage"]
    # A backend that does not report its prompts' lengths has a tokenizer, here one of bytes.
    expected = 3 if tells_prompt else 1 + len("one two three")
    assert (started["input_tokens"], started["output_tokens"]) == (expected, 0)
    assert "citations" not in str(events)
    if tells_prompt:
        ended = next(each for each in events if each["type"] == "message_delta")["usage"]
        assert ended["input_tokens"] + ended["cache_read_input_tokens"] == expected


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_continuous_usage_is_in_every_chunk(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["one two", "three"], "n": 2, "stream": True, "stream_options": CONTINUOUS}
    answer = await client.post(COMPLETIONS, json=body | {"model": MODEL})
    assert answer.status_code == 200 and "x-engine-warnings" not in answer.headers
    *chunks, last = chunks_of(answer.text)
    counts = [0] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        counts[choice["index"]] += 1 if choice["text"] else 0
        num_prompt = (2, 2, 1, 1)[choice["index"]]
        assert chunk["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": counts[choice["index"]],
            "total_tokens": num_prompt + counts[choice["index"]],
        }
    assert counts == [6] * 4
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24


async def test_continuous_usage_counts_tokens_without_text(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    backend.script = call_script(("f", "{}"), said='a"usage":null}\n\n')
    body = chat(stream=True, stream_options=CONTINUOUS, tools=tools)
    opening, said, *rest, ended, last = chunks_of((await client.post(CHAT, json=body)).text)
    assert opening["usage"]["completion_tokens"] == 0 and opening["usage"]["prompt_tokens"] > 0
    assert said["choices"][0]["delta"]["content"] == 'a"usage":null}\n\n'
    assert said["usage"]["completion_tokens"] == 1
    assert {each["usage"]["completion_tokens"] for each in rest} == {1, 2}
    assert ended["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 2


async def test_events_dropped_for_a_slow_client_are_counted_at_the_end(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.token_s = None
    backend.script = [*(TextEvent(0, "", 1) for _ in range(9)), FinishEvent(0, "stop")]
    body = chat(stream=True, stream_options=CONTINUOUS)
    chunks = chunks_of((await client.post(CHAT, json=body)).text)
    assert chunks[-2]["usage"]["completion_tokens"] == 9


async def test_continuous_usage_needs_include_usage(client: httpx.AsyncClient) -> None:
    body = chat(stream=True, stream_options={"continuous_usage_stats": True})
    answer = await client.post(CHAT, json=body)
    assert "stream_options.continuous_usage_stats" in answer.headers["x-engine-warnings"]
    assert all("usage" not in chunk for chunk in chunks_of(answer.text))


async def test_messages_with_a_thread_are_refused_with_the_sdks_error_code(
    client: httpx.AsyncClient,
) -> None:
    body = bodies("a")["/v1/messages"]
    answer = await client.post("/v1/messages", json=body | {"thread": {"type": "create"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and "thread" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    plain = await client.post("/v1/messages", json=body | {"thread": None})
    assert plain.status_code == 200
