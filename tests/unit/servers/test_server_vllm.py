"""vLLM's endpoints and parameters, over a fake or toy backend."""

import asyncio
import json
import math
from typing import Any

import httpx
import pytest

from engine import __version__
from engine.core.interfaces.backend import TokenizerInfo
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import make_settings
from tests.support.toy_engine import llm as toy_llm
from tests.support.toy_engine.llm import EOS
from tests.support.toy_engine.runner import VOCAB

MESSAGES = [{"role": "user", "content": "abc"}]


class ToyBackend(toy_llm.ToyBackend):
    async def tokenizer_info(self, *, model: str = "") -> TokenizerInfo:
        return TokenizerInfo(
            vocab_size=VOCAB,
            bos_token=None,
            bos_token_id=None,
            eos_token=chr(ord("a") + EOS),
            eos_token_id=EOS,
            chat_template=None,
            special_tokens={},
        )


def client_of(backend: Any, **settings: Any) -> httpx.AsyncClient:
    app = create_app(make_settings(server=settings), backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def toy():
    backend = ToyBackend()
    await backend.start()
    yield backend
    await backend.stop()


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_prompt_logprobs_equal_those_of_an_echo(toy) -> None:
    async with client_of(toy) as client:
        asked = {"prompt": "abcd", "max_tokens": 2, "seed": 1, "logprobs": 3}
        echoed = await post(client, "/v1/completions", echo=True, prompt_logprobs=2, **asked)
        (choice,) = echoed["choices"]
        first, *told = choice["prompt_logprobs"]
        assert first is None and len(told) == 3
        for each, logprob in zip(told, choice["logprobs"]["token_logprobs"][1:4], strict=True):
            of_token = next(iter(each.values()))
            assert of_token["logprob"] == logprob and 2 <= len(each) <= 3
        plain = await post(client, "/v1/completions", prompt_logprobs=2, **asked)
        assert plain["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert choice["text"] == "abcd" + plain["choices"][0]["text"]
        assert len(plain["choices"][0]["logprobs"]["tokens"]) == 2
        none = await post(client, "/v1/completions", **asked)
        assert none["choices"][0]["prompt_logprobs"] is None


async def test_a_chat_returns_prompt_logprobs_and_token_ids(toy) -> None:
    async with client_of(toy) as client:
        asked = {"messages": MESSAGES, "max_tokens": 3, "return_token_ids": True}
        told = await post(client, "/v1/chat/completions", prompt_logprobs=0, **asked)
        assert len(told["prompt_logprobs"]) == len(told["prompt_token_ids"]) == 3
        ids = [None if each is None else int(*each) for each in told["prompt_logprobs"]]
        assert ids[1:] == told["prompt_token_ids"][1:]
        assert len(told["choices"][0]["token_ids"]) == told["usage"]["completion_tokens"]
        refused = await client.post(
            "/v1/chat/completions", json=asked | {"prompt_logprobs": 0, "stream": True}
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


async def test_max_logprobs_bounds_the_alternatives(toy) -> None:
    path = "/v1/completions"
    async with client_of(toy) as client:
        for fields in ({"logprobs": 21}, {"logprobs": -1}, {"prompt_logprobs": -1}):
            refused = await client.post(path, json={"prompt": "ab"} | fields)
            assert refused.status_code == 400 and "max_logprobs" in refused.text, fields
    async with client_of(toy, max_logprobs=-1) as client:
        whole = await post(client, path, prompt="ab", max_tokens=1, logprobs=-1)
        (top,) = whole["choices"][0]["logprobs"]["top_logprobs"]
        info = await toy.tokenizer_info()
        assert len(top) == info.vocab_size
        assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-4)


async def test_return_tokens_as_token_ids_names_tokens_by_id(toy) -> None:
    async with client_of(toy) as client:
        asked = {"prompt": "abcd", "max_tokens": 3, "logprobs": 2, "return_token_ids": True}
        asked |= {"return_tokens_as_token_ids": True, "seed": 3, "ignore_eos": True}
        whole = await post(client, "/v1/completions", **asked)
        (choice,) = whole["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert choice["prompt_token_ids"] == [0, 1, 2, 3]
        streamed = await client.post("/v1/completions", json=asked | {"stream": True})
        parts = [each["choices"][0] for each in chunks(streamed)]
        assert sum((part["token_ids"] for part in parts), []) == choice["token_ids"]
        assert (
            sum((part["logprobs"]["tokens"] for part in parts), []) == choice["logprobs"]["tokens"]
        )
        assert [part.get("prompt_token_ids") for part in parts[:2]] == [[0, 1, 2, 3], None]
        assert [part["finish_reason"] for part in parts] == [None, None, "length"]


async def test_a_chat_stream_has_ids_and_one_last_chunk(toy) -> None:
    async with client_of(toy) as client:
        asked = {"messages": MESSAGES, "max_tokens": 4, "seed": 1, "return_token_ids": True}
        whole = await post(client, "/v1/chat/completions", **asked)
        streamed = await client.post("/v1/chat/completions", json=asked | {"stream": True})
        first, *parts = chunks(streamed)
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in part for part in parts)
        choices = [part["choices"][0] for part in parts]
        assert sum((each["token_ids"] for each in choices), []) == whole["choices"][0]["token_ids"]
        ends = [each["finish_reason"] for each in choices]
        assert ends == [None] * (len(ends) - 1) + [whole["choices"][0]["finish_reason"]]


async def test_echo_and_include_stop_str_in_output_work_for_chats() -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        last = {"role": "assistant", "content": "Well:"}
        asked = {"messages": [*MESSAGES, last], "echo": True}
        told = await post(client, "/v1/chat/completions", **asked)
        plain = await post(client, "/v1/chat/completions", messages=[*MESSAGES, last])
        content = plain["choices"][0]["message"]["content"]
        assert told["choices"][0]["message"]["content"] == "Well:" + content
        idle = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "echo": True})
        assert "echo" in idle.headers["x-engine-warnings"]


