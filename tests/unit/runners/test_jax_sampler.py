"""The JAX sampler beside PyTorch's, which is tested against an oracle: the same tokens from the
same logits, whatever is asked for.
"""

from functools import partial

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.jax.execution import sampler as jax_sampler
from engine.jax.execution.sampler import IN_PROMPT, PER_OUTPUT
from engine.jax.execution.sampling_traits import (
    Traits,
    packed_settings,
    settings_layout,
    traits_of,
)
from engine.runners.settings import settings_views
from engine.runtime.model_runner import SamplingInputs
from engine.runtime.outputs import Sampled
from engine.runtime.samplers.host_sampler import token_words
from engine.torch.execution import sampler as torch_sampler
from engine.torch.execution.history import TokenHistory
from tests.parity.runner_driver import sampling_inputs

pytestmark = pytest.mark.seconds  # JAX compiles

VOCAB = 67  # no multiple of 32 or of a vector register
ROWS = 5
WORDS = token_words(VOCAB)


@partial(jax.jit, static_argnums=1)
def run_jax(packed, traits: Traits, logits, counts, mask) -> Sampled:
    given = settings_views(settings_layout(traits, ROWS), packed, np.float32)
    return jax_sampler.sample(logits, given, traits, WORDS, counts, mask)


def padded(array: np.ndarray, rows: int) -> np.ndarray:
    return np.concatenate((array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)))


def compare(sampling: SamplingInputs, logits: np.ndarray, prompt: list[int]) -> None:
    history = TokenHistory(ROWS, 64, torch.device("cpu"))
    history.begin(sampling)
    expected = torch_sampler.sample(
        torch.from_numpy(logits), sampling, history, torch.from_numpy(WORDS)
    )
    traits = traits_of(sampling, VOCAB)
    counts = np.zeros((traits.num_rows, VOCAB), np.int32)
    for row, (first, last) in enumerate(
        zip(sampling.history_start[:-1], sampling.history_start[1:], strict=True)
    ):
        tokens = sampling.history_tokens[first:last]
        counts[row] = 2 * np.bincount(tokens[len(prompt) :], minlength=VOCAB)
        counts[row, tokens[: len(prompt)]] += 1
    found = run_jax(
        packed_settings(sampling, traits, ROWS),
        traits,
        padded(logits, traits.num_rows),
        counts,
        padded(sampling.mask, traits.num_rows),
    )
    np.testing.assert_array_equal(found.tokens[:ROWS], expected.tokens.numpy())
    np.testing.assert_allclose(found.logprobs[:ROWS], expected.logprobs.numpy(), atol=1e-5)
    count = expected.top_ids.shape[1]
    np.testing.assert_array_equal(found.top_ids[:ROWS, :count], expected.top_ids.numpy())


def each(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, min_size=ROWS, max_size=ROWS)


@settings(max_examples=60, deadline=None, derandomize=True)  # near-ties may go either way
@given(data=st.data())
def test_jax_sampler_draws_the_torch_samplers_tokens(data) -> None:
    """All stages at once, so that their order is part of it; one compiled program for all."""
    options = {
        "top_k": st.sampled_from([0, 1, 4, 50, VOCAB + 9]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition": st.sampled_from([1.0, 1.3, 0.8]),
        "presence": st.sampled_from([0.0, 0.7, -0.5]),
        "frequency": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
    }
    drawn = {name: data.draw(each(strategy)) for name, strategy in options.items()}
    drawn["temperature"] = [1.0, *data.draw(each(st.sampled_from([0.0, 0.5, 2.0])))[1:]]
    drawn["forced"] = [-1, *data.draw(each(st.sampled_from([-1, -1, 3])))[1:]]
    drawn["num_logprobs"] = [3, *data.draw(each(st.sampled_from([-1, 0, 2])))[1:]]
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = (rng.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)
    logits[:, :8] += 3  # the tokens of outputs, some of them there twice: penalties decide
    allowed = rng.random((ROWS, 96)) < 0.8
    allowed[:, :8] = True
    mask = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    prompt = rng.integers(0, VOCAB, 6).tolist()
    histories = [prompt + rng.integers(0, 8, 4).tolist() for _ in range(ROWS)]
    # The history of a row is as long as its position.
    drawn |= {
        "repetition": [1.2, *drawn["repetition"][1:]],  # some row has penalties
        "top_p": [0.95, *drawn["top_p"][1:]],
        "history_slots": range(ROWS),
        "history_start": range(0, 10 * ROWS + 1, 10),
        "history_tokens": np.concatenate(histories),
        "history_num_prompt": [len(prompt)] * ROWS,
        "bias_rows": [0, 2, 2],
        "bias_ids": [5, 66, 7],
        "bias_values": [3.0, -np.inf, 1.5],
    }
    sampling = sampling_inputs(range(ROWS), range(ROWS), [10] * ROWS, mask=mask, **drawn)
    compare(sampling, logits, prompt)


def test_penalties_match_a_hand_computed_example() -> None:
    """A prompt's token, one drawn once, one drawn three times and in the prompt, and none."""
    logits = np.array([[2.0, 2.0, -2.0, 2.0]], np.float32)
    counts = np.array([[IN_PROMPT, PER_OUTPUT, 3 * PER_OUTPUT + IN_PROMPT, 0]], np.int32)
    given = {"repetition": 2.0, "frequency": 0.25, "presence": 0.5}
    settings = {name: np.array([value], np.float32) for name, value in given.items()}
    found = jax_sampler.penalize(logits, counts, settings)
    expected = [[1.0, 1.0 - 0.25 - 0.5, -4.0 - 0.75 - 0.5, 2.0]]
    np.testing.assert_allclose(found, expected)
