"""The device's sampling beside the sampler that it stands for, on whole steps of mixed rows."""

import numpy as np
import pytest
import torch

from engine.backends.custom.frameworks.torch.execution.history import TokenHistory
from engine.backends.custom.frameworks.torch.execution.random import gumbel, row_keys, token_words
from engine.backends.custom.frameworks.torch.execution.sampler import sample
from engine.backends.custom.frameworks.torch.kernels.base import TINY
from engine.backends.custom.frameworks.torch.kernels.sampling import add_bias_, draw, penalize
from engine.backends.custom.runtime.seam import SamplingInputs

ROWS, VOCABULARY, MAX_LENGTH = 12, TINY.vocab_size, 40


def step(rng: np.random.Generator, greedy: bool) -> SamplingInputs:
    def some(values: np.ndarray, off: float) -> np.ndarray:
        return np.where(rng.random(ROWS) < 0.5, values, off).astype(np.float32)

    lengths = rng.integers(2, MAX_LENGTH, ROWS)
    biases = 9
    return SamplingInputs(
        sample_rows=np.arange(ROWS, dtype=np.int32),
        slots=rng.permutation(ROWS).astype(np.int32),
        temperature=np.zeros(ROWS, np.float32) if greedy else some(rng.uniform(0.3, 2, ROWS), 0),
        top_k=some(rng.integers(1, 50, ROWS), 0).astype(np.int32),
        top_p=some(rng.uniform(0.1, 1, ROWS), 1),
        min_p=some(rng.uniform(0, 0.2, ROWS), 0),
        repetition=some(rng.uniform(0.8, 1.5, ROWS), 1),
        presence=some(rng.uniform(-1, 1, ROWS), 0),
        frequency=some(rng.uniform(-1, 1, ROWS), 0),
        bias_rows=rng.integers(0, ROWS, biases, dtype=np.int32),
        bias_ids=rng.integers(0, VOCABULARY, biases, dtype=np.int32),
        bias_values=rng.normal(0, 5, biases).astype(np.float32),
        seed=rng.integers(0, 2**62, ROWS),
        choice=np.zeros(ROWS, np.int32),
        position=lengths.astype(np.int32),
        mask=rng.integers(0, 2**32, (ROWS, -(-VOCABULARY // 32)), dtype=np.uint32),
        forced=np.full(ROWS, -1, np.int32),
        hidden_rows=np.zeros(0, np.int32),
        num_logprobs=np.full(ROWS, -1, np.int32),
        history_slots=np.zeros(0, np.int32),
        history_start=np.zeros(1, np.int32),
        history_tokens=np.zeros(0, np.int32),
        history_num_prompt=np.zeros(0, np.int32),
    )


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_gives_the_samplers_tokens(seed: int, greedy: bool, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    sampling = step(rng, greedy)
    tokens = rng.integers(0, VOCABULARY, (ROWS, MAX_LENGTH + 1))
    num_prompt = rng.integers(0, MAX_LENGTH // 2, ROWS)
    logits = torch.from_numpy(rng.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)).to(device)
    words = torch.from_numpy(token_words(VOCABULARY)).to(device)
    before = logits.clone()

    history = TokenHistory(ROWS, MAX_LENGTH, device)
    history._tokens.copy_(torch.from_numpy(tokens))
    history._num_prompt[:] = num_prompt
    expected = sample(logits, sampling, history, words).tokens

    def put(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    counts = torch.zeros(logits.shape, dtype=torch.int32, device=device)
    slots = put(sampling.slots.astype(np.int64))
    adjusted = penalize(
        logits,
        put(tokens),
        slots,
        put(sampling.position),
        put(num_prompt[sampling.slots]),
        put(sampling.repetition),
        put(sampling.presence),
        put(sampling.frequency),
        counts,
    )
    add_bias_(
        adjusted,
        put(sampling.bias_rows.astype(np.int64)),
        put(sampling.bias_ids.astype(np.int64)),
        put(sampling.bias_values),
    )
    assert sampling.mask is not None
    actual = draw(
        adjusted,
        put(sampling.temperature),
        put(sampling.top_k),
        put(sampling.top_p),
        put(sampling.min_p),
        put(row_keys(sampling.seed, sampling.choice, sampling.position)),
        words,
        put(sampling.mask.view(np.int32)),
    )
    assert torch.equal(actual, expected)
    assert torch.equal(logits, before)
    assert not counts.any()


def test_noise_is_the_samplers_for_every_token_word(device: torch.device) -> None:
    """Flat logits make the draw the noise's own maximum, of a large vocabulary."""
    size, rows = 20000, 4
    rng = np.random.default_rng(0)
    seeds, choices = rng.integers(0, 2**62, rows), np.arange(rows, dtype=np.int32)
    keys = torch.from_numpy(row_keys(seeds, choices, np.zeros(rows, np.int32))).to(device)
    words = torch.from_numpy(token_words(size)).to(device)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    drawn = draw(torch.zeros(rows, size, device=device), ones, none, ones, zeros, keys, words)
    assert torch.equal(drawn, gumbel(keys, words).argmax(dim=-1))