async def test_include_stop_str_in_output_keeps_the_stop_string(toy) -> None:
    async with client_of(toy) as client:
        asked = {"prompt": "abcd", "max_tokens": 12, "seed": 3, "ignore_eos": True}
        text = (await post(client, "/v1/completions", **asked))["choices"][0]["text"]
        stop = text[4:6]
        asked["stop"] = [stop]
        cut = (await post(client, "/v1/completions", **asked))["choices"][0]
        shown = await post(client, "/v1/completions", include_stop_str_in_output=True, **asked)
        assert shown["choices"][0]["text"] == cut["text"] + stop
        assert cut["stop_reason"] == stop


async def test_truncation_side_keeps_either_end_of_a_prompt(toy) -> None:
    async with client_of(toy) as client:
        for side, kept in (("left", [2, 3]), ("right", [0, 1]), (None, [2, 3])):
            told = await post(
                client,
                "/v1/completions",
                prompt=[0, 1, 2, 3],
                max_tokens=1,
                truncate_prompt_tokens=2,
                truncation_side=side,
                return_token_ids=True,
            )
            assert told["choices"][0]["prompt_token_ids"] == kept


async def test_documents_need_a_template_that_uses_them() -> None:
    async with client_of(FakeBackend()) as client:
        body = {"messages": MESSAGES, "documents": [{"title": "a", "text": "b"}]}
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "documents"


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop": ["x"]},
        {"logit_bias": {"1": 2}},
        {"guided_regex": "a"},
        {"truncate_prompt_tokens": 2},
        {"echo": True},
        {"prompt_logprobs": 1},
    ],
)
async def test_parameters_that_beam_search_lacks_are_refused(fields) -> None:
    async with client_of(FakeBackend()) as client:
        body = {"prompt": "ab", "use_beam_search": True} | fields
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == next(iter(fields))
        alone = await client.post("/v1/completions", json={"prompt": "a", "length_penalty": 2.0})
        assert alone.json()["error"]["param"] == "length_penalty"


async def test_beam_search_over_http(toy) -> None:
    async with client_of(toy) as client:
        asked = {
            "use_beam_search": True,
            "n": 2,
            "max_tokens": 3,
            "temperature": 0.5,
            "typical_p": 0.5,
        }
        whole = await client.post(
            "/v1/completions", json=asked | {"prompt": ["abc", "abc"], "best_of": 4}
        )
        warned = whole.headers["x-engine-warnings"]
        assert "temperature" in warned and "typical_p" in warned
        choices = whole.json()["choices"]
        texts = [choice["text"] for choice in choices]
        assert texts[:2] == texts[2:] and texts[0] != texts[1]
        chat = await post(client, "/v1/chat/completions", messages=MESSAGES, **asked)
        assert len(chat["choices"]) == 2 and chat["usage"]["completion_tokens"] <= 6
        context = await client.post(
            "/v1/completions", json={"prompt": "abc", "use_beam_search": True, "max_tokens": 254}
        )
        assert context.json()["error"]["code"] == "context_length_exceeded"


