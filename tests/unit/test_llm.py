"""The Python API over the toy model: every number given acts, every number told is right."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces import request
from engine.core.interfaces.backend import (
    Embeddings,
    FinishEvent,
    TextEvent,
    TextPair,
    UsageEvent,
)
from engine.library import embedded, openai_format
from engine.library.async_llm import AsyncLLM
from engine.library.openai_format import InferenceEngine
from engine.llm import LLM
from engine.outputs import Logprob
from engine.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    wire_params,
)
from tests import toy_backend
from tests.toy_runner import VOCAB, generate_alone, prompt_logits

EOS = 21
MAX_SEQ_LEN = 256


def encoded(text: str, parse_special: bool = False) -> list[int]:
    return [ord(char) - ord("a") for char in text]


def written(ids) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


TOKENIZER = SimpleNamespace(
    **vars(toy_backend.TOKENIZER) | {"eos_ids": (EOS,)},
    specials=None,
    chat_template="toy",
    encode_prompt=encoded,
    encode_rendered=encoded,
    decode=lambda ids, skip_special=True: written(ids),
    encode=lambda text: encoded(text.strip()),
    sequences_with=lambda text: (tuple(encoded(text)),) if text.isalpha() else (),
)
TEMPLATE = SimpleNamespace(
    options=(),
    mentions=lambda name: False,
    render=lambda messages, specials, add_generation_prompt, tools=(): "".join(
        message["content"] for message in messages
    ),
)
CHAT = replace(toy_backend.TEXT.chat, template=TEMPLATE)
CONFIG = SimpleNamespace(**vars(toy_backend.TEXT.config), num_params=123, max_position=MAX_SEQ_LEN)
TEXT = replace(toy_backend.TEXT, config=CONFIG, tokenizer=TOKENIZER, chat=CHAT)


class ToyBackend(toy_backend.ToyBackend):
    async def start(self) -> str:
        place = await super().start()
        self._text = TEXT
        return place


@pytest.fixture(scope="module")
def asked() -> list[tuple[Any, bool]]:
    return []


@pytest.fixture(scope="module")
def llm(asked) -> Iterator[LLM]:
    def build(settings, *, in_process: bool):
        asked.append((settings, in_process))
        return ToyBackend(max_queued=settings.performance.max_queued_requests)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedded, "build_backend", build)
        with LLM("toy", settings={"performance.max_queued_requests": 5}) as opened:
            yield opened


@pytest.fixture
def engine(llm: LLM, monkeypatch) -> InferenceEngine:
    monkeypatch.setattr(openai_format, "LLM", lambda model: llm)
    return InferenceEngine("toy")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 3} | changes)


def expected(prompt: str, given: SamplingParams, choice: int = 0) -> list[int]:
    given = wire_params(given)
    stop = set(given.stop_token_ids) | (set() if given.ignore_eos else {EOS})
    words = (
        tuple(tuple(encoded(word)) for word in words if word.isalpha())
        for words in (given.bad_words, given.dry_sequence_breakers)
    )
    ids = tuple(encoded(prompt))
    texts = {token: bias for text, bias in given.text_bias.items() for token in encoded(text)}
    given = msgspec.structs.replace(given, logit_bias=given.logit_bias | texts)
    return generate_alone(ids, given, choice, frozenset(stop), MAX_SEQ_LEN, None, *words)[0]


def test_the_engine_runs_in_this_process_with_the_settings_given(llm, asked):
    ((settings, in_process),) = asked
    assert in_process and settings.model.model_path == "toy"
    assert settings.performance.max_queued_requests == 5
    card = llm.card
    assert (card.max_model_len, card.num_params, card.num_dimensions) == (256, 123, VOCAB)


# Each changes what is drawn behind "abc", or tells more of it.
FIELDS: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 6,
    "temperature": 0.0,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "repetition_penalty": 3.0,
    "presence_penalty": 4.0,
    "frequency_penalty": 4.0,
    "logit_bias": {4: 100.0},
    "text_bias": {"ef": 50.0},
    "seed": 4,
    "ignore_eos": True,
    "stop_token_ids": (13,),
    "allowed_token_ids": (1, 2, 3),
    "bad_words": ("bc",),
    "repeat_last_n": 1,
    "dry_multiplier": 9.0,
    "dry_base": 20.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 2,
    "dry_sequence_breakers": ("b",),
    "top_n_sigma": 0.5,
    "typical_p": 0.2,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.5,
    "min_keep": 9,
    "dynatemp_range": 1.9,
    "dynatemp_exponent": 9.0,
    "mirostat": 2,
    "mirostat_tau": 0.1,
    "mirostat_eta": 5.0,
    "samplers": ("temperature", "top_p"),
}
TOLD = {
    "n",
    "stop",
    "stop_regex",
    "logprobs",
    "score_prompt",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "text_bias",
}  # by tests of their own
REPEATING = {"temperature": 0.3, "allowed_token_ids": (1, 2, 3)}
# Fields that show only beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"stop_token_ids": tuple(range(0, 20, 2))},
    "ignore_eos": {"logit_bias": {EOS: 6.0}},
    "bad_words": REPEATING,
    "dry_sequence_breakers": REPEATING | {"dry_multiplier": 9.0},
    "repeat_last_n": REPEATING | {"repetition_penalty": 3.0},
    "dry_multiplier": REPEATING,
    "dry_base": REPEATING | {"dry_multiplier": 1.0, "dry_allowed_length": 1},
    "dry_allowed_length": REPEATING | {"dry_multiplier": 9.0},
    "dry_penalty_last_n": REPEATING | {"dry_multiplier": 9.0},
    "xtc_threshold": {"xtc_probability": 1.0},
    "min_keep": {"top_p": 0.1},
    "dynatemp_exponent": {"dynatemp_range": 1.0},
    "mirostat_tau": {"mirostat": 2},
    "mirostat_eta": {"mirostat": 2, "mirostat_tau": 1.0},
    "samplers": {"top_p": 0.3, "min_keep": 2, "top_k": 1},
}


def test_every_field_is_tried():
    assert FIELDS.keys() | TOLD == set(request.SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", FIELDS)
def test_each_sampling_parameter_acts(llm, name):
    beside = BESIDE.get(name, {})
    given, without = params(**beside | {name: FIELDS[name]}), params(**beside)
    (output,) = llm.generate("abc", given)
    found = list(output.outputs[0].token_ids)
    assert found == expected("abc", given)
    assert found != expected("abc", without), "it would be the same without"
    assert output.usage.completion_tokens == len(found) and output.usage.prompt_tokens == 3


def test_without_parameters_the_context_is_filled(llm):
    (output,) = llm.generate([1] * 250)
    choice = output.outputs[0]
    assert choice.finish_reason in ("length", "stop")
    assert len(choice.token_ids) == 6 or choice.token_ids[-1] == EOS
    (output,) = llm.generate([1] * 250, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (6, "length")


def test_choices_are_numbered_and_counted(llm):
    given = params(n=3, ignore_eos=True)
    (output,) = llm.generate("abc", given)
    found = [list(choice.token_ids) for choice in output.outputs]
    assert found == [expected("abc", given, choice) for choice in range(3)]
    assert [choice.text for choice in output.outputs] == list(map(written, found))
    assert output.text == output.outputs[0].text
    assert output.usage.completion_tokens == 36


def test_a_stop_string_cuts_and_is_not_shown(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    stop = plain[4:6]
    (output,) = llm.generate("abc", params(ignore_eos=True, stop=(stop,)))
    assert output.text == plain[: plain.index(stop)]
    assert output.outputs[0].finish_reason == "stop"


def test_a_pattern_ends_the_text_with_its_match(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    pattern = f"{plain[4]}[a-z]"
    (output,) = llm.generate("abc", params(ignore_eos=True, stop_regex=pattern))
    assert output.text == plain[: plain.index(plain[4]) + 2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", pattern)
    for wrong in ("a*", "^a", "(?=a)", "("):
        with pytest.raises(InvalidRequestError, match="stop_regex"):
            llm.generate("abc", params(stop_regex=wrong))


def test_logprobs_are_the_models_and_only_when_asked_for(llm):
    (output,) = llm.generate("abc", params(logprobs=2, temperature=0.0))
    choice = output.outputs[0]
    logits = prompt_logits(encoded("abc") + list(choice.token_ids[:-1]))[2:]
    assert len(choice.logprobs) == len(choice.token_ids)
    for row, told, token in zip(logits, choice.logprobs, choice.token_ids, strict=True):
        scores = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = [int(each) for each in np.argsort(-scores, kind="stable")[:2]]
        assert list(told) == best and best[0] == token
        for rank, each in enumerate(best, 1):
            found = told[each]
            assert (found.rank, found.decoded_token) == (rank, written([each]))
            assert found.logprob == pytest.approx(scores[each], abs=1e-5)
    pairs = zip(choice.logprobs, choice.token_ids, strict=True)
    total = sum(told[token].logprob for told, token in pairs)
    assert choice.cumulative_logprob == pytest.approx(total)
    assert llm.generate("abc", params())[0].outputs[0].logprobs is None


def test_logprobs_of_a_prompt_are_the_models(llm):
    (output,) = llm.generate("abcd", params(prompt_logprobs=1, max_tokens=2, n=2))
    logits = prompt_logits(encoded("abcd"))
    first, *told = output.prompt_logprobs
    assert first is None and len(told) == 3 and output.prompt_token_ids == (0, 1, 2, 3)
    for row, token, found in zip(logits, (1, 2, 3), told, strict=False):
        scores = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = int(np.argmax(scores))
        assert set(found) == {token, best}
        assert found[token].logprob == pytest.approx(scores[token], abs=1e-5)
        assert found[best] == Logprob(pytest.approx(scores[best], abs=1e-5), 1, written([best]))
    assert output.outputs[0].logprobs is None, "only those of the prompt were requested"
    assert output.text == written(expected("abcd", params(max_tokens=2)))
    (chat,) = llm.chat("abcd", params(prompt_logprobs=1, max_tokens=1))
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)


def test_logprobs_of_named_tokens(llm):
    (output,) = llm.generate("abcd", params(max_tokens=3, logprobs=0, logprob_token_ids=[5, 2]))
    (all_tokens,) = llm.generate("abcd", params(max_tokens=3, logprobs=VOCAB))
    (choice,), (whole,) = output.outputs, all_tokens.outputs
    for token, found, every in zip(choice.token_ids, choice.logprobs, whole.logprobs, strict=True):
        assert found.keys() == {2, 5, token}
        assert all(each.logprob == every[i].logprob for i, each in found.items())


def test_answers_come_in_the_order_of_their_prompts(llm):
    """More than the engine queues, of all lengths, as text and as ids."""
    texts = [written([index % 19, 1, 2]) for index in range(12)]
    prompts = [text if index % 2 else encoded(text) for index, text in enumerate(texts)]
    given = params(max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, given)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [expected(t, given) for t in texts]
    assert llm.generate([], given) == []


def test_answers_that_end_sooner_do_not_come_sooner(llm):
    """The longer a prompt, the less room the context has behind it."""
    texts = [written([index % 19 for index in range(length)]) for length in (200, 230, 254)]
    outputs = llm.generate(texts, params(max_tokens=None, ignore_eos=True))
    assert [output.usage.prompt_tokens for output in outputs] == [200, 230, 254]
    assert [output.usage.completion_tokens for output in outputs] == [56, 26, 2]
    endless = params(max_tokens=10**6, ignore_eos=True)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected(text, endless) for text in texts]


@pytest.mark.parametrize(("n", "most"), [(1, 5), (2, 2), (7, 1)])
def test_no_more_choices_are_asked_for_than_the_queue_takes(llm, monkeypatch, n, most):
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


def test_one_conversation_is_a_batch_of_one(llm):
    one = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    given = params(ignore_eos=True)
    (output,) = llm.chat(one, given)
    assert list(output.outputs[0].token_ids) == expected("abc", given)
    both = llm.chat([one, [{"role": "user", "content": "d"}]], given)
    assert list(both[1].outputs[0].token_ids) == expected("d", given)
    assert [o.usage.prompt_tokens for o in both] == [3, 1]


def test_a_text_is_a_conversation_of_one_message(llm):
    given = params(ignore_eos=True)
    parts = [{"type": "text", "text": "abc"}]
    for conversation in ("abc", [{"role": "user", "content": parts}]):
        (output,) = llm.chat(conversation, given)
        assert list(output.outputs[0].token_ids) == expected("abc", given)
    assert [o.usage.prompt_tokens for o in llm.chat(["ab", "c"], given)] == [2, 1]


def test_images_are_refused_by_a_model_that_reads_none(llm, monkeypatch):
    url = {"url": "http://example.com/cat.png"}
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    with pytest.raises(InvalidRequestError, match="does not read images"):
        llm.chat(asked)
    card = msgspec.structs.replace(llm.card, capabilities=("chat", "images"))
    monkeypatch.setattr(llm.engine.backend, "models", lambda: [card])
    with pytest.raises(InvalidRequestError, match="data: URLs"):
        llm.chat(asked)


def test_vectors_are_the_models_and_of_unit_length(llm):
    found = llm.embed(["abc", [3, 4]])
    for output, prompt in zip(found, ("abc", "de"), strict=True):
        logits = prompt_logits(encoded(prompt))[-1].astype(np.float32)
        unit = logits / np.linalg.norm(logits)
        np.testing.assert_allclose(output.outputs.embedding, unit, rtol=1e-5)
    assert len(llm.embed("abc")) == len(llm.embed([1, 2])) == 1
    assert found[0].outputs.hidden_size == VOCAB
    assert llm.embed([]) == []


def test_texts_are_scored_in_pairs_by_models_that_compare(llm, monkeypatch):
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


def test_progress_is_told_to_any_bar(llm):
    told: list[Any] = []

    def bar(total: int, desc: str) -> Any:
        told.append(total)
        return SimpleNamespace(update=told.append, close=lambda: told.append("closed"))

    llm.generate(["abc", "d"], params(max_tokens=1), use_tqdm=bar)
    assert told == [2, 1, 1, "closed"]


def test_prompts_may_be_vllms_objects(llm):
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


def test_a_text_is_one_stop_string_and_can_be_shown(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    stop, cut = plain[4:6], plain[: plain.index(plain[4:6])]
    (output,) = llm.generate("abc", params(ignore_eos=True, stop=stop))
    assert (output.text, output.outputs[0].stop_reason) == (cut, stop)
    shown = params(ignore_eos=True, stop=[stop], include_stop_str_in_output=True)
    assert llm.generate("abc", shown)[0].text == cut + stop


def test_parameters_can_be_changed_and_act_as_they_are_then(llm):
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
async def test_an_async_stream_has_the_asked_kind_of_outputs(llm, kind, texts):
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


def test_constraints_are_made_into_one_grammar():
    made = StructuredOutputsParams(choice=("a", "b")).spec()
    assert (made.kind, made.source) == ("choice", '["a","b"]')
    assert StructuredOutputsParams(json={"type": "object"}).spec().kind == "json_schema"
    assert StructuredOutputsParams(json_object=True).spec().kind == "json_object"
    for wrong in ({}, {"regex": "a", "grammar": "b"}, {"json_object": False}):
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            StructuredOutputsParams(**wrong).spec()


def test_a_stream_has_each_token_one_end_and_the_usage(llm):
    given = params(ignore_eos=True)
    *texts, finish, usage = llm.stream("abc", given)
    assert [token for event in texts for token in event.token_ids] == expected("abc", given)
    assert all(isinstance(event, TextEvent) and event.num_tokens == 1 for event in texts)
    assert finish == FinishEvent(0, "length")
    assert isinstance(usage, UsageEvent) and usage.completion_tokens == 12


def test_requests_have_ids_of_their_own(llm, monkeypatch):
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


def test_openai_shapes_have_the_same_numbers(engine):
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


def test_openai_shapes_fill_the_context_unless_told(engine):
    prompt = "a" * 200  # leaves room for more than the 16 tokens of `SamplingParams`
    (text,) = engine.generate([prompt], ignore_eos=True)
    messages = [{"role": "user", "content": prompt}]
    whole = engine.chat_completion(messages, ignore_eos=True)
    assert len(text) == whole["usage"]["completion_tokens"] == 256 - 200


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", [1], [0]),
        ("max_tokens", [None, 1], [0]),
        ("min_tokens", [0], [-1]),
        ("temperature", [0.0, 1e6], [-0.1, math.inf, math.nan]),
        ("top_k", [0, -1], [-2]),
        ("top_p", [1e-9, 1.0], [0.0, 1.0001, math.nan]),
        ("min_p", [0.0, 1.0], [-0.0001, 1.0001, math.nan]),
        ("repetition_penalty", [1e-9, 9.0], [0.0, math.inf, math.nan]),
        ("presence_penalty", [-9.0, 9.0], [-math.inf, math.inf, math.nan]),
        ("frequency_penalty", [-9.0, 9.0], [-math.inf, math.inf, math.nan]),
        ("logit_bias", [{0: -math.inf}, {0: 9.0}], [{0: math.inf}, {0: 1.0, 1: math.nan}]),
        ("seed", [0, 2**63 - 1, None], [-1, 2**63]),
        ("logprobs", [0, None], [-1]),
    ],
)
def test_bounds_are_where_they_are_said_to_be(name, good, bad):
    for value in good:
        wire_params(SamplingParams(**{name: value}))
    for value in bad:
        with pytest.raises(InvalidRequestError, match=name):
            wire_params(SamplingParams(**{name: value}))
