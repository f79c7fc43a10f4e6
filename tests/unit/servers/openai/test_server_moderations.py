"""/v1/moderations as OpenAI's own client uses it, over a socket."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from engine.core.interfaces.backend import ChatRequest, FinishEvent, TextEvent
from engine.servers.openai.moderations import CATEGORIES
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.servers.live_server import LiveServer, live_server

PIXEL = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(32)).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(server={"moderation_model": MODEL}) as server:
        yield server


@pytest.fixture
def backend(server: LiveServer) -> FakeBackend:
    server.backend.reset()
    server.backend.script = rate
    return server.backend


@pytest.fixture
def client(server: LiveServer, backend: FakeBackend) -> OpenAI:
    return client_of(server)


def client_of(server: LiveServer) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def rate(request: Any) -> Any:
    """A text is as violent as it says: "violence 7"."""
    word, _, score = request.messages[-1]["content"].rpartition(" ")
    scores = dict.fromkeys(CATEGORIES, 0) | ({word: int(score)} if word in CATEGORIES else {})
    return [TextEvent(0, json.dumps(scores), 9), FinishEvent(0, "stop")]


def test_moderation_rates_each_text_separately(client: OpenAI, backend: FakeBackend) -> None:
    answer = client.moderations.create(input=["violence 7", "hello", "self-harm/intent 4"])
    assert answer.model == MODEL
    violent, harmless, unclear = answer.results
    assert violent.flagged and violent.categories.violence and not violent.categories.hate
    assert violent.category_scores.violence == 0.7
    assert not harmless.flagged and harmless.category_scores.violence == 0
    assert not unclear.flagged and unclear.category_scores.self_harm_intent == 0.4
    assert violent.category_applied_input_types.violence == ["text"]
    assert client.moderations.create(input="hate 5").results[0].flagged
    request = backend.requests[0]
    assert isinstance(request, ChatRequest)
    system, user = request.messages
    assert user == {"role": "user", "content": "violence 7"}
    assert all(f'"{name}"' in system["content"] for name in CATEGORIES)
    assert request.context.params.temperature == 0
    assert request.template_options == {"enable_thinking": False}
    grammar = request.context.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    schema = json.loads(grammar.source)
    jsonschema.validate(dict.fromkeys(CATEGORIES, 10), schema)
    for wrong in ({}, dict.fromkeys(CATEGORIES, 11)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_text_parts_are_joined_to_one_moderation_input(
    client: OpenAI, backend: FakeBackend
) -> None:
    parts: Any = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    with pytest.raises(openai.BadRequestError, match="does not read images"):
        client.moderations.create(input=parts)
    backend.set_card(capabilities=(*CARD.capabilities, "images"))
    (result,) = client.moderations.create(input=parts).results
    applied = result.category_applied_input_types
    assert (applied.violence, applied.hate) == (["text", "image"], ["text"])
    assert len(backend.requests[-1].messages[-1]["images"]) == 1  # type: ignore[union-attr]


def test_openais_moderation_model_names_are_accepted_with_a_warning(client: OpenAI) -> None:
    raw = client.moderations.with_raw_response.create(input="a", model="omni-moderation-latest")
    assert f"model: answered by {MODEL}" in raw.headers["x-engine-warnings"]
    raw = client.moderations.with_raw_response.create(input="a", model=MODEL)
    assert "x-engine-warnings" not in raw.headers
    with pytest.raises(openai.BadRequestError, match=f"model: should be {MODEL}"):
        client.moderations.create(input="a", model="another")


@pytest.mark.parametrize(
    ("input", "match"),
    [
        ([], "input: should be text"),
        (["a"] * 65, "1 to 64 texts"),
        (5, "input: should be text"),
        (["a", 5], r"input\[0\]: should be a part"),
        ([{"type": "text"}], r"input\[0\].text"),
        ([{"type": "text", "text": "a", "more": 1}], r"input\[0\].more"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"input\[0\].image_url"),
    ],
)
def test_invalid_moderation_inputs_are_refused(client: OpenAI, input: Any, match: str) -> None:
    with pytest.raises(openai.BadRequestError, match=match):
        client.moderations.create(input=input)


def test_a_truncated_moderation_answer_is_an_error(client: OpenAI, backend: FakeBackend) -> None:
    backend.script = [TextEvent(0, '{"harassment": 1', 1), FinishEvent(0, "length")]
    with pytest.raises(openai.InternalServerError, match="cut off"):
        client.moderations.create(input="a")


def test_moderation_without_a_capable_model_names_the_setting(
    client: OpenAI, backend: FakeBackend
) -> None:
    backend.set_card(capabilities=("completions", "chat"))
    with pytest.raises(openai.BadRequestError, match=r"change server.moderation_model"):
        client.moderations.create(input="a")
    with live_server() as server, pytest.raises(openai.BadRequestError, match="set server.mod"):
        client_of(server).moderations.create(input="a")
    absent = {"moderation_model": "absent"}
    with live_server(server=absent) as server, pytest.raises(openai.BadRequestError) as caught:
        client_of(server).moderations.create(input="a")
    assert "not served here" in str(caught.value)
