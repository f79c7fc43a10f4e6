"""The APIs of Text Generation Inference and Text Embeddings Inference."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from engine.core.interfaces.backend import (
    Embeddings,
    EmbedRequest,
    FinishEvent,
    GrammarSpec,
    TextEvent,
    TokenText,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

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


async def send(client: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    response = await client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(each[5:]) for each in text.splitlines() if each.startswith("data:")]


def token(text: str, token_id: int, **fields: Any) -> TokenText:
    return TokenText(text, text.encode(), -0.5, token_id=token_id, **fields)


async def test_generate_answers_with_the_text_and_details_on_request(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    parameters = {"max_new_tokens": 3, "details": True, "seed": 5, "stop": ["END"]}
    made = await send(client, "/generate", inputs="one two", parameters=parameters)
    assert made["generated_text"] == "Hello from a"
    details = made["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 3)
    assert (details["input_length"], details["seed"], details["prefill"]) == (2, 5, [])
    assert [each["text"] for each in details["tokens"]] == ["Hello", " from", " a"]
    given = backend.requests[0].context.params
    assert (given.max_tokens, given.stop, given.temperature) == (3, ("END",), 0.0)
    plain = await send(client, "/generate", inputs="a", parameters={"return_full_text": True})
    assert plain == {"generated_text": f"a{WORDS}"}


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [({}, 0.0), ({"do_sample": True}, 1.0), ({"top_p": 0.5}, 1.0), ({"temperature": 0.5}, 0.5)],
)
async def test_it_samples_only_if_a_sampler_is_asked_for(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    parameters: dict[str, Any],
    temperature: float,
) -> None:
    await send(client, "/generate", inputs="a", parameters=parameters)
    assert backend.requests[0].context.params.temperature == temperature


async def test_each_token_has_an_event_and_the_last_has_the_text(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [
        TextEvent(0, "Hi", 1, (token("Hi", 5),)),
        TextEvent(0, "", 1, (token("\ufffd", 6),)),
        TextEvent(0, "é", 1, (token("\ufffd", 7),)),
        TextEvent(0, "", 1, (token("</s>", 2, in_text=False),)),
        FinishEvent(0, "stop"),
    ]
    for path, fields in (("/generate_stream", {}), ("/", {"stream": True})):
        response = await client.post(
            path, json={"inputs": "a", "parameters": {"details": True}, **fields}
        )
        lines = lines_of(response.text)
        assert [each["index"] for each in lines] == list(range(1, len(lines) + 1))
        tokens = [each["token"] for each in lines]
        assert [each["id"] for each in tokens][:4] == [5, 6, 7, 2]
        assert "".join(each["text"] for each in tokens) == "Hié"
        assert tokens[3]["special"] and not tokens[0]["special"]
        *others, last = lines
        assert last["generated_text"] == "Hié" and last["details"]["finish_reason"] == "eos_token"
        assert {each["generated_text"] for each in others} == {None}


async def test_the_root_path_answers_with_text_or_with_vectors(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def long_vectors(request: EmbedRequest) -> Embeddings:
        return Embeddings(np.full((len(request.inputs), 4), 3.0, np.float32), prompt_tokens=1)

    assert await send(client, "/", inputs="a") == [{"generated_text": WORDS}]
    backend.set_card(capabilities=("embeddings",))
    monkeypatch.setattr(backend, "embed", long_vectors)
    assert await send(client, "/", inputs="a b") == [[0.5] * 4]
    assert await send(client, "/embed", inputs=["a", "b"]) == [[0.5] * 4] * 2
    assert await send(client, "/embed", inputs=["a"], normalize=False) == [[3.0] * 4]


async def test_text_that_is_too_long_is_cut_for_vectors_if_asked_for(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.set_card(capabilities=("embeddings",))
    await send(client, "/embed", inputs="a", truncate=True)
    await send(client, "/embed", inputs="a")
    assert [each.truncate_prompt_tokens for each in backend.embed_requests] == [-1, None]


async def test_grammars_of_parameters_and_formats_are_applied(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    schema = {"type": "object"}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for kind, value in (("json", schema), ("regex", "[ab]+")):
        grammar = {"type": kind, "value": value}
        await send(client, "/generate", inputs="a", parameters={"grammar": grammar})
        await send(client, "/v1/chat/completions", **chat, response_format=grammar)
    await send(
        client,
        "/v1/chat/completions",
        **chat,
        response_format={"type": "json_object", "value": schema},
    )
    grammars = [each.context.grammar for each in backend.requests]
    assert all(isinstance(each, GrammarSpec) for each in grammars)
    assert [each and each.kind for each in grammars] == [
        *("json_schema", "json_schema", "regex", "regex", "json_schema")
    ]


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/generate", {"inputs": ["a"]}, "inputs"),
        ("/generate", {"inputs": "a", "parameters": []}, "parameters"),
        ("/generate", {"inputs": "a", "parameters": {"temprature": 1}}, "temprature"),
        ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        ("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "x"}}}, "grammar.type"),
        ("/generate", {"inputs": "a", "parameters": {"adapter_id": "x"}}, "adapter_id"),
        ("/generate", {"inputs": "a", "parameters": {"watermark": True}}, "watermark"),
        ("/generate", {"inputs": "a", "decoder_input_details": True}, "decoder_input_details"),
        ("/generate_stream", {"parameters": {}}, "inputs"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ("/embed", {"inputs": [1.5]}, "inputs[0]"),
    ],
)
async def test_invalid_requests_name_the_field(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], word: str
) -> None:
    response = await client.post(path, json=fields)
    assert response.status_code == 400 and word in response.json()["error"]["message"]


async def test_a_chat_may_name_the_model_as_huggingface_hub_does(
    client: httpx.AsyncClient,
) -> None:
    messages = [{"role": "user", "content": "a"}]
    made = await send(client, "/v1/chat/completions", model="tgi", messages=messages)
    assert made["model"] == MODEL


async def test_info_names_the_model_and_its_context(client: httpx.AsyncClient) -> None:
    info = (await client.get("/info")).json()
    assert (info["model_id"], info["max_total_tokens"]) == (MODEL, 4096)
