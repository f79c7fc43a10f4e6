"""The Python API over the toy model: each sampling parameter acts, and logprobs are the model's."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces import request
from engine.llm import LLM
from engine.outputs import Logprob
from engine.sampling_params import (
    SamplingParams,
    wire_params,
)
from tests.support.toy_engine.llm import EOS, encoded, expected, params, toy_llm, written
from tests.support.toy_engine.runner import VOCAB, prompt_logits


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with toy_llm([]) as opened:
        yield opened


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


def test_every_sampling_parameter_is_tested():
    assert FIELDS.keys() | TOLD == set(request.SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", FIELDS)
def test_each_sampling_parameter_changes_the_output(llm, name):
    beside = BESIDE.get(name, {})
    given, without = params(**beside | {name: FIELDS[name]}), params(**beside)
    (output,) = llm.generate("abc", given)
    found = list(output.outputs[0].token_ids)
    assert found == expected("abc", given)
    assert found != expected("abc", without), "it would be the same without"
    assert output.usage.completion_tokens == len(found) and output.usage.prompt_tokens == 3


def test_without_max_tokens_the_context_is_filled(llm):
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


def test_a_stop_string_ends_the_text_and_is_not_shown(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    stop = plain[4:6]
    (output,) = llm.generate("abc", params(ignore_eos=True, stop=(stop,)))
    assert output.text == plain[: plain.index(stop)]
    assert output.outputs[0].finish_reason == "stop"


def test_stop_regex_ends_the_text_with_its_match(llm):
    plain = written(expected("abc", params(ignore_eos=True)))
    pattern = f"{plain[4]}[a-z]"
    (output,) = llm.generate("abc", params(ignore_eos=True, stop_regex=pattern))
    assert output.text == plain[: plain.index(plain[4]) + 2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", pattern)
    for wrong in ("a*", "^a", "(?=a)", "("):
        with pytest.raises(InvalidRequestError, match="stop_regex"):
            llm.generate("abc", params(stop_regex=wrong))


def test_logprobs_are_the_models_own_and_only_on_request(llm):
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


def test_prompt_logprobs_are_the_models_own(llm):
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


def test_logprob_token_ids_select_the_reported_tokens(llm):
    (output,) = llm.generate("abcd", params(max_tokens=3, logprobs=0, logprob_token_ids=[5, 2]))
    (all_tokens,) = llm.generate("abcd", params(max_tokens=3, logprobs=VOCAB))
    (choice,), (whole,) = output.outputs, all_tokens.outputs
    for token, found, every in zip(choice.token_ids, choice.logprobs, whole.logprobs, strict=True):
        assert found.keys() == {2, 5, token}
        assert all(each.logprob == every[i].logprob for i, each in found.items())


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
def test_sampling_parameters_are_accepted_and_refused_at_their_bounds(name, good, bad):
    for value in good:
        wire_params(SamplingParams(**{name: value}))
    for value in bad:
        with pytest.raises(InvalidRequestError, match=name):
            wire_params(SamplingParams(**{name: value}))
