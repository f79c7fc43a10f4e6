"""Beam search over the toy model, against all continuations that there are."""

import itertools

import numpy as np
import pytest

from engine import BeamSearchParams
from engine.core.errors import InvalidRequestError
from engine.library import embedded
from engine.llm import LLM
from tests.support.toy_engine.llm import EOS, encoded, written
from tests.support.toy_engine.runner import VOCAB, prompt_logits
from tests.unit.servers.test_server_vllm import ToyBackend

PROMPT = "abcd"
WIDTH = 10  # a step sees twice as many tokens: all but the toy model's least likely ones


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedded, "build_backend", lambda settings, in_process: ToyBackend())
        with LLM("toy") as opened:
            yield opened


def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
    row = prompt_logits([*tokens, 0])[len(tokens) - 1].astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def all_of_two_steps(penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """Every continuation by at most two tokens, with its score, best first. The end token counts in
    the score, but not in the length.
    """
    prompt = tuple(encoded(PROMPT))
    first, found = logprobs(prompt), []
    found.append((first[EOS], ()))
    for token in range(VOCAB):
        if token == EOS:
            continue
        second = logprobs((*prompt, token))
        for other in range(VOCAB):
            tokens = (token,) if other == EOS else (token, other)
            found.append((first[token] + second[other], tokens))
    return sorted(
        ((total / (len(prompt) + len(tokens)) ** penalty, tokens) for total, tokens in found),
        reverse=True,
    )


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0, -2.0])
def test_beam_search_with_a_wide_beam_finds_the_best_sequences(llm, penalty):
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=2, length_penalty=penalty)
    (output,) = llm.beam_search([PROMPT], params)
    expected = all_of_two_steps(penalty)[:8]
    prompt = encoded(PROMPT)
    found = [tuple(each.tokens[len(prompt) :]) for each in output.sequences[:8]]
    assert found == [tokens for _, tokens in expected]
    scores = [each.cum_logprob / len(each.tokens) ** penalty for each in output.sequences[:8]]
    assert scores == pytest.approx([score for score, _ in expected], abs=1e-4)
    best = output.sequences[0]
    assert best.text == written(best.tokens) and best.tokens[: len(prompt)] == prompt
    ends = {each.finish_reason for each in output.sequences if len(each.tokens) < len(prompt) + 2}
    assert ends <= {"stop"}


def test_beam_width_1_is_greedy_and_can_ignore_eos(llm):
    params = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    (output,) = llm.beam_search(encoded(PROMPT), params)
    tokens = tuple(encoded(PROMPT))
    for _ in range(6):
        tokens += (int(np.argmax(logprobs(tokens))),)
    assert tuple(output.sequences[0].tokens) == tokens


def test_early_stopping_returns_finished_beams(llm):
    wide = BeamSearchParams(beam_width=WIDTH, max_tokens=3, early_stopping=True)
    (output,) = llm.beam_search([PROMPT], wide)
    assert {each.finish_reason for each in output.sequences} == {"stop"}
    for first, second in itertools.pairwise(output.sequences):
        a, b = (each.cum_logprob / len(each.tokens) for each in (first, second))
        assert a >= b


def test_a_beam_width_of_0_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="beam_width"):
        llm.beam_search([PROMPT], BeamSearchParams(beam_width=0, max_tokens=3))
