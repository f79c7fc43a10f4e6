"""Prompts of completions: control tokens in their text, the model that may be left out, and
Mistral's API for filling in the middle.
"""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.core.interfaces.backend import CompletionRequest
from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, events_of, make_settings
from tests.support.servers.responses_api import app_over, client_of

FIM = "/v1/fim/completions"
PROMPTS = {
    "/v1/completions": {"prompt": ["a", "b<s>c"]},
    "/generate": {"prompt": "b<s>c", "stream": True},
    FIM: {"prompt": "b<s>c", "suffix": "d"},
}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def client(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app_over(backend, tmp_path)) as client:
        yield client


def asked(backend: FakeBackend) -> CompletionRequest:
    request = backend.requests[-1]
    assert isinstance(request, CompletionRequest)
    return request


@pytest.mark.parametrize("path", PROMPTS)
async def test_control_tokens_in_a_completion_prompt_stay_text_with_a_warning(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    plain = await client.post(path, json=PROMPTS[path])
    assert plain.status_code == 200, plain.text
    assert plain.headers["x-engine-warnings"].startswith("parse_special: <s> in the prompt")
    assert not asked(backend).parse_special and asked(backend).add_special_tokens
    for parse in (True, False):
        body = PROMPTS[path] | {"parse_special": parse, "add_special_tokens": not parse}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200 and "x-engine-warnings" not in answer.headers
        assert (asked(backend).parse_special, asked(backend).add_special_tokens) == (
            parse,
            not parse,
        )
    await client.post(path, json=PROMPTS[path] | {"prompt": "no such token"})
    assert "x-engine-warnings" not in answer.headers


async def test_control_tokens_are_found_in_long_prompts(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "a" * 100_000 + "<s>"})
    assert "parse_special" in answer.headers["x-engine-warnings"]
    ids = await client.post("/v1/completions", json={"prompt": [256]})
    assert "x-engine-warnings" not in ids.headers


async def test_a_strict_server_requires_parse_special_if_the_prompt_has_control_tokens(
    backend: FakeBackend, tmp_path: Path
) -> None:
    async with client_of(app_over(backend, tmp_path, strict=True)) as client:
        refused = await client.post("/v1/completions", json={"prompt": "<s>"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "parse_special"
        told = {"prompt": "<s>", "parse_special": False}
        assert (await client.post("/v1/completions", json=told)).status_code == 200


async def test_a_key_may_allow_control_tokens_in_prompts(
    backend: FakeBackend, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    allowed = add_key(file, "templates", parse_special=True)[0]
    other = add_key(file, "other")[0]
    app = create_app(make_settings(server={"keys_file": file}), backend, Metrics(MODEL))
    async with client_of(app) as client:
        for key, fields, parses in (
            (allowed, {}, True),
            (allowed, {"parse_special": False}, False),
            (other, {}, False),
        ):
            answer = await client.post(
                "/v1/completions",
                json={"prompt": "<s>"} | fields,
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200, answer.text
            assert asked(backend).parse_special == parses


WITHOUT_MODEL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": chat()["messages"]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": chat()["messages"], "max_tokens": 5},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    FIM: {"prompt": "a"},
    "/tokenize": {"prompt": "a"},
}


@pytest.mark.parametrize("path", WITHOUT_MODEL)
async def test_the_model_name_may_be_omitted_if_one_model_is_served(
    client: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    answer = await client.post(path, json=WITHOUT_MODEL[path])
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", MODEL) == MODEL
    first, second = backend.cards[0], "another/model"
    backend.set_card(id=second)
    backend.cards = [first, *backend.cards]
    refused = await client.post(path, json=WITHOUT_MODEL[path])
    assert refused.status_code == 400, refused.text
    assert second in refused.json()["error"]["message"]


async def test_fim_completions_have_the_shape_of_a_chat(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = {"model": MODEL, "prompt": "def f():", "suffix": "return 1", "random_seed": 7}
    answer = (await client.post(FIM, json=body | {"max_tokens": 2})).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "Hello from"
    assert answer["choices"][0]["finish_reason"] == "length"
    sent = asked(backend)
    assert (sent.prompt, sent.suffix, sent.context.params.seed) == ("def f():", "return 1", 7)
    await client.post(FIM, json=body)
    assert asked(backend).context.params.max_tokens is None
    *chunks, done = events_of((await client.post(FIM, json=body | {"stream": True})).text)
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)
    assert (text, done) == ("Hello from a fake model.", "[DONE]")


async def test_fim_is_refused_by_a_model_that_cannot_infill(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.set_card(capabilities=("completions",))
    body = {"prompt": "a", "suffix": "b"}
    refused = await client.post(FIM, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "suffix"
    assert (await client.post(FIM, json=body | {"suffix": ""})).status_code == 200
    two = await client.post(FIM, json={"prompt": "a", "seed": 1, "random_seed": 2})
    assert two.status_code == 400 and two.json()["error"]["param"] == "random_seed"


async def test_the_log_names_the_path_of_an_unknown_route(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine.request"):
        await client.get("/v9/things%0aroute=/v1/models?key=secret")
        await client.get("/v1/capabilities")
    unknown, known = (vars(each) for each in caplog.records if each.name == "engine.request")
    assert (unknown["route"], unknown["path"]) == ("unmatched", "/v9/things?route=/v1/models")
    assert known["route"] == "/v1/capabilities" and "path" not in known
