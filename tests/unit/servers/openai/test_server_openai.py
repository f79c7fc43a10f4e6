"""The shapes of /v1: what the OpenAI clients parse, whole and streamed."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import InferenceError, InvalidRequestError
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.serving import event_pump as generation
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, events_of, make_settings

TEXT = "Hello from a fake model."


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0
    assert backend.num_open == 0


async def stream_chat(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    response = await client.post("/v1/chat/completions", json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return events_of(response.text)


async def test_chat_completion_body_has_openais_shape(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat(n=2))
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["system_fingerprint"].startswith("fp_")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_chat_stream_begins_with_roles_and_ends_with_finish_reasons(
    client: httpx.AsyncClient,
) -> None:
    *chunks, done = await stream_chat(client, n=2)
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["delta"] == {}
        assert all(list(each["delta"]) == ["content"] for each in own[1:-1])
        assert "".join(each["delta"]["content"] for each in own[:-1]) == TEXT
        assert len(own) == 2 + 6  # one chunk per token


async def test_tokens_of_a_burst_are_sent_as_separate_chunks(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.token_s = None
    *chunks, _ = await stream_chat(client)
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert deltas == ["", *backend.words, None]


async def test_stream_usage_is_a_separate_chunk_and_only_on_request(
    client: httpx.AsyncClient,
) -> None:
    *chunks, usage, done = await stream_chat(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_chat_logprobs_have_openais_shape(client: httpx.AsyncClient) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = (await client.post("/v1/chat/completions", json=chat(**asked))).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert entries[0]["token"] == "Hello"
    assert entries[0]["bytes"] == list(b"Hello")
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["Hello0", "Hello1"]
    assert entries[-1]["logprob"] == -9999.0  # JSON has no -inf
    chunks = await stream_chat(client, **asked)
    streamed = [
        entry
        for chunk in chunks[:-1]
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries
    none_on_top = (await client.post("/v1/chat/completions", json=chat(logprobs=True))).json()
    assert none_on_top["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_completion_fans_out_over_prompts(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = {"model": MODEL, "prompt": ["one two", [5, 6, 7]], "n": 2}
    whole = (await client.post("/v1/completions", json=body)).json()
    assert whole["object"] == "text_completion"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert all(choice["text"] == TEXT for choice in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == 2 + 3
    assert whole["usage"]["completion_tokens"] == 4 * 6
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 // 2 + 3 // 2}
    assert [request.prompt for request in backend.requests] == ["one two", (5, 6, 7)]
    assert len({request.context.request_id for request in backend.requests}) == 2
    streamed = await client.post("/v1/completions", json=body | {"stream": True})
    *chunks, done = events_of(streamed.text)
    assert done == "[DONE]"
    for index in range(4):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in own) == TEXT
        assert [each["finish_reason"] for each in own] == [None] * 6 + ["stop"]


async def test_completion_logprobs_have_the_legacy_shape(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "logprobs": 1, "max_tokens": 3}
    whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    assert whole["logprobs"] == {
        "tokens": ["Hello", " from", " a"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{word + "0": -1.0, word: -0.5} for word in ("Hello", " from", " a")],
        "text_offset": [0, 5, 10],
    }
    streamed = await client.post("/v1/completions", json=body | {"stream": True})
    *chunks, _ = events_of(streamed.text)
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks[:-1]]
    assert offsets == [[0], [5], [10]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_stream_is_an_http_error(
    client: httpx.AsyncClient, backend: FakeBackend, stream: bool
) -> None:
    backend.refusal = InvalidRequestError("too long", param="messages", code="too_long")
    response = await client.post("/v1/chat/completions", json=chat(stream=stream))
    assert response.status_code == 400
    assert response.headers["x-should-retry"] == "false"
    assert response.json() == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "too_long",
        }
    }


async def test_failure_in_the_middle_ends_the_stream_with_an_error_event(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure, backend.fail_after = InferenceError("logits were not finite"), 2
    *chunks, last = await stream_chat(client)
    assert len(chunks) == 3
    assert last["error"]["code"] == "inference_error"
    whole = await client.post("/v1/chat/completions", json=chat())
    assert whole.status_code == 500


@pytest.mark.parametrize("fail_after", [0, 2])
async def test_an_internal_error_is_answered_without_its_text(
    client: httpx.AsyncClient, backend: FakeBackend, fail_after: int
) -> None:
    backend.failure, backend.fail_after = RuntimeError("secret at 0xdeadbeef"), fail_after
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=chat(stream=stream))
        assert "internal_error" in response.text
        assert "secret" not in response.text
        assert "[DONE]" not in response.text


async def test_models_are_listed_and_retrieved(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    one = (await client.get(f"/v1/models/{MODEL}")).json()
    short = {name: each for name, each in one.items() if name != "defaults"}
    assert listed == {"object": "list", "data": [short]}
    assert (one["defaults"]["temperature"], one["defaults"]["max_tokens"]) == (1.0, None)
    assert one["object"] == "model"
    assert one["max_model_len"] == one["context_length"] == 4096
    engines = await client.get("/v1/engines")
    assert engines.json() == listed
    assert engines.headers["deprecation"] == "true"
    assert (await client.get(f"/v1/engines/{MODEL}")).json() == one
    missing = await client.get("/v1/models/no/such")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_an_unknown_model_is_404_with_the_available_names(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json=chat(model="gpt-9"))
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert MODEL in error["message"]


async def test_request_ids_are_kept_if_safe_and_else_replaced(client: httpx.AsyncClient) -> None:
    async def id_for(sent: str) -> str:
        response = await client.get("/livez", headers={"x-request-id": sent})
        return response.headers["x-request-id"]

    assert await id_for("trace-1.a_b") == "trace-1.a_b"
    for unsafe in ("a b", 'a"b', "x" * 65, "a;b"):
        assert (await id_for(unsafe)).startswith("req-")
    error = await client.get("/nowhere")
    assert error.headers["x-request-id"].startswith("req-")


async def test_a_request_is_logged_as_one_line(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.request")
    await client.post("/v1/chat/completions", json=chat(user="alice@example.com", stream=True))
    await client.get("/livez")
    (record,) = caplog.records
    fields = vars(record)
    assert fields["route"] == "/v1/chat/completions"
    assert fields["status"] == 200
    assert fields["prompt_tokens"] == 2
    assert fields["completion_tokens"] == 6
    assert {"queue_s", "prefill_s", "decode_s", "completion_id"} <= fields.keys()
    assert len(fields["user_hash"]) == 16
    assert "alice" not in str(fields)


async def test_a_slow_request_is_logged_with_its_timings(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(logging={"slow_request_s": 1e-9, "log_requests": False})
    app = create_app(settings, backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post("/v1/chat/completions", json=chat())
        await client.get("/v1/models")
        submitted = await client.post("/generate", json={"prompt": "a"})
        await client.get(f"/generate/{submitted.json()['request_id']}/stream")
    slow = [vars(each) for each in caplog.records if each.message == "slow request"]
    assert [each["levelname"] for each in slow] == ["WARNING", "WARNING"]
    assert [each["queue_s"] for each in slow] == [0.001, 0.001]
    # A submission outlives its HTTP request and is timed to its own end.
    assert slow[1]["completion_id"] == submitted.json()["request_id"]


async def test_the_log_line_of_an_aborted_request_has_no_token_counts(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend.failure, backend.fail_after = InferenceError("It broke."), 2
    await client.post("/v1/chat/completions", json=chat())
    (fields,) = [vars(each) for each in caplog.records if each.name == "engine.request"]
    assert fields["error_code"] == "inference_error"
    assert fields["ttft_s"] >= 0
    assert "prompt_tokens" not in fields


async def test_a_backend_that_misses_the_deadline_is_given_up(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "DEADLINE_MARGIN_S", 0.0)
    backend.prefill_s = 60
    settings = make_settings(server={"request_timeout_s": 0.01})
    app = create_app(settings, backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post("/v1/chat/completions", json=chat())
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "timeout"
    assert backend.num_open == 0
    assert backend.requests[0].context.timeout_s == 0.01
