"""Prompts with nothing in them, and ids that are no tokens: an answer or a 4xx, and the engine
lives (SEC-01, SEC-07; T2).
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.served import ServedEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARY = 49152  # of the default model


class Asker:
    def __init__(self, server: ServedEngine, client: httpx.Client) -> None:
        self.server = server
        self.pid = server.engine_pid()
        self._model = server.model
        self._client = client

    def post(self, path: str, **fields: Any) -> httpx.Response:
        body = {"model": self._model, "max_tokens": 2} | fields
        return self._client.post(path, json=body)


@pytest.fixture(scope="module")
def asker(server: ServedEngine) -> Iterator[Asker]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield Asker(server, client)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("stream", [False, True])
def test_empty_prompts_and_messages_are_answered_or_a_400(asker: Asker, stream: bool) -> None:
    prompts: list[Any] = [
        "",
        " \n\t",
        [],
        [[]],
        [""],
        ["", "x"],
        "<|im_start|><|im_end|>",
        [0],
        [2],
    ]
    for prompt in prompts:
        reply = asker.post(COMPLETIONS, prompt=prompt, stream=stream)
        assert reply.status_code in (200, 400), (prompt, reply.text)
    conversations: list[Any] = [[], user(""), user(" "), user([]), user("<|endoftext|>"), [{}]]
    for messages in conversations:
        reply = asker.post(CHAT, messages=messages, stream=stream)
        assert reply.status_code in (200, 400), (messages, reply.text)
    cut = asker.post(COMPLETIONS, prompt="a b c", truncate_prompt_tokens=0, stream=stream)
    assert cut.status_code in (200, 400)
    for path, fields in (
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/responses", {"input": "", "store": False}),
        ("/v1/responses", {"input": [], "store": False}),
        ("/v1/messages", {"messages": []}),
        ("/v1/messages", {"messages": user("")}),
        ("/tokenize", {"prompt": ""}),
        ("/detokenize", {"tokens": []}),
    ):
        assert asker.post(path, **fields).status_code in (200, 400), (path, fields)
    assert asker.server.engine_pid() == asker.pid and asker.server.blocks_in_use() == 0


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31, 2**63, -(2**31)])
def test_ids_beyond_the_vocabulary_are_refused(asker: Asker, bad: int) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": [1, bad]}),
        (COMPLETIONS, {"prompt": [[1], [2, bad]]}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(bad): 1}}),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [bad]}),
        (CHAT, {"messages": user("x"), "logit_bias": {str(bad): -100}}),
        (CHAT, {"messages": user("x"), "allowed_token_ids": [bad]}),
        (CHAT, {"messages": user("x"), "bad_words": [""]}),
        ("/v1/embeddings", {"input": [1, bad]}),
        ("/detokenize", {"tokens": [bad]}),
    ]
    for path, fields in wrong:
        reply = asker.post(path, **fields)
        assert reply.status_code == 400, (path, fields, reply.text)
        assert len(reply.content) < 2048
    streamed = asker.post(COMPLETIONS, prompt=[1, bad], stream=True)
    assert streamed.status_code == 400
    assert asker.server.engine_pid() == asker.pid
