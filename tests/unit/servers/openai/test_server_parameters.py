"""Parameters from the request to the backend and back: each acts, is warned about, or is refused by
name.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    FinishEvent,
    TextEvent,
    TokenText,
)
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import CARD, CONTEXT_LENGTH, MODEL, FakeBackend
from tests.support.servers.live_server import chat, events_of, make_settings

TEXT = "Hello from a fake model."
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
KEY = "k" * 32
BACKEND = FakeBackend()
STRICT_APP = create_app(make_settings(server={"strict": True}), BACKEND, Metrics(MODEL))
KEYED_APP = create_app(make_settings(server={"api_key": KEY}), BACKEND, Metrics(MODEL))
APP = create_app(make_settings(), BACKEND, Metrics(MODEL))


@pytest.fixture
def backend() -> FakeBackend:
    BACKEND.reset()
    return BACKEND


@pytest.fixture
async def client(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(APP) as client:
        yield client
    assert backend.num_open == 0


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "one two"} | fields


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert isinstance(error, dict)
    return error


def last_chat(backend: FakeBackend) -> ChatRequest:
    request = backend.requests[-1]
    assert isinstance(request, ChatRequest)
    return request


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def candidates(*scores: float) -> list[TextEvent | FinishEvent]:
    """One candidate per score; the second token of each is as likely as its first."""
    events: list[TextEvent | FinishEvent] = []
    for choice, score in enumerate(scores):
        token = TokenText("t", b"t", score)
        events += [TextEvent(choice, f"c{choice}", 2, (token, token)), FinishEvent(choice, "stop")]
    return events


async def test_best_of_returns_the_likeliest_choices(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = candidates(-2.0, -0.5, -3.0, -1.0)
    answer = await complete(client, best_of=4, n=2)
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "c1"), (1, "c3")]
    assert all(each["logprobs"] is None for each in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 8  # all that were made
    asked = backend.requests[0].context.params
    assert (asked.n, asked.logprobs) == (4, 0)
    answer = await complete(client, best_of=4, prompt=["a", "b"], logprobs=1)
    assert [each["text"] for each in answer["choices"]] == ["c1", "c1"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]
    assert backend.requests[-1].context.params.logprobs == 1
    assert len((await complete(client, best_of=4, n=4))["choices"]) == 4


async def test_best_of_ranks_without_the_prompts_logprobs(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    unlikely = (TokenText("p", b"p", float("nan")), TokenText("q", b"q", -99.0))
    echo = [TextEvent(choice, "pq", 0, unlikely) for choice in range(2)]
    backend.script = [*echo, *candidates(-2.0, -1.0)]
    answer = await complete(client, best_of=2, echo=True, logprobs=0)
    assert [each["text"] for each in answer["choices"]] == ["pqc1"]


@pytest.mark.parametrize("streams", [False, True])
async def test_echo_returns_the_prompt_with_logprobs(
    client: httpx.AsyncClient, backend: FakeBackend, streams: bool
) -> None:
    body = completion(echo=True, logprobs=1, max_tokens=1, stream=streams)
    response = await client.post(COMPLETIONS, json=body)
    if streams:
        chunks = [chunk["choices"][0] for chunk in events_of(response.text)[:-1]]
        parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        text = "".join(chunk["text"] for chunk in chunks)
        logprobs = {key: [each for part in parts for each in part[key]] for key in parts[0]}
    else:
        choice = response.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "one twoHello"
    assert logprobs == {
        "tokens": ["one", " two", "Hello"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {" two0": -1.0, " two": -0.5}, {"Hello0": -1.0, "Hello": -0.5}],
        "text_offset": [0, 3, 7],
    }
    request = backend.requests[0]
    assert isinstance(request, CompletionRequest)
    assert request.echo
    assert request.context.params.score_prompt


async def test_max_tokens_0_scores_only_the_prompt(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    answer = await complete(client, echo=True, logprobs=0, max_tokens=0, n=2)
    assert backend.requests[0].context.params.max_tokens == 1
    assert [each["text"] for each in answer["choices"]] == ["one two"] * 2
    assert answer["choices"][0]["logprobs"]["tokens"] == ["one", " two"]
    assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == 2
    await complete(client, echo=True)
    assert not backend.requests[-1].context.params.score_prompt


async def test_suffix_reaches_the_backend(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await complete(client, suffix="the end")
    request = backend.requests[0]
    assert isinstance(request, CompletionRequest)
    assert request.suffix == "the end"


async def test_metadata_truncation_and_priority_travel_with_a_request(
    client: httpx.AsyncClient, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.request")
    metadata = {"team": "red", "run": "7"}
    fields = {"metadata": metadata, "truncate_prompt_tokens": -1, "priority": -3}
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        answer = (await client.post(path, json=body)).json()
        assert answer["metadata"] == metadata
        context = backend.requests[-1].context
        assert context.truncate_prompt_tokens == -1
        assert context.priority == -3
    assert [vars(record)["metadata"] for record in caplog.records] == [metadata] * 2
    plain = (await client.post(CHAT, json=chat())).json()
    assert "metadata" not in plain


async def test_a_cache_salt_separates_caches_and_never_joins_tenants(backend: FakeBackend) -> None:
    salts = []
    for app in (APP, KEYED_APP):
        async with client_of(app) as client:
            for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
                headers = {"authorization": f"Bearer {KEY}"}
                await client.post(CHAT, json=chat(**fields), headers=headers)
                salts.append(backend.requests[-1].context.salt)
    assert salts[1] == salts[3] and salts[5] == salts[7]
    assert len(set(salts)) == 6
    assert all(salt not in ("a", "b") for salt in salts)


async def test_safety_identifier_is_accepted_as_the_user(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.request")
    await client.post(CHAT, json=chat(user="alice"))
    await client.post(CHAT, json=chat(safety_identifier="alice"))
    first, second = (vars(record)["user_hash"] for record in caplog.records)
    assert first == second


WARNED_EFFORT = "reasoning_effort"
EFFORT_ONLY = {"template_options": ("reasoning_effort",)}
BOTH = {"template_options": ("reasoning_effort", "thinking")}
MODE = {"template_options": ("thinking_mode",)}
BUDGET = {"template_options": ("thinking_budget",)}
PLAIN: dict[str, Any] = {"template_options": (), "capabilities": ("chat", "completions")}


@pytest.mark.parametrize(
    ("card", "fields", "options", "warned"),
    [
        (
            {},
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            None,
        ),
        ({}, {"chat_template_kwargs": {"mood": 1}}, {}, "chat_template_kwargs.mood"),
        (EFFORT_ONLY, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
        (EFFORT_ONLY, {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}, WARNED_EFFORT),
        (EFFORT_ONLY, {"reasoning_effort": "max"}, {"reasoning_effort": "high"}, WARNED_EFFORT),
        ({}, {"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        (
            BOTH,
            {"reasoning_effort": "low"},
            {"reasoning_effort": "low", "thinking": True},
            None,
        ),
        (
            BOTH,
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "thinking": False},
            None,
        ),
        (MODE, {"reasoning_effort": "none"}, {"thinking_mode": "disabled"}, None),
        (BUDGET, {"reasoning_effort": "none"}, {"thinking_budget": 0}, None),
        (BUDGET, {"reasoning_effort": "high"}, {}, WARNED_EFFORT),
        ({}, {"reasoning_effort": "minimal"}, {"enable_thinking": False}, None),
        (
            {},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            None,
        ),
        ({}, {"reasoning_effort": "high"}, {"enable_thinking": True}, "reasoning_effort"),
        (PLAIN, {"reasoning_effort": "high"}, {}, "reasoning_effort"),
        (PLAIN, {"reasoning_effort": "none"}, {}, None),  # it never reasons
        ({"template_options": ()}, {"reasoning_effort": "none"}, {}, "reasoning_effort"),
        ({}, {"verbosity": "low"}, {}, "verbosity"),
        ({}, {"prompt_cache_key": "x"}, {}, "prompt_cache_key"),
        (
            {},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "description": "d"},
                }
            },
            {},
            "response_format.json_schema.description",
        ),
        ({"emulated": ("tools",)}, {"tools": [TOOL]}, {}, "tools"),
        ({"lacks": ("priority",)}, {"priority": 1}, {}, "priority"),
        ({}, {"mirostat": 2, "min_p": 0.1}, {}, "min_p"),
        ({}, {"mirostat": 2, "repetition_penalty": 1.2, "dry_multiplier": 1.0}, {}, None),
    ],
)
async def test_parameters_without_effect_are_warned_about_and_refused_if_strict(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    card: dict[str, Any],
    fields: dict[str, Any],
    options: dict[str, Any],
    warned: str | None,
) -> None:
    backend.set_card(**card)
    for streams in (False, True):
        response = await client.post(CHAT, json=chat(stream=streams, **fields))
        assert response.status_code == 200, response.text
        assert last_chat(backend).template_options == options
        given = response.headers.get("x-engine-warnings")
        assert (given is None) if warned is None else given.startswith(f"{warned}: ")
    async with client_of(STRICT_APP) as strict:
        if warned is None:
            assert (await strict.post(CHAT, json=chat(**fields))).status_code == 200
        else:
            error = await refused(strict, CHAT, chat(**fields))
            assert error["param"] == warned
            assert error["code"] == "unsupported_parameter"


async def test_samplers_reach_the_backend_from_every_endpoint(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    fields = {"typical_p": 0.5, "mirostat": 1, "bad_words": ["x"], "stop_regex": "y+"}
    for path, prompt in {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        COMPLETIONS: {"prompt": "hi"},
        "/generate": {"prompt": "hi"},
        "/v1/responses": {"input": "hi"},
        "/v1/fim/completions": {"prompt": "hi", "suffix": "ho"},
    }.items():
        response = await client.post(path, json={"model": MODEL, **prompt, **fields})
        assert response.status_code == 200, response.text
        params = backend.requests[-1].context.params
        assert (params.typical_p, params.mirostat) == (0.5, 1), path
        assert (params.bad_words, params.stop_regex) == (("x",), ("y+",)), path


async def test_several_warnings_share_one_header(client: httpx.AsyncClient) -> None:
    body = chat(verbosity="low", chat_template_kwargs={"ü\r\nx": 1, "enable_thinking": True})
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200
    warnings = response.headers["x-engine-warnings"].split("; ")
    named = [each.split(": ")[0] for each in warnings]
    assert named == ["chat_template_kwargs.???x", "verbosity"]  # no line of its own making


@pytest.mark.parametrize(
    ("missing", "path", "fields", "param"),
    [
        ("chat", CHAT, {}, "messages"),
        ("tools", CHAT, {"tools": [TOOL]}, "tools"),
        ("json_schema", CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        ("json_schema", COMPLETIONS, {"guided_regex": "a"}, "guided_regex"),
        ("completions", COMPLETIONS, {}, "prompt"),
        ("completions", CHAT, {}, "messages"),
        ("suffix", COMPLETIONS, {"suffix": "x"}, "suffix"),
    ],
)
async def test_parameters_that_the_model_lacks_are_refused(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    missing: str,
    path: str,
    fields: dict[str, Any],
    param: str,
) -> None:
    backend.set_card(capabilities=tuple(each for each in CARD.capabilities if each != missing))
    body = chat(**fields) if path == CHAT else completion(**fields)
    error = await refused(client, path, body)
    assert error["param"] == param
    assert param in error["message"] and MODEL in error["message"]
    assert not backend.requests


@pytest.mark.parametrize(
    ("fields", "adds", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
async def test_add_generation_prompt_and_continue_final_message_reach_the_template(
    client: httpx.AsyncClient,
    backend: FakeBackend,
    fields: dict[str, Any],
    adds: bool,
    continues: bool,
) -> None:
    messages = [user("a"), {"role": "assistant", "content": "The answer"}]
    assert (await client.post(CHAT, json=chat(messages=messages, **fields))).status_code == 200
    request = last_chat(backend)
    assert request.add_generation_prompt is adds
    assert request.continue_final_message is continues
    both = chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (await refused(client, CHAT, both))["param"] == "continue_final_message"


async def test_model_entry_reports_trained_context_and_capabilities(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    entry = (await client.get(f"/v1/models/{MODEL}")).json()
    assert entry["meta"]["n_ctx_train"] == 2 * CONTEXT_LENGTH
    assert entry["capabilities"] == list(CARD.capabilities)
    backend.set_card(trained_context=None)
    entry = (await client.get(f"/v1/models/{MODEL}")).json()
    assert entry["meta"]["n_ctx_train"] == CONTEXT_LENGTH


@pytest.mark.parametrize("num_revivals", [0, 2])
async def test_an_engine_restart_during_a_request_is_reported_as_a_warning(
    client, backend, num_revivals
):
    backend.num_revivals = num_revivals
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        response = await client.post(path, json=body)
        told = response.headers.get("x-engine-warnings", "")
        assert response.status_code == 200 and ("restarted" in told) == (num_revivals > 0)
