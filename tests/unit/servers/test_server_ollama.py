"""Ollama's API for text and embeddings: what clients of Ollama send, and what they read."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.core.errors import InferenceError
from engine.core.interfaces.backend import (
    IMAGE_MARK,
    ChatRequest,
    CompletionRequest,
    FinishEvent,
    GrammarSpec,
    TextEvent,
    ToolCallEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.serving import sse
from tests.support.fakes.fake_backend import CARD, MODEL, FakeBackend, call_script, reasoning_script
from tests.support.servers.live_server import make_settings

WORDS = "Hello from a fake model."
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


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


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": MODEL} | fields)


async def whole(client: httpx.AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await ask(client, path, stream=False, **fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert isinstance(body, dict)
    return body


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat_is_streamed_by_default(client: httpx.AsyncClient) -> None:
    *pieces, last = lines(await ask(client, "/api/chat", messages=HELLO))
    assert "".join(each["message"]["content"] for each in pieces) == WORDS
    assert not any(each["done"] for each in pieces)
    assert {each["message"]["role"] for each in (*pieces, last)} == {"assistant"}
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", MODEL)
    assert (last["prompt_eval_count"], last["eval_count"]) == (1, 6)
    assert last["total_duration"] > 0 and last["eval_duration"] > 0
    assert last["created_at"].endswith("Z")


async def test_an_unstreamed_chat_has_the_same_content(client: httpx.AsyncClient) -> None:
    chat = await whole(client, "/api/chat", messages=HELLO)
    text = await whole(client, "/api/generate", prompt="hi")
    assert chat["message"] == {"role": "assistant", "content": WORDS}
    assert text["response"] == WORDS
    assert chat["done_reason"] == text["done_reason"] == "stop"
    assert "message" not in text and "response" not in chat


async def test_names_may_have_the_tag_latest(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    answer = await whole(client, "/api/chat", messages=HELLO, model=f"{MODEL}:latest")
    assert answer["model"] == f"{MODEL}:latest"
    assert backend.requests[0].context.model == MODEL
    backend.set_card(id="qwen3-0.6b")
    response = await ask(client, "/api/chat", messages=HELLO, model="qwen3:0.6b")
    assert "qwen3-0.6b answers" in response.headers["x-engine-warnings"]
    missing = await ask(client, "/api/chat", messages=HELLO, model="qwen3:8b")
    assert missing.status_code == 404
    assert missing.json() == {"error": "model 'qwen3:8b' not found. Available: qwen3-0.6b."}


async def test_options_are_sampling_parameters(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    options = {
        "num_predict": 3,
        "repeat_penalty": 1.5,
        "repeat_last_n": 33,
        "temperature": 0.3,
        "top_k": 5,
        "top_p": 0.6,
        "min_p": 0.1,
        "typical_p": 0.7,
        "mirostat": 2,
        "seed": 9,
        "stop": ["END"],
        "presence_penalty": 0.5,
    }
    answer = await whole(client, "/api/chat", messages=HELLO, options=options)
    assert answer["done_reason"] == "length"
    params = backend.requests[0].context.params
    assert (params.max_tokens, params.repetition_penalty, params.stop) == (3, 1.5, ("END",))
    names = ("repeat_last_n", "temperature", "top_k", "top_p", "min_p", "typical_p", "mirostat")
    for name in (*names, "seed", "presence_penalty"):
        assert getattr(params, name) == options[name], name


async def test_unset_options_have_ollamas_defaults(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await whole(client, "/api/chat", messages=HELLO, options={"num_predict": -1, "seed": -1})
    options = {"num_predict": -2, "temperature": 0, "repeat_penalty": 1.1}
    await whole(client, "/api/generate", prompt="a", options=options)
    first, second = (request.context.params for request in backend.requests)
    assert (first.temperature, first.top_k, first.top_p) == (0.8, 40, 0.9)
    assert (first.max_tokens, first.seed) == (None, None)
    assert (second.temperature, second.max_tokens) == (0.0, None)
    assert (first.repeat_last_n, second.repeat_last_n) == (SamplingParams().repeat_last_n, 64)
    response = await ask(client, "/api/chat", messages=HELLO, options={"mirostat": 2})
    assert "x-engine-warnings" not in response.headers


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_ctx": 10**6}, "options.num_ctx"),
        ({"num_gpu": 1}, "options.num_gpu"),
        ({"numa": True}, "options.numa"),
        ({"num_keep": 5}, "options.num_keep"),
    ],
)
async def test_engine_options_of_ollama_are_ignored_with_a_warning(
    client: httpx.AsyncClient, options: dict[str, Any], word: str
) -> None:
    response = await ask(client, "/api/chat", messages=HELLO, options=options)
    assert response.headers["x-engine-warnings"].startswith(word)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"options": {"temperature": "1"}}, "options.temperature"),
        ({"options": []}, "options"),
        ({"format": "yaml"}, "format"),
        ({"think": "very"}, "think"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "images": ["?"]}]}, "images[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_name"),
        ({"messages": [{"role": "user", "content": "a", "colour": "b"}]}, "colour"),
    ],
)
async def test_errors_have_ollamas_shape(
    client: httpx.AsyncClient, fields: dict[str, Any], word: str
) -> None:
    response = await ask(client, "/api/chat", **({"messages": HELLO} | fields))
    assert response.status_code == 400
    assert list(response.json()) == ["error"] and word in response.json()["error"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z: has no effect here"),
        ({"options": {"temprature": 1}}, "options.temprature: not known here"),
        ({"max_output_tokens": 5}, "max_output_tokens: not known here"),
        ({"tool_choice": "required"}, "tool_choice: has no effect here"),
        ({f"x{i}": 1 for i in range(10_000)}, "x9 and 9990 more: not known here"),
    ],
)
async def test_parameters_that_ollama_ignores_cause_a_warning(
    client: httpx.AsyncClient, fields: dict[str, Any], word: str
) -> None:
    response = await ask(client, "/api/chat", messages=HELLO, **fields)
    assert response.status_code == 200
    assert word in response.headers["x-engine-warnings"]


async def test_nested_options_make_no_long_header(client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {}
    for _ in range(40):
        options = {"tfs_z": 0.5, "num_ctx": 5, "options": options}
    response = await ask(client, "/api/chat", messages=HELLO, options=options)
    assert response.status_code == 200
    assert len(response.headers["x-engine-warnings"]) < 16_384


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"context": [1, 2]}, "/api/chat"),
        ({"raw": True, "system": "s"}, "system"),
        ({"suffix": "s", "images": ["aGk="]}, "images"),
        ({"raw": True, "think": True}, "think"),
    ],
)
async def test_unsupported_generate_options_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], word: str
) -> None:
    response = await ask(client, "/api/generate", prompt="hi", **fields)
    assert response.status_code == 400 and word in response.json()["error"]


async def test_format_becomes_a_grammar(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await whole(client, "/api/chat", messages=HELLO, format=schema)
    await whole(client, "/api/generate", prompt="a", format="json")
    await whole(client, "/api/generate", prompt="a", format="")
    grammars = [request.context.grammar for request in backend.requests]
    assert isinstance(grammars[0], GrammarSpec) and json.loads(grammars[0].source) == schema
    assert grammars[1] == GrammarSpec(kind="json_object", param="format")
    assert grammars[2] is None


async def test_thinking_is_returned_separately(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = reasoning_script(["Hm", "m."], ["Yes."])
    answer = await whole(client, "/api/chat", messages=HELLO, think=True)
    assert answer["message"] == {"role": "assistant", "content": "Yes.", "thinking": "Hmm."}
    pieces = lines(await ask(client, "/api/generate", prompt="a", think=False))
    assert "".join(each.get("thinking", "") for each in pieces) == "Hmm."
    options = [request.template_options for request in backend.requests]
    assert options == [{"enable_thinking": True}, {"enable_thinking": False}]
    backend.set_card(capabilities=("completions", "chat"))
    refused = await ask(client, "/api/chat", messages=HELLO, think=True)
    assert refused.status_code == 400 and "does not support thinking" in refused.text
    assert (await ask(client, "/api/chat", messages=HELLO, think=False)).status_code == 200


async def test_tool_calls_are_sent_whole(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = call_script(("look", '{"at": "x"}'), ("look", ""))
    answer = await whole(client, "/api/chat", messages=HELLO, tools=[TOOL])
    streamed = lines(await ask(client, "/api/chat", messages=HELLO, tools=[TOOL]))
    calls = [call for each in streamed for call in each["message"].get("tool_calls", ())]
    assert calls == answer["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "look", "arguments": {"at": "x"}},
        {"index": 1, "name": "look", "arguments": {}},
    ]


async def test_a_truncated_tool_call_is_dropped(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [ToolCallEvent(0, 0, '{"at', "id", "look"), FinishEvent(0, "length")]
    answer = await whole(client, "/api/chat", messages=HELLO, tools=[TOOL])
    assert "tool_calls" not in answer["message"] and answer["done_reason"] == "length"


async def test_tool_results_are_matched_to_their_calls(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    tools = ("one", "two", "three")
    calls = [{"index": 0, "function": {"name": name, "arguments": {"n": 1}}} for name in tools]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "so"},
        {"role": "tool", "content": "2", "tool_name": "two"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "3"},
    ]
    await whole(client, "/api/chat", messages=messages)
    request = backend.requests[0]
    assert isinstance(request, ChatRequest)
    _, assistant, second, first, third = request.messages
    ids = [call["id"] for call in assistant["tool_calls"]]
    assert assistant["reasoning_content"] == "so"
    assert [each["tool_call_id"] for each in (first, second, third)] == ids
    assert (first["name"], second["name"], third["name"]) == tools


async def test_images_precede_the_text_of_a_message(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.set_card(capabilities=(*CARD.capabilities, "images"))
    image = base64.b64encode(b"bytes").decode()
    messages = [{"role": "user", "content": "what?", "images": [image]}]
    await whole(client, "/api/chat", messages=messages)
    await whole(client, "/api/generate", prompt="what?", images=[image], system="Look.")
    for request in backend.requests:
        assert isinstance(request, ChatRequest)
        last = request.messages[-1]
        assert (last["content"], last["images"]) == (f"{IMAGE_MARK}what?", [b"bytes"])
    assert backend.requests[1].messages[0] == {"role": "system", "content": "Look."}


async def test_a_final_assistant_message_is_continued(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    await whole(client, "/api/chat", messages=messages)
    request = backend.requests[0]
    assert isinstance(request, ChatRequest)
    assert request.continue_final_message and not request.add_generation_prompt


async def test_raw_prompts_and_suffixes_are_supported(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    await whole(client, "/api/generate", prompt="<s>a", raw=True)
    await whole(client, "/api/generate", prompt="a", suffix="b")
    backend.set_card(capabilities=("completions",))
    await whole(client, "/api/generate", prompt="a")
    refused = await ask(client, "/api/generate", prompt="a", system="s")
    assert refused.status_code == 400 and "no chat template" in refused.text
    raw, filled, plain = backend.requests
    assert isinstance(raw, CompletionRequest) and raw.prompt == "<s>a" and raw.parse_special
    assert isinstance(filled, CompletionRequest) and filled.suffix == "b"
    assert isinstance(plain, CompletionRequest) and not plain.parse_special


async def test_ollama_logprobs_are_returned_if_requested(client: httpx.AsyncClient) -> None:
    answer = await whole(client, "/api/generate", prompt="a", logprobs=True, top_logprobs=1)
    assert [each["token"] for each in answer["logprobs"]][:2] == ["Hello", " from"]
    assert len(answer["logprobs"][0]["top_logprobs"]) == 1
    streamed = lines(await ask(client, "/api/generate", prompt="a", logprobs=True))
    assert len([each for line in streamed for each in line.get("logprobs", ())]) == 6


async def test_an_empty_prompt_only_loads_the_model(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    chat = (await ask(client, "/api/chat", messages=[])).json()
    text = (await ask(client, "/api/generate")).json()
    assert chat["done"] and chat["done_reason"] == text["done_reason"] == "load"
    assert chat["message"]["content"] == text["response"] == ""
    assert not backend.requests


async def test_a_failure_mid_stream_is_the_last_line(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.failure, backend.fail_after = InferenceError("It broke."), 2
    *pieces, last = lines(await ask(client, "/api/chat", messages=HELLO))
    assert len(pieces) == 2 and last == {"error": "It broke."}


async def test_events_without_text_write_no_line(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.script = [TextEvent(0, "", 1), TextEvent(0, "a", 1), FinishEvent(0, "stop")]
    assert len(lines(await ask(client, "/api/chat", messages=HELLO))) == 2


async def test_every_line_is_json_while_the_prompt_is_computed(
    client: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "ACCEPT_WAIT_S", 0.01)
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    backend.prefill_s = 0.1
    response = await ask(client, "/api/chat", messages=HELLO)
    assert response.text.startswith(" ")
    assert len(lines(response)) == 7


async def test_json_bodies_with_curls_form_content_type_are_accepted(
    client: httpx.AsyncClient,
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post("/api/generate", content=body, headers=form)
    assert response.json()["response"] == WORDS
    page = form | {"origin": "http://localhost", "host": "localhost"}
    response = await client.post("/api/generate", content=body, headers=page)
    assert response.status_code == 415


async def test_keep_alive_of_the_only_model_is_warned_about(client: httpx.AsyncClient) -> None:
    for value, is_told in (("5m", False), (-1, False), ("1h30m", True), (0, True)):
        response = await ask(client, "/api/chat", messages=HELLO, keep_alive=value)
        assert ("keep_alive" in response.headers.get("x-engine-warnings", "")) is is_told, value


async def test_ollama_embeddings_in_both_endpoints(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    made = (await ask(client, "/api/embed", input=["a b", "c"])).json()
    one = (await ask(client, "/api/embed", input="c")).json()
    old = (await ask(client, "/api/embeddings", prompt="c")).json()
    assert len(made["embeddings"]) == 2 and made["prompt_eval_count"] == 3
    assert made["embeddings"][1] == one["embeddings"][0] == old["embedding"]
    short = await ask(client, "/api/embed", input="c", dimensions=3)
    assert len(short.json()["embeddings"][0]) == 3
    assert (await ask(client, "/api/embed", input=[])).json()["embeddings"] == []
    told = await ask(client, "/api/embed", input="c", options={"temperature": 1})
    assert "options.temperature" in told.headers["x-engine-warnings"]


async def test_long_embedding_inputs_are_truncated_at_their_end(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    backend.set_card(max_model_len=10)
    await ask(client, "/api/embed", input=["short", "a text that is long"])
    await ask(client, "/api/embed", input="a text that is long", truncate=False)
    cut, whole = backend.embed_requests
    assert cut.inputs == ("short", (256, *b"a text th"))  # the fake has a BOS, and a token per byte
    assert whole.inputs == ("a text that is long",)
