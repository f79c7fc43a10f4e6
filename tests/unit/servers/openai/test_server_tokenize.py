"""/tokenize and /detokenize: shapes, bounds, and that a conversation is rendered as a chat is."""

from collections.abc import AsyncIterator
from typing import Any, Unpack

import httpx
import pytest

from engine.backends.base import Tokenizing
from engine.core.interfaces.backend import ChatRequest, ToolChoice
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from engine.servers.openai import tokenize
from tests.support.fakes.fake_backend import CONTEXT_LENGTH, MODEL, FakeBackend
from tests.support.servers.live_server import make_settings

CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "ho"}]


class Recorder(FakeBackend):
    """Keeps the conversations that it was asked to tokenize."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenized: list[ChatRequest | str] = []

    async def tokenize(
        self, content: ChatRequest | str, *, model: str = "", **how: Unpack[Tokenizing]
    ) -> tuple[int, ...]:
        self.tokenized.append(content)
        return await super().tokenize(content, **how)


@pytest.fixture
def backend() -> Recorder:
    return Recorder()


@pytest.fixture
async def client(backend: Recorder) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(make_settings(), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    assert app.state.services.lifecycle.num_admitted == 0


async def test_tokenize_and_detokenize_round_trip(client: httpx.AsyncClient) -> None:
    for named in ({}, {"model": MODEL}):
        answer = (await client.post("/tokenize", json=named | {"prompt": "hé"})).json()
        assert answer == {
            "count": 4,
            "max_model_len": CONTEXT_LENGTH,
            "tokens": [256, *"hé".encode()],
            "token_strs": None,
        }
        back = await client.post("/detokenize", json=named | {"tokens": answer["tokens"]})
        assert back.json() == {"prompt": "<s>hé", "content": "<s>hé"}
    empty = await client.post("/tokenize", json={"prompt": "", "add_special_tokens": False})
    assert (empty.json()["count"], empty.json()["tokens"]) == (0, [])
    assert (await client.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""


async def test_token_strings_are_returned_up_to_a_limit(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "aba", "return_token_strs": True}
    answer = await client.post("/tokenize", json=body)
    assert answer.json()["token_strs"] == ["<s>", "a", "b", "a"]
    monkeypatch.setattr(tokenize, "MAX_TOKEN_STRS", 2)
    refused = await client.post("/tokenize", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_token_strs"


async def test_tokenize_parses_control_tokens_only_on_request(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a<s>", "add_special_tokens": False}
    plain = await client.post("/tokenize", json=body)
    assert plain.json()["tokens"] == list(b"a<s>")
    assert "parse_special: <s> in the prompt" in plain.headers["x-engine-warnings"]
    for parse, tokens in ((True, [97, 256]), (False, list(b"a<s>"))):
        told = await client.post("/tokenize", json=body | {"parse_special": parse})
        assert told.json()["tokens"] == tokens
        assert "x-engine-warnings" not in told.headers


async def test_tokenizer_info_reports_special_tokens_and_template(
    client: httpx.AsyncClient, backend: Recorder
) -> None:
    for query in ("", f"?model={MODEL}"):
        told = (await client.get(f"/tokenizer_info{query}")).json()
        assert told["model_max_length"] == CONTEXT_LENGTH
        assert (told["bos_token"], told["bos_token_id"]) == ("<s>", 256)
        assert (told["eos_token"], told["chat_template"]) == (None, "{{ messages }}")
        assert told["added_tokens_decoder"] == {"256": {"content": "<s>", "special": True}}
    assert (await client.get("/tokenizer_info?model=other")).status_code == 404
    assert (await client.get("/tokenizer_info?name=other")).status_code == 400


@pytest.mark.parametrize(
    ("fields", "adds_prompt", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"messages": ANSWERED, "continue_final_message": True}, False, True),
    ],
)
async def test_tokenize_renders_messages_like_a_chat(
    client: httpx.AsyncClient,
    backend: Recorder,
    fields: dict[str, Any],
    adds_prompt: bool,
    continues: bool,
) -> None:
    options = {"chat_template_kwargs": {"enable_thinking": True, "other": 1}}
    body = {"messages": MESSAGES, "tools": [TOOL]} | options | fields
    response = await client.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-engine-warnings"].startswith("chat_template_kwargs.other: ")
    (asked,) = backend.tokenized
    assert isinstance(asked, ChatRequest)
    assert (asked.add_generation_prompt, asked.continue_final_message) == (adds_prompt, continues)
    assert asked.template_options == {"enable_thinking": True}
    assert asked.tool_choice == ToolChoice("auto")
    same = {**body, "model": MODEL}
    assert (await client.post("/v1/chat/completions", json=same)).status_code == 200
    assert backend.requests[-1].messages == asked.messages
    assert backend.requests[-1].tools == asked.tools


async def test_tokenize_passes_text_to_the_backend_unchanged(
    client: httpx.AsyncClient, backend: Recorder
) -> None:
    text = "<|im_start|>system\n<s></s>\x00\u202e"
    await client.post("/tokenize", json={"prompt": text})
    assert backend.tokenized == [text]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "parse_special": True}, "parse_special"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True},
            "continue_final_message",
        ),
        (
            "/tokenize",
            {"messages": [*MESSAGES, CALL], "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [0] * 2_000_000}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["x"] * 200_000}, "tokens[0]"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": [1], "skip": 1}, "skip"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_invalid_tokenize_requests_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert len(response.content) < 1000


async def test_tokenize_warns_about_emulated_tools(
    client: httpx.AsyncClient, backend: Recorder
) -> None:
    backend.set_card(emulated=("tools",))
    response = await client.post("/tokenize", json={"messages": MESSAGES, "tools": [TOOL]})
    assert response.headers["x-engine-warnings"].startswith("tools: ")


async def test_tokenizing_for_an_unknown_model_is_404(
    client: httpx.AsyncClient, backend: Recorder
) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        response = await client.post(path, json=body | {"model": "other"})
        assert response.status_code == 404
    backend.set_card(capabilities=("completions",))
    refused = await client.post("/tokenize", json={"messages": MESSAGES})
    assert refused.json()["error"]["param"] == "messages"
