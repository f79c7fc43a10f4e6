"""The Python API over the toy model: every number given acts, every number told is right."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import llm as llm_module
from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import FinishEvent, TextEvent, UsageEvent
from engine.core.interfaces.request import SamplingParams
from engine.llm import LLM, InferenceEngine
from tests import toy_backend
from tests.toy_runner import VOCAB, generate_alone, prompt_logits

EOS = 21
MAX_SEQ_LEN = 256


def encoded(text: str) -> list[int]:
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
)
TEMPLATE = SimpleNamespace(
    options=(),
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
        patched.setattr(llm_module, "build_backend", build)
        with LLM("toy", settings={"performance.max_queued_requests": 5}) as opened:
            yield opened


@pytest.fixture
def engine(llm: LLM, monkeypatch) -> InferenceEngine:
    monkeypatch.setattr(llm_module, "LLM", lambda model, settings: llm)
    return InferenceEngine("toy")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 3} | changes)


def expected(prompt: str, given: SamplingParams, choice: int = 0) -> list[int]:
    stop = set(given.stop_token_ids) | (set() if given.ignore_eos else {EOS})
    return generate_alone(tuple(encoded(prompt)), given, choice, frozenset(stop), MAX_SEQ_LEN)[0]


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
    "seed": 4,
    "ignore_eos": True,
    "stop_token_ids": (13,),
}
TOLD = {"n", "stop", "logprobs", "score_prompt"}  # by tests of their own
# Fields that show only beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "min_tokens": {"stop_token_ids": tuple(range(0, 20, 2))},
    "ignore_eos": {"logit_bias": {EOS: 6.0}},
}


def test_every_field_is_tried():
    assert FIELDS.keys() | TOLD == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", FIELDS)
def test_each_sampling_parameter_acts(llm, name):
    beside = BESIDE.get(name, {})
    given, without = params(**beside | {name: FIELDS[name]}), params(**beside)
    (output,) = llm.generate("abc", given)
    found = list(output.choices[0].token_ids)
    assert found == expected("abc", given)
    assert found != expected("abc", without), "it would be the same without"
    assert output.usage.completion_tokens == len(found) and output.usage.prompt_tokens == 3


def test_without_parameters_the_context_is_filled(llm):
    (output,) = llm.generate([1] * 250)
    choice = output.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert len(choice.token_ids) == 6 or choice.token_ids[-1] == EOS
    (output,) = llm.generate([1] * 250, SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(output.choices[0].token_ids), output.choices[0].finish_reason) == (6, "length")


def test_choices_are_numbered_and_counted(llm):
    given = params(n=3, ignore_eos=True)
    (output,) = llm.generate("abc", given)
    found = [list(choice.token_ids) for choice in output.choices]
    assert found == [expected("abc", given, choice) for choice in range(3)]
    assert [choice.text for choice in output.choices] == list(map(written, found))
    assert output.text == output.choices[0].text
    assert output.usage.completion_tokens == 36


def test_a_stop_string_cuts_and_is_not_shown(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    stop = plain[4:6]
    (output,) = llm.generate("abc", params(ignore_eos=True, stop=(stop,)))
    assert output.text == plain[: plain.index(stop)]
    assert output.choices[0].finish_reason == "stop"


def test_logprobs_are_the_models_and_only_when_asked_for(llm):
    (output,) = llm.generate("abc", params(logprobs=2, temperature=0.0))
    choice = output.choices[0]
    logits = prompt_logits(encoded("abc") + list(choice.token_ids[:-1]))[2:]
    assert len(choice.logprobs) == len(choice.token_ids)
    for row, told, token in zip(logits, choice.logprobs, choice.token_ids, strict=True):
        scores = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.argsort(-scores, kind="stable")[:2]
        assert told.token == written([token])
        assert told.logprob == pytest.approx(scores[token], abs=1e-5)
        assert [each.token for each in told.top] == [written([token]) for token in best]
        assert [each.logprob for each in told.top] == pytest.approx(scores[best], abs=1e-5)
    assert llm.generate("abc", params())[0].choices[0].logprobs is None


def test_scores_of_a_prompt_are_refused_where_nobody_would_see_them(llm):
    with pytest.raises(InvalidRequestError, match="score_prompt"):
        llm.generate("abc", params(logprobs=0, score_prompt=True))


def test_answers_come_in_the_order_of_their_prompts(llm):
    """More than the engine queues, of all lengths, as text and as ids."""
    texts = [written([index % 19, 1, 2]) for index in range(12)]
    prompts = [text if index % 2 else encoded(text) for index, text in enumerate(texts)]
    given = params(max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, given)
    assert [list(o.choices[0].token_ids) for o in outputs] == [expected(t, given) for t in texts]
    assert llm.generate([], given) == []


def test_answers_that_end_sooner_do_not_come_sooner(llm):
    """The longer a prompt, the less room the context has behind it."""
    texts = [written([index % 19 for index in range(length)]) for length in (200, 230, 254)]
    outputs = llm.generate(texts, params(max_tokens=None, ignore_eos=True))
    assert [output.usage.prompt_tokens for output in outputs] == [200, 230, 254]
    assert [output.usage.completion_tokens for output in outputs] == [56, 26, 2]
    endless = params(max_tokens=10**6, ignore_eos=True)
    found = [list(output.choices[0].token_ids) for output in outputs]
    assert found == [expected(text, endless) for text in texts]


@pytest.mark.parametrize(("n", "most"), [(1, 5), (2, 2), (7, 1)])
def test_no_more_choices_are_asked_for_than_the_queue_takes(llm, monkeypatch, n, most):
    backend, num_open, seen = llm._backend, 0, []
    complete = backend.complete

    async def watched(events):
        nonlocal num_open
        num_open += 1
        seen.append(num_open)
        async for event in events:
            yield event
        num_open -= 1

    monkeypatch.setattr(backend, "complete", lambda request: watched(complete(request)))
    given = params(max_tokens=2, ignore_eos=True, n=min(n, 5))
    monkeypatch.setattr(llm, "_max_queued", most * given.n)
    llm.generate(["abc"] * 9, given)
    assert len(seen) == 9 and max(seen) <= most


def test_one_conversation_is_a_batch_of_one(llm):
    one = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
    given = params(ignore_eos=True)
    (output,) = llm.chat(one, given)
    assert list(output.choices[0].token_ids) == expected("abc", given)
    both = llm.chat([one, [{"role": "user", "content": "d"}]], given)
    assert list(both[1].choices[0].token_ids) == expected("d", given)
    assert [o.usage.prompt_tokens for o in both] == [3, 1]


def test_vectors_are_the_models_and_of_unit_length(llm):
    found = llm.embed(["abc", [3, 4]])
    for row, prompt in zip(found, ("abc", "de"), strict=True):
        logits = prompt_logits(encoded(prompt))[-1].astype(np.float32)
        np.testing.assert_allclose(row, logits / np.linalg.norm(logits), rtol=1e-5)
    assert llm.embed("abc").shape == llm.embed([1, 2]).shape == (1, VOCAB)
    assert llm.embed([]).shape == (0, VOCAB)


def test_a_stream_has_each_token_one_end_and_the_usage(llm):
    given = params(ignore_eos=True)
    *texts, finish, usage = llm.stream("abc", given)
    assert [token for event in texts for token in event.token_ids] == expected("abc", given)
    assert all(isinstance(event, TextEvent) and event.num_tokens == 1 for event in texts)
    assert finish == FinishEvent(0, "length")
    assert isinstance(usage, UsageEvent) and usage.completion_tokens == 12


def test_requests_have_ids_of_their_own(llm, monkeypatch):
    ids = []
    submit = llm._backend._link.submit
    monkeypatch.setattr(
        llm._backend._link,
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
        ("top_k", [0], [-1]),
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
        llm_module.check_params(SamplingParams(**{name: value}))
    for value in bad:
        with pytest.raises(InvalidRequestError, match=name):
            llm_module.check_params(SamplingParams(**{name: value}))
