"""What breaks servers most often, sent as clients send it: each works, or is refused with the
parameter named.
"""

import json
from typing import Any

import httpx
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "next": {"$ref": "#/$defs/node"},
        "code": {"type": "string", "pattern": "^[a-z]+$"},
        "day": {"type": "string", "format": "date"},
    },
    "required": ["next"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
APP = create_app(make_settings(), FakeBackend(), Metrics(MODEL))


async def post(path: str, text: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"content-type": "application/json"}
        return await client.post(path, content=text.encode(), headers=headers)


def body_of(path: str, fields: dict[str, Any]) -> str:
    whole = chat() if path == CHAT else {"model": MODEL, "prompt": "one two"}
    return json.dumps(whole | fields)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


WORKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"max_completion_tokens": 5}),
    (CHAT, {"stop": None}),
    (CHAT, {"stop": ""}),
    (CHAT, {"stop": ["a", "b", "c", "d", "e", "f"]}),
    (CHAT, {"tools": []}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"messages": [user("a"), {"role": "assistant", "content": None}, user("b")]}),
    (CHAT, {"messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]}),
    (CHAT, {"messages": [{"role": "developer", "content": "be kind"}, user("a")]}),
    (CHAT, {"logit_bias": {"50256": -100}}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 0}),
    (CHAT, {"top_logprobs": 0}),
    (COMPLETIONS, {"logprobs": 3}),
    (COMPLETIONS, {"logprobs": 0}),
    (CHAT, {"n": 2, "stream": True}),
    (COMPLETIONS, {"n": 2, "stream": True}),
    (CHAT, {"temperature": 0, "top_p": 0}),
    (CHAT, {"seed": 2**63 + 1}),
    (CHAT, {"response_format": {"type": "text"}}),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
    ),
    (CHAT, {"user": "u" * 65}),
    (CHAT, {"parallel_tool_calls": None}),
    (CHAT, {"parallel_tool_calls": True}),
    (CHAT, {"function_call": None, "functions": None, "audio": None, "prediction": None}),
    (CHAT, {"prediction": {"type": "content", "content": "4"}}),
    (CHAT, {"service_tier": "auto", "store": False, "modalities": ["text"]}),
    (CHAT, {"skip_special_tokens": True, "include_reasoning": True}),
    (CHAT, {"reasoning_effort": None, "verbosity": None, "metadata": None}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]]}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"best_of": None, "echo": None, "suffix": None}),
    (COMPLETIONS, {"best_of": 1, "suffix": ""}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    (
        CHAT,
        {"messages": [{"role": "tool", "tool_call_id": "a", "content": "x"}]},
        "messages[0].tool_call_id",
    ),
    (CHAT, {"logprobs": 3}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (CHAT, {"seed": 2**64}, "seed"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"extra_body": {"top_k": 5}}, "extra_body"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"service_tier": "flex"}, "service_tier"),
    (CHAT, {"detokenize": False}, "detokenize"),
    (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"n": 17}, "n"),
    (COMPLETIONS, {"tools": [TOOL]}, "tools"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
    (COMPLETIONS, {"best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
    (COMPLETIONS, {"best_of": 21}, "best_of"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields"), WORKS)
async def test_common_client_bodies_are_accepted_without_warnings(
    path: str, fields: dict[str, Any]
) -> None:
    response = await post(path, body_of(path, fields))
    assert response.status_code == 200, response.text
    assert "x-engine-warnings" not in response.headers


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
async def test_common_client_mistakes_are_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    response = await post(path, body_of(path, fields))
    assert response.status_code == 400, response.text
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_a_lone_surrogate_is_refused() -> None:
    text = body_of(CHAT, {"messages": [user("\ud800")]})
    assert "\\ud800" in text
    response = await post(CHAT, text)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]
