"""SGLang's own API: the native form of /generate, and the routes about the server."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import CompletionRequest, FinishEvent, GrammarSpec, TextEvent
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.sglang_api import routes
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import events_of, make_settings

WORDS = "Hello from a fake model."
BACKEND = FakeBackend()
APP = create_app(make_settings(), BACKEND, Metrics(MODEL))


@pytest.fixture
def backend() -> FakeBackend:
    BACKEND.reset()
    return BACKEND


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def generate(client: httpx.AsyncClient, **fields: Any) -> Any:
    response = await client.post("/generate", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_sglang_generate_answers_a_text(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    params = {"max_new_tokens": 3, "temperature": 0, "stop": ["END"], "min_new_tokens": 2}
    made = await generate(client, text="one two", sampling_params=params, rid="mine")
    assert made["text"] == "Hello from a"
    meta = made["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 2, 3)
    assert meta["finish_reason"]["type"] == "length" and meta["e2e_latency"] > 0
    assert meta["cached_tokens"] == 1
    given = backend.requests[0].context.params
    assert (given.max_tokens, given.min_tokens, given.stop) == (3, 2, ("END",))
    assert backend.requests[0].prompt == "one two"


async def test_several_prompts_or_samples_give_a_list(client: httpx.AsyncClient) -> None:
    made = await generate(client, text=["a", "b c"], sampling_params={"n": 2})
    assert [each["meta_info"]["prompt_tokens"] for each in made] == [1, 1, 2, 2]
    assert len({each["meta_info"]["id"] for each in made}) == 4
    assert [each["text"] for each in made] == [WORDS] * 4
    assert isinstance(await generate(client, text=["a"]), list)
    assert isinstance(await generate(client, input_ids=[1, 2]), dict)


async def test_output_ids_and_the_matched_end_token_are_returned(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [
        TextEvent(0, "Hi", 1, None, (5,)),
        TextEvent(0, "", 1, None, (2,)),
        FinishEvent(0, "stop"),
    ]
    made = await generate(client, input_ids=[[7, 8]])
    assert made["output_ids"] == [5, 2]
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    request = backend.requests[0]
    assert isinstance(request, CompletionRequest) and request.prompt == (7, 8)


async def test_sglang_streams_repeat_the_text_so_far(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"text": "a b", "stream": True})
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    texts = [each["text"] for each in events]
    assert texts[:2] == ["Hello", "Hello from"] and texts[-1] == WORDS
    assert [each["meta_info"]["completion_tokens"] for each in events][-1] == 6
    reasons = [each["meta_info"]["finish_reason"] for each in events]
    assert reasons[:-1] == [None] * (len(events) - 1) and reasons[-1]["type"] == "stop"
    assert {each["meta_info"]["prompt_tokens"] for each in events} == {2}


async def test_sglang_logprobs_are_returned_if_requested(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    made = await generate(
        client,
        text="a b",
        return_logprob=True,
        top_logprobs_num=1,
        logprob_start_len=1,
        return_text_in_logprobs=True,
    )
    meta = made["meta_info"]
    assert made["text"] == WORDS  # without the prompt
    assert [each[2] for each in meta["output_token_logprobs"]][:2] == ["Hello", " from"]
    assert len(meta["output_top_logprobs"][0]) == 1
    assert backend.requests[0].context.params.score_prompt
    plain = await generate(client, text="a b", return_logprob=True)
    assert plain["meta_info"]["input_token_logprobs"] == []
    assert plain["meta_info"]["output_token_logprobs"][0][2] is None
    assert not backend.requests[1].context.params.score_prompt


async def test_grammars_in_sampling_params_are_applied(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    for word, value, kind in (
        ("regex", "[ab]+", "regex"),
        ("json_schema", '{"type": "object"}', "json_schema"),
        ("ebnf", 'root ::= "a"', "grammar"),
    ):
        await generate(client, text="a", sampling_params={word: value})
        grammar = backend.requests[-1].context.grammar
        assert isinstance(grammar, GrammarSpec) and grammar.kind == kind, word


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": [1]}, "text[0]"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1], [-1]]}, "input_ids[1]"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
    ],
)
async def test_invalid_sglang_requests_are_named(
    client: httpx.AsyncClient, fields: dict[str, Any], word: str
) -> None:
    response = await client.post("/generate", json=fields)
    assert response.status_code == 400 and word in response.json()["error"]["message"]


async def test_our_own_generate_form_still_works(client: httpx.AsyncClient) -> None:
    made = await generate(client, prompt="a")
    assert list(made) == ["request_id"]
    off = create_app(make_settings(server={"dialects": []}), FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=off)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as other:
        assert (await other.post("/generate", json={"text": "a"})).status_code == 400
        assert (await other.get("/get_model_info")).status_code == 404


async def test_a_failed_sglang_stream_ends_with_an_error(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure, backend.fail_after = InferenceError("It broke."), 1
    response = await client.post("/generate", json={"text": "a", "stream": True})
    *_, error, done = events_of(response.text)
    assert error["error"]["message"] == "It broke." and done == "[DONE]"


async def test_sglang_model_and_server_info_are_reported(client: httpx.AsyncClient) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = (await client.get(path)).json()
        assert (info["model_path"], info["is_generation"]) == (MODEL, True)
    for path in ("/get_server_info", "/server_info"):
        info = (await client.get(path)).json()
        assert info["context_length"] == 4096 and info["internal_states"][0] is not None


async def test_health_generate_needs_a_generated_token(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await client.get("/health_generate")).status_code == 200
    assert backend.requests[0].context.params.max_tokens == 1
    while backend.num_open:
        await asyncio.sleep(0.001)
    backend.prefill_s = 30.0
    monkeypatch.setattr(routes, "HEALTH_TIMEOUT_S", 0.01)
    assert (await client.get("/health_generate")).status_code == 503
    backend.set_card(capabilities=("embeddings",))
    assert (await client.get("/health_generate")).status_code == 200
    assert len(backend.embed_requests) == 1
    backend.ready = False
    assert (await client.get("/health_generate")).status_code == 503


async def test_flush_cache_flushes_prefixes(tmp_path: Path) -> None:
    class Cached(FakeBackend):
        async def flush_prefixes(self, *, model: str = "") -> tuple[str, ...]:
            return ("3 blocks",)

    settings = make_settings(storage={"path": tmp_path})
    app = create_app(settings, Cached(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        flushed = await client.post("/flush_cache")
        assert flushed.text == "Cache flushed.\n3 blocks"
        assert (await client.get("/flush_cache")).status_code == 405  # a web page could send it
    entry = json.loads((tmp_path / "audit.jsonl").read_text())
    assert entry["action"] == "cache.flush"
