"""Every row of the table of request parameters is sent to every endpoint that it is about. What
happens must be what the table says, so no parameter is accepted and ignored.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from engine.backends.beam_search import BeamRules, BeamSearch
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
)
from engine.core.observability.metrics import Metrics
from engine.frontend.prompts import with_text_bias
from engine.servers.app import create_app
from engine.servers.capabilities import TRANSLATING, verdict_in
from engine.servers.openai.schema import ChatBody, CompletionBody, GenerateBody
from engine.servers.schema.body import parse_body
from engine.servers.schema.dialects.parameters import DIALECTS, PARAMETERS
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend
from tests.support.files.dialect_examples import (
    ACTS,
    BASE,
    CHAT,
    COMPLETIONS,
    SAME,
    SCHEMA,
    SCRIPTS,
    WARNED,
)
from tests.support.servers.live_server import events_of, make_settings
from tests.support.toy_engine.backend import ToyBackend

WISH = {"some": "wish"}
BACKEND = FakeBackend()
SEARCHES: list[BeamRules] = []  # of the last request


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    storage = {"path": tmp_path_factory.mktemp("storage")}
    return create_app(make_settings(storage=storage), BACKEND, Metrics(MODEL))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


class Sender:
    """Sends bodies to one endpoint, and tells what can be seen of each."""

    def __init__(
        self, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str
    ) -> None:
        self.client = client
        self.caplog = caplog
        self.path = path

    async def post(self, **fields: Any) -> httpx.Response:
        return await self.client.post(self.path, json=BASE[self.path] | fields)

    async def seen(self, **fields: Any) -> Any:
        """What a request causes: its answer, whether that is stored, the backend's requests, its
        beam searches, and the line in the log.
        """
        BACKEND.requests.clear()
        SEARCHES.clear()
        self.caplog.clear()
        response = await self.post(**fields)
        assert response.status_code == 200 or "model" in fields, response.text
        assert "unknown" not in response.headers.get("x-engine-warnings", "")
        (line,) = (each for each in self.caplog.records if each.getMessage() == "request")
        logged = {key: line.__dict__.get(key) for key in ("user_hash", "metadata", "status")}
        is_stored = False
        if name := response.json().get("id") if fields.get("store") else None:
            is_stored = (await self.client.get(f"{self.path}/{name}")).status_code == 200
        requests = list(map(_plain_request, BACKEND.requests))
        return _plain_answer(response), is_stored, requests, SEARCHES[:], logged


def _plain_answer(response: httpx.Response) -> Any:
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    parts = events_of(response.text) if is_stream else [response.json()]
    for part in parts:
        if isinstance(part, dict):
            for key in ("id", "created", "request_id"):
                part.pop(key, None)
    return parts


def _plain_request(request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
    """The request without its id, its callbacks, and the parameter that its grammar came from."""
    context = msgspec.structs.replace(
        request.context, request_id="", on_prompt=None, on_progress=None, on_wait=None
    )
    if context.grammar is not None:
        grammar = msgspec.structs.replace(context.grammar, param="")
        context = msgspec.structs.replace(context, grammar=grammar)
    return msgspec.structs.replace(request, context=context)


def _of_path(value: Any, path: str) -> Any:
    return value[path] if isinstance(value, dict) and path in value else value


async def _acts(sender: Sender, name: str) -> None:
    example = _of_path(ACTS[name], sender.path)
    value, needed = example if isinstance(example, tuple) else (example, {})
    needed = _of_path(needed, sender.path)
    assert await sender.seen(**needed) != await sender.seen(**needed | {name: value})


async def _is_translated(sender: Sender, name: str) -> None:
    value, same = SAME[name]
    if name == "n_probs":
        same = {"logprobs": True, "top_logprobs": 2} if sender.path == CHAT else {"logprobs": 2}
    seen = await sender.seen(**{name: value})
    assert seen == await sender.seen(**same)
    assert seen != await sender.seen()


async def _is_warned(sender: Sender, name: str) -> None:
    response = await sender.post(**{name: WARNED.get(name, WISH)})
    assert response.status_code == 200, response.text
    assert f"{name}: {PARAMETERS[name].warning}" in response.headers["x-engine-warnings"]


async def _is_refused(sender: Sender, name: str) -> None:
    word = PARAMETERS[name]
    response = await sender.post(**{name: WISH})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == name and error["code"] == "unsupported_parameter"
    assert word.instead in error["message"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("verdict", "check"),
    [
        ("acts", _acts),
        ("translated", _is_translated),
        ("warned", _is_warned),
        ("refused", _is_refused),
    ],
)
async def test_every_row_of_the_parameter_table_behaves_as_stated(
    app: FastAPI,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    verdict: str,
    check: Callable[[Sender, str], Awaitable[None]],
) -> None:
    """One test for hundreds of rows, because a test of each would take half a minute."""

    async def search(self: BeamSearch, request: ChatRequest | CompletionRequest) -> Any:
        SEARCHES.append(self._rules)
        return await BACKEND.open(request)

    monkeypatch.setattr(BeamSearch, "open", search)
    caplog.set_level(logging.INFO, "engine.request")
    failures: list[str] = []
    async with client_of(app) as client:
        for path, kind in TRANSLATING.items():
            for word in PARAMETERS.values():
                if verdict_in(word, kind) == verdict:
                    BACKEND.reset()
                    BACKEND.set_card(template_options=("enable_thinking", "documents"))
                    BACKEND.script = SCRIPTS.get(word.name)
                    try:
                        await check(Sender(client, caplog, path), word.name)
                    except (AssertionError, KeyError) as error:
                        failures.append(f"{word.name} at {path}: {error!r}"[:1000])
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("path", TRANSLATING)
async def test_neutral_values_of_unsupported_parameters_are_accepted(
    app: FastAPI, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Null, and each of the values of each row that is not followed."""
    kind = TRANSLATING[path]
    idle = [word for word in PARAMETERS.values() if verdict_in(word, kind) in ("warned", "refused")]
    values = {word.name: (None, *word.off) for word in idle if word.name not in kind.model_fields}
    async with client_of(app) as client:
        sender = Sender(client, caplog, path)
        for turn in range(max(map(len, values.values()))):
            response = await sender.post(
                **{name: offs[turn] for name, offs in values.items() if turn < len(offs)}
            )
            assert response.status_code == 200, response.text
            assert "x-engine-warnings" not in response.headers