async def test_version_load_ping_and_is_sleeping_answer() -> None:
    async with client_of(FakeBackend()) as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_vllm_routes_can_be_turned_off() -> None:
    async with client_of(FakeBackend(), dialects=()) as client:
        assert (await client.get("/version")).status_code == 404


async def test_root_path_is_not_part_of_routes() -> None:
    async with client_of(FakeBackend(), root_path="/llm", api_key="key") as client:
        for path in ("/v1/models", "/llm/v1/models"):
            assert (await client.get(path)).status_code == 401
            known = await client.get(path, headers={"authorization": "Bearer key"})
            assert known.status_code == 200
        headers = {"authorization": "Bearer key"}
        refused = await client.post("/llm/v1/messages", json={}, headers=headers)
        assert refused.json()["type"] == "error"  # Anthropic's form
        assert (await client.get("/llmv1/models", headers=headers)).status_code == 404


async def test_invocations_dispatch_by_their_body() -> None:
    async with client_of(FakeBackend()) as client:
        chat = await post(client, "/invocations", messages=MESSAGES)
        assert chat["object"] == "chat.completion"
        text = await post(client, "/invocations", prompt="a")
        assert text["object"] == "text_completion"
        streamed = await client.post("/invocations", json={"messages": MESSAGES, "stream": True})
        assert chunks(streamed)[0]["object"] == "chat.completion.chunk"
        wrong = await client.post("/invocations", json={"messages": MESSAGES, "n": 99})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "n"
        none = await client.post("/invocations", json={"x": 1})
        assert none.status_code == 400


async def test_pooling_returns_the_embedding(toy) -> None:
    async with client_of(toy) as client:
        pooled = await post(client, "/pooling", input=["ab", "c"])
        vectors = await post(client, "/v1/embeddings", input=["ab", "c"])
        assert [each["data"] for each in pooled["data"]] == [
            each["embedding"] for each in vectors["data"]
        ]
        refused = await client.post("/classify", json={"input": "a"})
        assert refused.status_code == 400 and "classes" in refused.text
        for path in ("/score", "/v1/score"):
            compared = await client.post(path, json={"text_1": "a", "text_2": "b"})
            assert compared.json()["error"]["param"] == "model"


async def test_a_batch_of_conversations_is_answered_in_one_request(toy) -> None:
    async with client_of(toy) as client:
        others = [{"role": "user", "content": "dcb"}]
        asked = {"max_tokens": 3, "seed": 5}
        both = await post(
            client, "/v1/chat/completions/batch", messages=[MESSAGES, others], **asked
        )
        alone = [
            await post(client, "/v1/chat/completions", messages=each, **asked)
            for each in (MESSAGES, others)
        ]
        assert [each["message"] for each in both["choices"]] == [
            each["choices"][0]["message"] for each in alone
        ]
        assert both["usage"]["prompt_tokens"] == sum(e["usage"]["prompt_tokens"] for e in alone)
        body = {"messages": [MESSAGES], "stream": True}
        refused = await client.post("/v1/chat/completions/batch", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


async def test_a_sleeping_server_unloads_its_model_and_refuses_requests() -> None:
    made: list[ToyBackend] = []

    def build() -> ToyBackend:
        made.append(ToyBackend())
        return made[-1]

    first = build()
    await first.start()
    app = create_app(make_settings(), first, Metrics(MODEL), rebuild=build)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        asked = {"prompt": "abc", "max_tokens": 3, "seed": 1}
        before = await post(client, "/v1/completions", **asked)
        slept = await client.post("/sleep?level=1")
        assert slept.json() == {"is_sleeping": True}
        assert not first.health().ready
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.post("/v1/completions", json=asked)).status_code == 503
        assert (await client.post("/wake_up?tags=weights")).status_code == 400
        assert (await client.post("/wake_up")).json() == {"is_sleeping": False}
        assert len(made) == 2
        after = await post(client, "/v1/completions", **asked)
        assert after["choices"] == before["choices"]
        assert (await client.post("/reset_prefix_cache")).status_code == 200
    await asyncio.gather(*(each.stop() for each in made))


async def test_vllm_admin_routes_need_the_admin_key() -> None:
    backend = FakeBackend()
    async with client_of(backend, api_key="user", admin_key="root") as client:
        for path in ("/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile"):
            refused = await client.post(path, headers={"authorization": "Bearer user"})
            assert refused.status_code == 403, path
