"""The Python API over the toy model: every number given acts, every number told is right."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import (
    Embeddings,
    FinishEvent,
    TextEvent,
    TextPair,
    UsageEvent,
)
from engine.library import openai_format
from engine.library.async_llm import AsyncLLM
from engine.library.openai_format import InferenceEngine
from engine.llm import LLM
from engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.support.toy_engine.llm import (
    encoded,
    expected,
    params,
    toy_llm,
    written,
)
from tests.support.toy_engine.runner import VOCAB, prompt_logits


@pytest.fixture(scope="module")
def asked() -> list[tuple[Any, bool]]:
    return []


@pytest.fixture(scope="module")
def llm(asked) -> Iterator[LLM]:
    with toy_llm(asked) as opened:
        yield opened


@pytest.fixture
def engine(llm: LLM, monkeypatch) -> InferenceEngine:
    monkeypatch.setattr(openai_format, "LLM", lambda model: llm)
    return InferenceEngine("toy")


def test_llm_runs_the_engine_in_process_with_the_given_settings(llm, asked):
    ((settings, in_process),) = asked
    assert in_process and settings.model.model_path == "toy"
    assert settings.performance.max_queued_requests == 5
    card = llm.card
    assert (card.max_model_len, card.num_params, card.num_dimensions) == (256, 123, VOCAB)


def test_outputs_are_in_the_order_of_their_prompts(llm):
    """More than the engine queues, of all lengths, as text and as ids."""
    texts = [written([index % 19, 1, 2]) for index in range(12)]
    prompts = [text if index % 2 else encoded(text) for index, text in enumerate(texts)]
    given = params(max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, given)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [expected(t, given) for t in texts]
    assert llm.generate([], given) == []


def test_outputs_keep_prompt_order_although_answers_end_at_different_times(llm):
    """The longer a prompt, the less room the context has behind it."""
    texts = [written([index % 19 for index in range(length)]) for length in (200, 230, 254)]
    outputs = llm.generate(texts, params(max_tokens=None, ignore_eos=True))
    assert [output.usage.prompt_tokens for output in outputs] == [200, 230, 254]
    assert [output.usage.completion_tokens for output in outputs] == [56, 26, 2]
    endless = params(max_tokens=10**6, ignore_eos=True)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(text, endless) for text in texts]


@pytest.mark.parametrize(("n", "most"), [(1, 5), (2, 2), (7, 1)])
def test_requests_in_flight_are_bounded_by_the_queue(llm, monkeypatch, n, most):
    backend, num_open, seen = llm.engine.backend, 0, []
    opened = backend.open

    async def watched(events):
        nonlocal num_open
        num_open += 1
        seen.append(num_open)
        async for event in events:
            yield event
        num_open -= 1

    async def watched_open(request):
        return watched(await opened(request))

    monkeypatch.setattr(backend, "open", watched_open)
    given = params(max_tokens=2, ignore_eos=True, n=min(n, 5))
    monkeypatch.setattr(llm.engine, "max_queued", most * given.n)
    llm.generate(["abc"] * 9, given)
    assert len(seen) == 9 and max(seen) <= most


def test_chat_takes_one_conversation_or_a_list_of_them(llm):
    one = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    given = params(ignore_eos=True)
    (output,) = llm.chat(one, given)
    assert list(output.outputs[0].token_ids) == expected("abc", given)
    both = llm.chat([one, [{"role": "user", "content": "d"}]], given)
    assert list(both[1].outputs[0].token_ids) == expected("d", given)
    assert [o.usage.prompt_tokens for o in both] == [3, 1]


def test_chat_takes_a_plain_string_as_one_user_message(llm):
    given = params(ignore_eos=True)
    parts = [{"type": "text", "text": "abc"}]
    for conversation in ("abc", [{"role": "user", "content": parts}]):
        (output,) = llm.chat(conversation, given)
        assert list(output.outputs[0].token_ids) == expected("abc", given)
    assert [o.usage.prompt_tokens for o in llm.chat(["ab", "c"], given)] == [2, 1]


def test_images_are_refused_by_a_text_only_model(llm, monkeypatch):
    url = {"url": "http://example.com/cat.png"}
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    with pytest.raises(InvalidRequestError, match="does not read images"):
        llm.chat(asked)
    card = msgspec.structs.replace(llm.card, capabilities=("chat", "images"))
    monkeypatch.setattr(llm.engine.backend, "models", lambda: [card])
    with pytest.raises(InvalidRequestError, match="data: URLs"):
        llm.chat(asked)


def test_embeddings_equal_the_models_and_have_unit_length(llm):
    found = llm.embed(["abc", [3, 4]])
    for output, prompt in zip(found, ("abc", "de"), strict=True):
        logits = prompt_logits(encoded(prompt))[-1].astype(np.float32)
        unit = logits / np.linalg.norm(logits)
        np.testing.assert_allclose(output.outputs.embedding, unit, rtol=1e-5)
    assert len(llm.embed("abc")) == len(llm.embed([1, 2])) == 1
    assert found[0].outputs.hidden_size == VOCAB
    assert llm.embed([]) == []


def test_score_needs_a_model_trained_to_compare_texts(llm, monkeypatch):
    with pytest.raises(InvalidRequestError, match="not trained to compare"):
        llm.score("ab", "cd")
    card = msgspec.structs.replace(llm.card, capabilities=("embeddings", "score"))
    monkeypatch.setattr(llm.engine.backend, "models", lambda: [card])
    one, two, three = (each.outputs.vector for each in llm.embed(["ab", "cd", "efg"]))
    scores = [each.outputs.score for each in llm.score("ab", ["cd", "efg"])]
    assert scores == pytest.approx([one @ two, one @ three], abs=1e-5)
    scores = [each.outputs.score for each in llm.score(["ab", "cd"], ["efg", "efg"])]
    assert scores == pytest.approx([one @ three, two @ three], abs=1e-5)
    with pytest.raises(InvalidRequestError, match="data_1"):
        llm.score(["ab", "cd"], ["ab"])


def test_a_reranker_gets_both_texts_of_a_pair(llm, monkeypatch):
    asked = []

    async def embed(request):
        asked.append(request.inputs)
        return Embeddings(np.array([[0.25], [0.75]], np.float32), 4)

    card = msgspec.structs.replace(llm.card, capabilities=("rerank", "score"))
    monkeypatch.setattr(llm.engine.backend, "models", lambda: [card])
    monkeypatch.setattr(llm.engine.backend, "embed", embed)
    assert [each.outputs.score for each in llm.score("ab", ["cd", "ef"])] == [0.25, 0.75]
    llm.score(["ab", "gh"], ["cd", "ef"])
    pairs = [TextPair("ab", "cd"), TextPair("ab", "ef"), TextPair("gh", "ef")]
    assert asked == [(pairs[0], pairs[1]), (pairs[0], pairs[2])]
    with pytest.raises(InvalidRequestError, match="texts, not token ids"):
        llm.score("ab", [1, 2])


def test_each_prompt_can_have_its_own_parameters(llm):
    given = [params(max_tokens=2, ignore_eos=True), params(max_tokens=4, seed=9, ignore_eos=True)]
    outputs = llm.generate(["abc", "abc"], given)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected("abc", each) for each in given]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1"):
        llm.generate(["abc", "abc"], given[:1])


def test_use_tqdm_takes_any_progress_bar(llm):
    told: list[Any] = []

    def bar(total: int, desc: str) -> Any:
        told.append(total)
        return SimpleNamespace(update=told.append, close=lambda: told.append("closed"))

    llm.generate(["abc", "d"], params(max_tokens=1), use_tqdm=bar)
    assert told == [2, 1, 1, "closed"]


def test_prompts_may_be_vllms_prompt_dicts_or_arrays(llm):
    given = params(ignore_eos=True)
    for prompt in (
        {"prompt": "abc"},
        {"prompt_token_ids": np.array([0, 1, 2])},
        np.array([0, 1, 2]),
    ):
        (output,) = llm.generate(prompt, given)
        assert list(output.outputs[0].token_ids) == expected("abc", given)
    assert llm.generate("abc", given)[0].prompt == "abc"
    with pytest.raises(InvalidRequestError, match="multi_modal_data"):
        llm.generate({"prompt": "abc", "multi_modal_data": {}}, given)


def test_stop_takes_a_string_and_include_stop_str_in_output_shows_it(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    stop, cut = plain[4:6], plain[: plain.index(plain[4:6])]
    (output,) = llm.generate("abc", params(ignore_eos=True, stop=stop))
    assert (output.text, output.outputs[0].stop_reason) == (cut, stop)
    shown = params(ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert llm.generate("abc", shown)[0].text == cut + stop


def test_sampling_params_can_be_changed_and_cloned(llm):
    given = llm.get_default_sampling_params()
    given.max_tokens, given.seed, given.temperature, given.ignore_eos = 3, 3, 1.0, True
    kept = given.clone()
    kept.max_tokens = 1
    (output,) = llm.generate("abc", given)
    assert list(output.outputs[0].token_ids) == expected("abc", params(max_tokens=3))


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (RequestOutputKind.CUMULATIVE, lambda text: [text[: i + 1] for i in range(4)]),
        (RequestOutputKind.DELTA, lambda text: list(text)),
        (RequestOutputKind.FINAL_ONLY, lambda text: []),
    ],
)
async def test_an_async_stream_yields_cumulative_delta_or_final_outputs(llm, kind, texts):
    streaming = AsyncLLM.__new__(AsyncLLM)
    streaming.engine = llm.engine
    given = params(max_tokens=4, ignore_eos=True, output_kind=kind)
    text = written(expected("abc", given))
    *outputs, last = [each async for each in streaming.generate("abc", given, "mine")]
    assert [each.text for each in outputs if not each.outputs[0].finished()] == texts(text)
    assert not any(each.finished for each in outputs) and last.request_id == "mine"
    assert last.finished and last.outputs[0].finish_reason == "length"
    assert last.text == ("" if kind is RequestOutputKind.DELTA else text)
    (chatted,) = [each async for each in streaming.chat("abc", given) if each.finished]
    assert chatted.usage.completion_tokens == 4
    assert len(await streaming.embed(["abc", "d"])) == 2


async def test_leaving_an_async_stream_aborts_its_request(llm):
    streaming = AsyncLLM.__new__(AsyncLLM)
    streaming.engine = llm.engine
    outputs = streaming.generate("abc", params(max_tokens=200, ignore_eos=True))
    await anext(outputs)
    await outputs.aclose()
    while llm.engine.backend._link._requests:
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError):
        await anext(streaming.generate([10**6]))


def test_structured_output_constraints_become_one_grammar():
    made = StructuredOutputsParams(choice=("a", "b")).spec()
    assert (made.kind, made.source) == ("choice", '["a","b"]')
    assert StructuredOutputsParams(json={"type": "object"}).spec().kind == "json_schema"
    assert StructuredOutputsParams(json_object=True).spec().kind == "json_object"
    for wrong in ({}, {"regex": "a", "grammar": "b"}, {"json_object": False}):
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            StructuredOutputsParams(**wrong).spec()


def test_a_stream_yields_each_token_one_end_and_usage(llm):
    given = params(ignore_eos=True)
    *texts, finish, usage = llm.stream("abc", given)
    assert [token for event in texts for token in event.token_ids] == expected("abc", given)
    assert all(isinstance(event, TextEvent) and event.num_tokens == 1 for event in texts)
    assert finish == FinishEvent(0, "length")
    assert isinstance(usage, UsageEvent) and usage.completion_tokens == 12


def test_requests_have_unique_ids(llm, monkeypatch):
    ids = []
    submit = llm.engine.backend._link.submit
    monkeypatch.setattr(
        llm.engine.backend._link,
        "submit",
        lambda request, receiver: (ids.append(request.request_id), submit(request, receiver)),
    )
    llm.generate(["a", "b"], params(max_tokens=1))
    for _ in range(2):
        llm.embed("a")
    assert len(set(ids)) == 4


def test_chat_completion_dicts_have_the_same_tokens_and_usage(engine):
    messages = [{"role": "user", "content": "abc"}]
    given = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "ignore_eos": True, "n": 2}
    texts = [written(expected("abc", SamplingParams(**given), choice)) for choice in range(2)]
    whole = engine.chat_completion(messages, **given)
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    usage = {key: whole["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": 3, "completion_tokens": 12}
    assert whole["choices"][0]["logprobs"] is None
    *chunks, last = engine.chat_completion_stream(messages, **given)
    for index, text in enumerate(texts):
        deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(each["delta"].get("content", "") for each in deltas) == text
        assert [each["finish_reason"] for each in deltas if each["finish_reason"]] == ["length"]
    assert last["usage"]["completion_tokens"] == 12
    scored = engine.chat_completion(messages, **given, logprobs=0)
    assert len(scored["choices"][0]["logprobs"]["content"]) == 6
    assert engine.generate(["abc"], **given) == texts[:1]


def test_chat_completion_without_max_tokens_fills_the_context(engine):
    prompt = "a" * 200  # leaves room for more than the 16 tokens of `SamplingParams`
    (text,) = engine.generate([prompt], ignore_eos=True)
    messages = [{"role": "user", "content": prompt}]
    whole = engine.chat_completion(messages, ignore_eos=True)
    assert len(text) == whole["usage"]["completion_tokens"] == 256 - 200
