"""One bad body, in the words of each API of chats: the same status and the same first complaint.

Only names differ: `input` for `messages`, `text.format` for `response_format`, and so on. A line of
a batch is answered by its endpoint, so it must say what the endpoint says.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from engine.servers.batches import run, runner
from tests.support.fakes.fake_backend import MODEL
from tests.support.servers.live_server import LiveServer, live_server, wait_until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {}}
HTTP = httpx.Client(timeout=60)


class Bad(NamedTuple):
    """What each API is sent besides a model and a question, and where the mistake is in each."""

    chat: dict[str, Any]
    responses: dict[str, Any]
    messages: dict[str, Any]
    params: tuple[str, str, str]

    @classmethod
    def same(cls, param: str, **fields: Any) -> "Bad":
        return cls(fields, fields, fields, (param, param, param))


def flat(name: Any = "look") -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA}


def nested(name: Any = "look") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def custom(name: Any = "look") -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


def turns(*messages: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    given = {"messages": list(messages)} | more
    return given, {"input": list(messages)} | more, given


BAD = {
    "unknown model": Bad.same("model", model="no/such-model"),
    "temperature": Bad.same("temperature", temperature=-1),
    "no messages": Bad(*turns(), ("messages", "input", "messages")),
    "unknown role": Bad(
        *turns({"role": "robot", "content": "hi"}),
        ("messages[0].role", "input[0].role", "messages[0].role"),
    ),
    "a tool without a name": Bad(
        {"tools": [nested(None)]},
        {"tools": [flat(None)]},
        {"tools": [custom(None)]},
        ("tools[0].function.name", "tools[0].name", "tools[0].name"),
    ),
    "a choice that is none of the tools": Bad(
        {"tools": [nested()], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        {"tools": [flat()], "tool_choice": {"type": "function", "name": "x"}},
        {"tools": [custom()], "tool_choice": {"type": "tool", "name": "x"}},
        ("tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
    ),
    "a schema that is none": Bad(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "s"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": "s"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": "s"}}},
        (
            "response_format.json_schema.schema",
            "text.format.schema",
            "output_config.format.schema",
        ),
    ),
    "no tokens": Bad(
        {"max_tokens": 0},
        {"max_output_tokens": 0},
        {"max_tokens": 0},
        ("max_tokens", "max_output_tokens", "max_tokens"),
    ),
    "wrong type": Bad.same("temperature", temperature="hot"),
    "unknown parameter": Bad.same("temprature", temprature=1),
}


# Several mistakes at once: which of them is told first.
BOTH = {
    "an unknown parameter, then a number": Bad.same("temprature", temperature=-1, temprature=1),
    "the limit, then another number": Bad(
        {"temperature": -1, "max_tokens": 0},
        {"temperature": -1, "max_output_tokens": 0},
        {"temperature": -1, "max_tokens": 0},
        ("max_tokens", "max_output_tokens", "max_tokens"),
    ),
    "the messages, then a number": Bad(
        *turns({"role": "robot", "content": "hi"}, temperature=-1),
        ("messages[0].role", "input[0].role", "messages[0].role"),
    ),
    "the messages, then the tools": Bad(
        {"tools": [nested(None)], "messages": []},
        {"tools": [flat(None)], "input": []},
        {"tools": [custom(None)], "messages": []},
        ("messages", "input", "messages"),
    ),
    "the tools, then the choice": Bad(
        {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [nested(None)]},
        {"tool_choice": {"type": "function", "name": "x"}, "tools": [flat(None)]},
        {"tool_choice": {"type": "tool", "name": "x"}, "tools": [custom(None)]},
        ("tools[0].function.name", "tools[0].name", "tools[0].name"),
    ),
    "a number, then the model": Bad.same("temperature", model="no/such-model", temperature=-1),
    "the messages, then the model": Bad(
        *turns(model="no/such-model"), ("messages", "input", "messages")
    ),
}
ALL = BAD | BOTH
# What an API calls the things that a complaint is about, besides the field itself.
ROLES = (
    "system, developer, user, assistant, tool",
    "user, assistant, system, developer",
    "user, assistant, system",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "FIRST_PAUSE_S", 0.01)
        patch.setattr(runner, "POLL_S", 0.05)
        with live_server(storage={"path": tmp_path_factory.mktemp("storage")}) as server:
            yield server


def first_sentence(status: int, body: dict[str, Any], param: str, roles: str) -> tuple[int, str]:
    """The first complaint without the words that are an API's own."""
    message = body["error"]["message"]
    said = message.partition(". ")[0].rstrip(".")
    assert param in said or param == "model"
    return status, said.replace(param, "PLACE", 1).replace(roles, "ROLES").replace("items", "turns")


def answers(server: LiveServer, name: str) -> list[tuple[int, dict[str, Any]]]:
    bad = ALL[name]
    bodies = (
        (CHAT, {"messages": HI} | bad.chat),
        (RESPONSES, {"input": HI} | bad.responses),
        (MESSAGES, {"messages": HI, "max_tokens": 5} | bad.messages),
    )
    found = []
    for path, body in bodies:
        answer = HTTP.post(server.url + path, json={"model": MODEL} | body)
        found.append((answer.status_code, answer.json()))
    return found


@pytest.mark.parametrize("name", ALL)
def test_the_first_error_of_a_bad_body_is_the_same_in_every_api(
    server: LiveServer, name: str
) -> None:
    params = ALL[name].params
    given = answers(server, name)
    said = [
        first_sentence(status, body, param, roles)
        for (status, body), param, roles in zip(given, params, ROLES, strict=True)
    ]
    turns = [(status, text.replace("messages", "turns")) for status, text in said]
    assert turns[0] == turns[1] == turns[2]
    assert [body["error"].get("param") for _, body in given[:2]] == list(params[:2])
    assert given[0][1]["error"]["code"] == given[1][1]["error"]["code"]


def batch_of(server: LiveServer, bodies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The batch, as it ended."""
    lines = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
        for name, body in bodies.items()
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("in.jsonl", text), "purpose": (None, "batch")}
    file_id = HTTP.post(f"{server.url}/v1/files", files=files).json()["id"]
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    made = HTTP.post(f"{server.url}/v1/batches", json=asked).json()
    url = f"{server.url}/v1/batches/{made['id']}"
    wait_until(lambda: HTTP.get(url).json()["status"] in ("completed", "failed"), seconds=60)
    batch: dict[str, Any] = HTTP.get(url).json()
    return batch


def test_an_error_in_a_batch_line_equals_the_endpoints_error(server: LiveServer) -> None:
    bad = {name: each.chat for name, each in ALL.items() if "model" not in each.chat}
    bodies = {name: {"model": MODEL, "messages": HI} | each for name, each in bad.items()}
    batch = batch_of(server, bodies)
    content = HTTP.get(f"{server.url}/v1/files/{batch['error_file_id']}/content").text
    lines = [json.loads(each) for each in content.splitlines()]
    assert [each["custom_id"] for each in lines] == list(bodies)
    for each in lines:
        status, body = answers(server, each["custom_id"])[0]
        assert (each["response"]["status_code"], each["response"]["body"]) == (status, body)


def test_a_batch_with_an_unknown_model_has_the_endpoints_error(server: LiveServer) -> None:
    batch = batch_of(server, {"x": {"model": "no/such-model", "messages": HI}})
    (error,) = batch["errors"]["data"]
    said = answers(server, "unknown model")[0][1]["error"]
    assert (error["message"], error["code"]) == (said["message"], said["code"])
    assert error["param"] == f"body.{said['param']}"