def test_neutral_values_are_compared_by_type() -> None:
    for fields in ({"best_of": True}, {"functions": [{}]}, {"separate_reasoning": 1}):
        with pytest.raises(InvalidRequestError) as caught:
            parse_body(ChatBody, BASE[CHAT] | fields)
        assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("path", TRANSLATING)
def test_every_request_parameter_has_a_row_in_the_table(path: str) -> None:
    assert TRANSLATING[path].model_fields.keys() <= PARAMETERS.keys()


def test_every_example_belongs_to_a_row_of_the_parameter_table() -> None:
    assert ACTS.keys() | SAME.keys() | WARNED.keys() <= PARAMETERS.keys()
    assert {each for word in PARAMETERS.values() for each in word.dialects} == DIALECTS.keys()
    targets = {word.target for word in PARAMETERS.values() if word.target}
    assert targets <= PARAMETERS.keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": "many"}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"top_k": -5}}, "options.top_k"),
        ({"options": {"what": 1}}, "options.what"),
        ({"options": 1}, "options"),
        ({"grammar": 5}, "grammar"),
        ({"regex": "a", "json_schema": SCHEMA}, "json_schema"),
        ({"json_schema": SCHEMA, "response_format": {"type": "json_object"}}, "json_schema"),
        ({"format": "yaml"}, "format"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude"),
        ({"reasoning": {"effort": "much"}}, "reasoning"),
        ({"logit_bias": [["a", True]]}, "logit_bias.a"),
        ({"logit_bias": [[-1, 5]]}, "logit_bias"),
    ],
)
def test_errors_name_the_parameter_as_the_client_sent_it(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, BASE[CHAT] | fields)
    assert caught.value.param == param


