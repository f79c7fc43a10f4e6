"""The GPU sampler against the reference sampler, on whole steps of mixed rows."""

import numpy as np
import pytest
import torch

from engine.runtime.model_runner import SamplingInputs
from engine.runtime.samplers.host_sampler import row_keys, token_words
from engine.torch.execution import device_sampler
from engine.torch.execution.history import TokenHistory
from engine.torch.execution.sampler import sample
from engine.torch.kernels.base import TINY
from engine.torch.kernels.sampling import RowSettings, gumbel, random_sample

ROWS, VOCABULARY, MAX_LENGTH = 12, TINY.vocab_size, 40


def step(rng: np.random.Generator, greedy: bool, unmasked: bool) -> SamplingInputs:
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
        mask=None
        if unmasked
        else rng.integers(0, 2**32, (ROWS, -(-VOCABULARY // 32)), dtype=np.uint32),
        forced=np.where(rng.random(ROWS) < 0.2, 3, -1).astype(np.int32),
        hidden_rows=np.zeros(0, np.int32),
        num_logprobs=np.full(ROWS, 2, np.int32),
    )


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "drawn"])
@pytest.mark.parametrize("seed", range(3))
def test_gpu_sampling_equals_the_reference_sampler(
    seed: int, greedy: bool, device: torch.device
) -> None:
    rng = np.random.default_rng(seed)
    sampling = step(rng, greedy, unmasked=seed == 0)
    tokens = rng.integers(0, VOCABULARY, (ROWS, MAX_LENGTH + 1))
    num_prompt = rng.integers(0, MAX_LENGTH // 2, ROWS)
    logits = torch.from_numpy(rng.normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)).to(device)
    words = torch.from_numpy(token_words(VOCABULARY)).to(device)
    before = logits.clone()

    history = TokenHistory(ROWS, MAX_LENGTH, device)
    history.tokens[:ROWS].copy_(torch.from_numpy(tokens))
    history._num_prompt[:] = num_prompt
    expected = sample(logits, sampling, history, words)

    actual = device_sampler.sample(logits, sampling, history, words)
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(actual.logprobs, expected.logprobs)
    assert torch.equal(logits, before)


def test_sampling_noise_equals_the_reference_for_every_token_of_the_vocabulary(
    device: torch.device,
) -> None:
    """Flat logits make the draw the noise's own maximum, of a large vocabulary."""
    size, rows = 20000, 4
    rng = np.random.default_rng(0)
    seeds, choices = rng.integers(0, 2**62, rows), np.arange(rows, dtype=np.int32)
    keys = torch.from_numpy(row_keys(seeds, choices, np.zeros(rows, np.int32))).to(device)
    words = torch.from_numpy(token_words(size)).to(device)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, device=device)
    none = torch.zeros(rows, dtype=torch.int32, device=device)
    logits, settings = torch.zeros(rows, size, device=device), (ones, none, ones, zeros, keys)
    sampled = random_sample(logits, RowSettings(*settings), words, None)
    assert torch.equal(sampled, gumbel(keys, words).argmax(dim=-1))


@pytest.mark.parametrize("setting", ["top-k", "top-p", "min-p"])
def test_no_token_below_a_top_k_top_p_or_min_p_threshold_is_drawn(
    setting: str, device: torch.device
) -> None:
    """So hot that what is kept is all but equally likely: one token too many would be drawn."""
    rows, size = 16, 60
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(0, 1, (rows, size)).astype(np.float32)).to(device)
    seeds, zeros = rng.integers(0, 2**62, rows), np.zeros(rows, np.int32)

    def setting_of(name: str, used: float, unused: float) -> torch.Tensor:
        return torch.full((rows,), used if setting == name else unused, device=device)

    settings = RowSettings(
        torch.full((rows,), 20.0, device=device),
        setting_of("top-k", 4, 0).int(),
        setting_of("top-p", 0.1, 1.0),
        setting_of("min-p", 0.95, 0.0),
        torch.from_numpy(row_keys(seeds, zeros, zeros)).to(device),
    )
    args = (logits, settings, torch.from_numpy(token_words(size)).to(device), None)
    sampled = random_sample(*args)
    assert torch.equal(sampled, random_sample.reference(*args))
    ranks = (logits > logits.gather(1, sampled[:, None])).sum(dim=1)
    assert ranks.float().mean() > 1, "the draw is not hot enough to tell"


@pytest.mark.parametrize("setting", ["top-k", "top-p"])
def test_top_k_and_top_p_thresholds_are_found_among_nearly_equal_logits(
    setting: str, device: torch.device
) -> None:
    """Logits a few units in the last place apart, or probabilities that a coarser search takes for
    equal: the floor is between two of them, and most of the tokens lie just below it.
    """
    rows, size = 6, 60
    rng = np.random.default_rng(2)
    ranks = np.stack([rng.permutation(size) for _ in range(rows)]).astype(np.float32)
    step = 2.0**-22 if setting == "top-k" else 4e-5
    logits = torch.from_numpy(np.float32(1) + ranks * np.float32(step)).to(device)
    seeds, zeros = rng.integers(0, 2**62, rows), np.zeros(rows, np.int32)
    settings = RowSettings(
        torch.ones(rows, device=device),
        torch.full((rows,), 3 if setting == "top-k" else 0, dtype=torch.int32, device=device),
        torch.full((rows,), 1.0 if setting == "top-k" else 0.07, device=device),
        torch.zeros(rows, device=device),
        torch.from_numpy(row_keys(seeds, zeros, zeros)).to(device),
    )
    args = (logits, settings, torch.from_numpy(token_words(size)).to(device), None)
    sampled = random_sample(*args)
    assert torch.equal(sampled, random_sample.reference(*args))
    kept = 3 if setting == "top-k" else 5
    assert (torch.from_numpy(ranks).to(device).gather(1, sampled[:, None]) >= size - kept).all()
