"""llama.cpp's endpoints: the forms of its requests and answers, on a backend without a model."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import ContextLengthError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    FinishEvent,
    TextEvent,
)
from engine.core.interfaces.request import UNSHARED
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import CONTEXT_LENGTH, DEFAULT_WORDS, MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

TEXT = "".join(DEFAULT_WORDS)
BOS = 256


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


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def asked(backend: FakeBackend) -> CompletionRequest:
    request = backend.requests[-1]
    assert isinstance(request, CompletionRequest)
    return request


async def test_a_completion_has_llamacpps_shape(client: httpx.AsyncClient) -> None:
    body = await post(client, "/completion", prompt="hé", n_predict=3)
    assert (body["content"], body["stop"], body["tokens"]) == ("Hello from a", True, [])
    assert (body["stop_type"], body["stopping_word"], body["truncated"]) == ("limit", "", False)
    assert (body["tokens_predicted"], body["tokens_evaluated"]) == (3, 4)
    assert body["prompt"] == "<s>hé"
    assert body["generation_settings"]["n_predict"] == 3
    assert body["timings"]["prompt_n"] + body["timings"]["cache_n"] == 4
    assert body["timings"]["predicted_n"] == 3
    whole = await post(client, "/completions", prompt="a")
    assert (whole["content"], whole["stop_type"]) == (TEXT, "eos")


async def test_the_last_stream_event_reports_the_stop_type(client: httpx.AsyncClient) -> None:
    sent = {"prompt": "a", "n_predict": 2, "stream": True}
    *parts, last = events(await client.post("/completion", json=sent))
    assert [each["content"] for each in parts] == ["Hello", " from"]
    assert not any(each["stop"] for each in parts)
    assert (last["content"], last["stop"], last["stop_type"]) == ("", True, "limit")
    assert last["timings"]["predicted_n"] == 2
    assert last["generation_settings"]["stream"] is True


async def test_streams_report_timings_and_prompt_progress_if_requested(
    client: httpx.AsyncClient,
) -> None:
    asked = {"prompt": "a", "n_predict": 2, "stream": True, "timings_per_token": True}
    response = await client.post("/completion", json=asked | {"return_progress": True})
    told = events(response)
    progress = [each["prompt_progress"] for each in told if "prompt_progress" in each]
    assert progress[-1]["processed"] == progress[-1]["total"] > 0
    counts = [each["timings"]["predicted_n"] for each in told]
    assert counts == [0] * len(progress) + [1, 2, 2]


async def test_default_parameters_are_llamacpps(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await post(client, "/completion", prompt="a", seed=-1)
    params = asked(backend).context.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert (params.seed, params.max_tokens) == (None, None)
    await post(client, "/completion", prompt="a", top_k=0, repeat_penalty=1.5, n_predict=-1)
    params = asked(backend).context.params
    assert (params.top_k, params.repetition_penalty, params.max_tokens) == (0, 1.5, None)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a", [(BOS, 97)]),
        ([5, 6], [(5, 6)]),
        ([5, "a", 6], [(5, 97, 6)]),
        ({"prompt_string": "a"}, [(BOS, 97)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([[5, "a"], "<s>", [7]], [(5, 97), (BOS, BOS), (7,)]),
    ],
)
async def test_llamacpp_prompts_may_be_texts_ids_and_mixtures(
    client: httpx.AsyncClient, backend: FakeBackend, prompt: Any, ids: list[tuple[int, ...]]
) -> None:
    body = await post(client, "/completion", prompt=prompt, n_predict=1)
    assert [each.prompt for each in backend.requests if isinstance(each, CompletionRequest)] == ids
    answers = body if len(ids) > 1 else [body]
    assert [each["tokens_evaluated"] for each in answers] == list(map(len, ids))
    assert [each["index"] for each in answers] == list(range(len(ids)))


@pytest.mark.parametrize("prompt", [[], [None], [1.5], {"prompt_string": 1}, [[-1]], 3])
async def test_malformed_llamacpp_prompts_are_refused(
    client: httpx.AsyncClient, prompt: Any
) -> None:
    response = await client.post("/completion", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


async def test_images_are_refused_by_name(client: httpx.AsyncClient) -> None:
    prompt = {"prompt_string": "a", "multimodal_data": ["AAAA"]}
    response = await client.post("/completion", json={"prompt": prompt})
    assert response.json()["error"]["param"] == "prompt.multimodal_data"


async def test_text_logit_biases_apply_to_their_tokens(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await post(client, "/completion", prompt="a", logit_bias=[["bc", -2], [9, False]])
    assert asked(backend).context.params.logit_bias == {98: -2, 99: -2, 9: -float("inf")}
    body = await post(client, "/completion", prompt="a", logit_bias={"7": 1.5, "b": 2})
    assert asked(backend).context.params.logit_bias == {7: 1.5, 98: 2}
    assert {"token": 7, "bias": 1.5} in body["generation_settings"]["logit_bias"]


async def test_an_answer_ends_at_the_context_length(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await post(client, "/completion", prompt=[1] * (CONTEXT_LENGTH - 2), n_predict=100)
    assert asked(backend).context.params.max_tokens == 2


async def test_a_prompt_that_is_too_long_is_reported_with_token_counts(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.refusal = ContextLengthError("Too long.", num_prompt_tokens=9, max_tokens=8)
    for path, body in (
        ("/completion", {"prompt": "a"}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (9, 8)
        assert "exceeds the available context size" in error["message"]


async def test_a_stopping_word_and_the_tokens_are_returned(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [TextEvent(0, "a", 1, None, (7,)), FinishEvent(0, "stop", "b")]
    body = await post(client, "/completion", prompt="a", stop=["b"], return_tokens=True)
    assert (body["stop_type"], body["stopping_word"], body["tokens"]) == ("word", "b", [7])


async def test_n_predict_0_generates_nothing(client: httpx.AsyncClient) -> None:
    body = await post(client, "/completion", prompt="a", n_predict=0)
    assert (body["content"], body["tokens_predicted"]) == ("", 0)


async def test_response_fields_select_parts_of_the_answer(client: httpx.AsyncClient) -> None:
    names = ["content", "generation_settings/top_k", "absent"]
    body = await post(client, "/completion", prompt="a", response_fields=names)
    assert body == {"content": TEXT, "generation_settings/top_k": 40}


async def test_n_probs_returns_completion_probabilities(client: httpx.AsyncClient) -> None:
    body = await post(client, "/completion", prompt="a", n_probs=2, n_predict=1)
    [token] = body["completion_probabilities"]
    assert (token["token"], token["logprob"], len(token["top_logprobs"])) == ("Hello", -0.5, 2)


async def test_cache_prompt_false_skips_the_prefix_cache(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    salts = []
    for cached in (True, True, False, False):
        await post(client, "/completion", prompt="a", cache_prompt=cached)
        salts.append(asked(backend).context.salt)
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert [salt.startswith(UNSHARED) for salt in salts] == [False, False, True, True]


async def test_infill_joins_extra_files_prefix_and_prompt(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    extra = [{"filename": "f.py", "text": "x = 1"}]
    sent = {"input_prefix": "a", "input_suffix": "c", "prompt": "b", "input_extra": extra}
    body = await post(client, "/infill", **sent)
    assert body["content"] == TEXT
    assert (asked(backend).prompt, asked(backend).suffix) == ("f.py\nx = 1\nab", "c")
    backend.set_card(capabilities=("completions",))
    assert (await client.post("/infill", json=sent)).status_code == 400


async def test_apply_template_adds_no_bos(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hé"}]
    assert await post(client, "/apply-template", messages=messages) == {"prompt": "hé"}
    counted = await post(client, "/chat/completions/input_tokens", messages=messages)
    assert counted == {"input_tokens": 4}


async def test_tokenize_returns_ids_or_ids_with_pieces(client: httpx.AsyncClient) -> None:
    assert await post(client, "/tokenize", content="<s>a") == {"tokens": [BOS, 97]}
    pieces = await post(client, "/tokenize", content="ab", add_special=True, with_pieces=True)
    assert pieces["tokens"][1] == {"id": 97, "piece": "a"}
    assert len(pieces["tokens"]) == 3


async def test_embedding_answers_have_a_list_per_input(client: httpx.AsyncClient) -> None:
    [one] = await post(client, "/embedding", content="a")
    first, second = await post(client, "/embeddings", input=["a", [5, "b"]])
    assert one["embedding"] == first["embedding"]
    assert (len(second["embedding"]), second["index"]) == (1, 1)


async def test_props_and_slots_are_reported(client: httpx.AsyncClient) -> None:
    props = (await client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT_LENGTH
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert (await client.post("/props", json={})).status_code == 501
    slots = (await client.get("/slots")).json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    assert (await client.get("/lora-adapters")).json() == []


async def test_slots_show_a_running_sequence(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two answers has ended, and the other one waits for its second token."""
    released = asyncio.Event()

    async def held(request: CompletionRequest) -> AsyncIterator[Event]:
        yield TextEvent(1, "a", 1)
        yield FinishEvent(0, "stop")
        await released.wait()

    monkeypatch.setattr(backend, "complete", held)
    sent = {"prompt": "a", "n_predict": 5, "n_cmpl": 2}
    asking = asyncio.create_task(client.post("/completion", json=sent))
    busy: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while len(busy) != 1:
            await asyncio.sleep(0.01)
            slots = (await client.get("/slots")).json()
            busy = [each for each in slots if each["is_processing"]]
    assert busy[0]["next_token"][0] == {"has_next_token": True, "n_remain": 4, "n_decoded": 1}
    released.set()
    await asking