@pytest.mark.parametrize("path", TRANSLATING)
def test_a_negative_max_tokens_means_the_rest_of_the_context(path: str) -> None:
    body = parse_body(TRANSLATING[path], BASE[path] | {"n_predict": -1})
    assert isinstance(body, ChatBody | CompletionBody | GenerateBody)
    assert body.params(CARD).max_tokens is None


async def test_the_engine_reports_progress_and_can_skip_its_cache() -> None:
    backend = ToyBackend(max_batch_tokens=64)
    backend.models = lambda: [CARD]  # type: ignore[method-assign]
    await backend.start()
    app = create_app(make_settings(), backend, Metrics("toy"))
    body = {"prompt": [1, 2, 3] * 60, "stream": True, "max_tokens": 3, "parse_special": False}
    async with client_of(app) as client:

        async def progress(**fields: Any) -> list[tuple[int, int]]:
            response = await client.post(
                COMPLETIONS, json=body | {"return_progress": True} | fields
            )
            chunks = events_of(response.text)[:-1]
            reports = [each["prompt_progress"] for each in chunks if "prompt_progress" in each]
            assert all(each["total"] == 180 for each in reports)
            last = chunks[-1].get("timings")
            if fields.get("timings_per_token"):
                assert chunks[0]["timings"]["predicted_ms"] == 0
                assert (last["prompt_n"] + last["cache_n"], last["predicted_n"]) == (180, 3)
                assert last["prompt_ms"] > 0 and last["predicted_ms"] > 0
            return [(each["cache"], each["processed"]) for each in reports]

        assert await progress() == [(0, 0), (0, 64), (0, 128), (0, 180)]
        assert await progress(timings_per_token=True) == [(176, 176), (176, 180)]
        assert await progress(cache_prompt=False) == [(0, 0), (0, 64), (0, 128), (0, 180)]
        assert await progress(return_progress=False) == []
    await backend.stop()


async def test_logit_bias_can_name_texts() -> None:
    """All tokens of a text get its bias, which may exclude them."""
    text = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda each: list(each.encode())))
    body = parse_body(ChatBody, BASE[CHAT] | {"logit_bias": [["ab", False], [7, 2]]})
    params = with_text_bias(text, body.params(CARD))
    assert params.logit_bias == {7: 2.0, 97: -math.inf, 98: -math.inf}


async def test_warnings_name_the_parameter_as_the_client_sent_it(app: FastAPI) -> None:
    async with client_of(app) as client:
        long = await client.post(COMPLETIONS, json=BASE[COMPLETIONS] | {"n_predict": 10**6})
        BACKEND.set_card(template_options=())
        thinking = await client.post(CHAT, json=BASE[CHAT] | {"think": True})
        BACKEND.reset()
    assert long.json()["error"]["param"] == "n_predict"
    assert thinking.headers["x-engine-warnings"].startswith("think: ")


def test_earlier_reasoning_is_read_in_its_alternative_spelling() -> None:
    details = [
        {"type": "reasoning.text", "text": "first "},
        {"type": "reasoning.summary", "summary": "second"},
    ]
    said = {"role": "assistant", "content": "x", "reasoning_details": details}
    body = parse_body(ChatBody, {"messages": [BASE[CHAT]["messages"][0], said]})
    assert body.messages[1]["reasoning_content"] == "first second"
    said["reasoning_details"] = [{"type": "reasoning.encrypted", "data": "x"}]
    with pytest.raises(InvalidRequestError) as caught:
        parse_body(ChatBody, {"messages": [said]})
    assert caught.value.param == "messages[0].reasoning_details[0]"
