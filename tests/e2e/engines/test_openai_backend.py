"""A server in front of a server: what a client gets is the same, to the last field."""

import json
from typing import Any

import httpx
import openai
import pytest

from engine.backends.openai import OpenAIBackend, OpenAIConfig
from engine_tools.conformance.rules import GROUPS
from engine_tools.conformance.run import find_target, new_client, run_rules
from tests.support.servers.live_server import events_of, live_server, wait_until

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
QUESTION = [{"role": "user", "content": "Name the capital of France."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# What no two answers have alike, or what names the backend itself.
OWN_FIELDS = ("id", "created", "system_fingerprint")


@pytest.fixture(scope="module")
def front(server):
    backend = OpenAIBackend(OpenAIConfig(base_url=f"{server.url}/v1"))
    with live_server(backend) as made:
        wait_until(lambda: backend.health().ready, seconds=60)
        yield made


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = events_of(answer.text)
        return [{k: v for k, v in e.items() if k not in OWN_FIELDS} for e in events[:-1]]
    found = answer.json()
    return {key: value for key, value in found.items() if key not in OWN_FIELDS}


def without_ids(answer: Any) -> Any:
    """Ids of calls are random, and how many prompt tokens were cached depends on who was first."""
    text = json.dumps(answer)
    for call in answer["choices"][0]["message"].get("tool_calls", []):
        text = text.replace(call["id"], "call")
    made = json.loads(text)
    made["usage"].pop("prompt_tokens_details")
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 8},
        {"max_tokens": 8, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"max_tokens": 30, "stop": ["Paris"]},
        {"max_tokens": 30, "tools": [TOOL], "tool_choice": "required"},
        {"max_tokens": 20, "guided_json": SCHEMA},
        {"max_tokens": 20, "guided_choice": ["red", "blue"]},
        {"max_tokens": 4, "seed": 3, "temperature": 1.0, "top_k": 20, "min_p": 0.01},
        {"max_tokens": 4, "logit_bias": {"260": -100}, "ignore_eos": True, "min_tokens": 2},
        {
            "max_tokens": 6,
            "messages": [*QUESTION, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
        },
    ],
    ids=lambda fields: "-".join(fields),
)
def test_chat_answers_through_a_second_server_are_identical(
    server, front, fields: dict[str, Any]
) -> None:
    body = {"model": server.model, "messages": QUESTION, "temperature": 0} | fields
    assert without_ids(ask(front.url, CHAT, body)) == without_ids(ask(server.url, CHAT, body))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 3},
        {"prompt": "Once upon a time", "echo": True, "max_tokens": 0},
        {"prompt": [[504, 1165], [28, 655]], "echo": True, "max_tokens": 3, "logprobs": 0},
        {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 1, "temperature": 1, "max_tokens": 3},
        {"prompt": "one two three four", "truncate_prompt_tokens": 2, "max_tokens": 3},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_completions_through_a_second_server_are_identical(
    server, front, fields: dict[str, Any]
) -> None:
    body = {"model": server.model, "temperature": 0} | fields
    ours, theirs = (ask(url, COMPLETION, body) for url in (front.url, server.url))
    for made in (ours, theirs):
        made["usage"].pop("prompt_tokens_details")
    assert ours == theirs


def merged(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring chunks of text as one: a server that is late sends several tokens in one."""
    made: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        if "content" in delta and made and made[-1]["choices"][0]["delta"].keys() == delta.keys():
            made[-1]["choices"][0]["delta"]["content"] += delta["content"]
        else:
            made.append(chunk)
    return made


def test_streamed_chunks_through_a_second_server_are_identical(server, front) -> None:
    body = {"model": server.model, "messages": QUESTION, "max_tokens": 8, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0}
    ours, theirs = (ask(url, CHAT, body) for url in (front.url, server.url))
    assert merged(ours[:-1]) == merged(theirs[:-1])
    assert ours[-1]["usage"]["completion_tokens"] == theirs[-1]["usage"]["completion_tokens"]


def test_embeddings_and_tokenization_through_a_second_server_are_identical(server, front) -> None:
    body = {"model": server.model, "input": ["red", "blue"]}
    ours, theirs = (ask(url, "/v1/embeddings", body) for url in (front.url, server.url))
    for mine, other in zip(ours["data"], theirs["data"], strict=True):
        assert mine["embedding"] == pytest.approx(other["embedding"], rel=1e-5, abs=1e-7)
    for body in ({"prompt": "red"}, {"messages": QUESTION}):
        made = [httpx.post(f"{u}/tokenize", json=body).json() for u in (front.url, server.url)]
        assert made[0] == made[1]


def test_error_messages_pass_through_a_second_server_unchanged(server, front) -> None:
    for fields in (
        {"guided_regex": "("},
        {"messages": [{"role": "user", "content": "long " * 9_000}]},
        {"logit_bias": {"999999": 1}},
    ):
        body = {"model": server.model, "messages": QUESTION} | fields
        made = [httpx.post(url + CHAT, json=body) for url in (front.url, server.url)]
        assert made[0].status_code == 400 and made[0].json() == made[1].json()


def test_a_client_disconnect_aborts_the_request_on_both_servers(server, front) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=server.model, messages=QUESTION, max_tokens=2000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    wait_until(lambda: server.metric("vllm:num_requests_running") == 1)
    stream.close()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_all_conformance_rules_hold_through_a_second_server(front) -> None:
    async with new_client(front.url, None, timeout_s=120) as client:
        results = await run_rules(await find_target(client, None), GROUPS)
    assert not {r.rule.id: r.detail for r in results if r.outcome in ("fail", "advice")}