async def test_the_first_chunk_of_a_chat_has_no_content(client: httpx.AsyncClient) -> None:
    sent = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    for path, content in (("/chat/completions", None), ("/v1/chat/completions", "")):
        first = events(await client.post(path, json=sent))[0]
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": content}


async def test_a_server_of_this_dialect_alone_answers_in_it_everywhere() -> None:
    settings = make_settings(server={"dialects": ("llamacpp",)}, logging={"level": "debug"})
    app = create_app(settings, FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        sent = {"messages": [{"role": "user", "content": "a"}]}
        stream = await client.post("/v1/chat/completions", json=sent | {"stream": True})
        assert events(stream)[0]["choices"][0]["delta"]["content"] is None
        # The log level shows the prompt of each answer, unless the client does not want it.
        assert "__verbose" in await post(client, "/v1/chat/completions", **sent)
        quiet = await post(client, "/v1/chat/completions", **sent, verbose=False)
        assert "__verbose" not in quiet


async def test_a_verbose_answer_has_its_prompt(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path in ("/chat/completions", "/v1/chat/completions"):
        told = await post(client, path, messages=messages, verbose=True)
        length = told["__verbose"]["tokens_evaluated"]
        prompt = await backend.detokenize((0,) * length)  # its ids, to this backend
        assert told["__verbose"]["prompt"] == prompt
        assert "__verbose" not in await post(client, path, messages=messages)


async def test_a_begun_answer_is_continued(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for path, sent, continues in (
        ("/chat/completions", {}, True),
        ("/chat/completions", {"add_generation_prompt": True}, False),
        ("/chat/completions", {"continue_final_message": False}, False),
        ("/v1/chat/completions", {}, False),
    ):
        await post(client, path, messages=messages, **sent)
        request = backend.requests[-1]
        assert isinstance(request, ChatRequest)
        assert request.continue_final_message is continues
        assert request.add_generation_prompt is not continues
    twice = await client.post("/chat/completions", json={"messages": [*messages, messages[1]]})
    assert twice.status_code == 400 and "two messages" in twice.json()["error"]["message"]


async def test_a_single_model_answers_to_any_name() -> None:
    settings = make_settings(server={"accept_any_model": True})
    app = create_app(settings, FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post("/v1/completions", json={"model": "other", "prompt": "a"})
        assert response.json()["model"] == MODEL
        assert response.headers["x-engine-warnings"].startswith("model:")
        assert (await client.get("/v1/models/other")).status_code == 404


async def test_llamacpp_routes_are_absent_if_the_dialect_is_off() -> None:
    settings = make_settings(server={"dialects": ()})
    app = create_app(settings, FakeBackend(), Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/completion", "/props", "/slots", "/chat/completions"):
            assert (await client.get(path)).status_code == 404
