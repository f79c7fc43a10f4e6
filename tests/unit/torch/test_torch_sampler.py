"""The torch sampler: every stage against a plain numpy oracle, and what a draw may depend on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.runtime.model_runner import SamplingInputs
from engine.runtime.samplers.host_sampler import row_keys, token_words
from engine.torch.execution import sampler
from engine.torch.execution.history import TokenHistory
from engine.torch.kernels.sampling import gumbel
from tests.parity.runner_driver import sampling_inputs

VOCAB = 67  # no multiple of 32 or of a vector register
CPU = torch.device("cpu")
WORDS = torch.from_numpy(token_words(VOCAB))


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def plan(rows: int, **changes: object) -> SamplingInputs:
    return sampling_inputs(range(rows), range(rows), [20 + row for row in range(rows)], **changes)


def run(logits: torch.Tensor, sampling: SamplingInputs) -> sampler.Sampled:
    history = TokenHistory(8, 64, CPU)
    history.begin(sampling)
    return sampler.sample(logits, sampling, history, WORDS)


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    exp = np.exp(x - x.max())
    return exp / exp.sum()


def oracle_kept(logits: torch.Tensor, temperature: float, k: int, p: float, m: float) -> set[int]:
    """Which tokens survive temperature, top-k, top-p and min-p, by sorting and walking."""
    scaled = logits.double().numpy() / temperature
    order = np.argsort(-scaled)
    kept = list(order[:k] if k else order)
    probs = softmax(scaled[kept])
    mass = 0.0
    for count, share in enumerate(probs, start=1):
        mass += share
        if p < 1 and mass >= p:
            kept = kept[:count]
            break
    best = probs[0]
    return {int(t) for t, share in zip(kept, probs, strict=False) if share >= m * best}


def surviving(logits: torch.Tensor, temperature: float, k: int, p: float, m: float) -> set[int]:
    """The same by the sampler's own filters."""
    scaled = (logits / temperature)[None]
    scaled = sampler.keep_top_k(scaled, np.array([k], np.int32))
    scaled = sampler.keep_likely(scaled, np.array([p], np.float32), np.array([m], np.float32))
    return set(torch.nonzero(scaled[0] > -torch.inf)[:, 0].tolist())


@settings(max_examples=80, deadline=None, derandomize=True)  # near-ties may go either way
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 3),
    k=st.sampled_from([0, 1, 2, 5, 40, VOCAB, VOCAB + 9]),
    p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    m=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
def test_top_k_top_p_and_min_p_keep_the_oracles_tokens(seed, temperature, k, p, m):
    logits = logits_of(1, seed)[0]
    assert surviving(logits, temperature, k, p, m) == oracle_kept(logits, temperature, k, p, m)


def test_top_k_top_p_and_min_p_keep_every_tie():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, -3.0])
    assert surviving(logits, 1.0, 2, 1.0, 0.0) == {0, 1, 2, 3}
    assert surviving(logits, 1.0, 0, 0.6, 0.0) == {0, 1, 2, 3}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    repetition=st.sampled_from([1.0, 1.5, 0.7]),
    presence=st.sampled_from([0.0, 0.8, -1.0]),
    frequency=st.sampled_from([0.0, 0.5, -0.3]),
)
def test_penalties_equal_the_oracle(seed, prompt, output, repetition, presence, frequency):
    tokens = prompt + output
    sampling = sampling_inputs(
        [0, 1],
        [5, 3],
        [9, len(tokens)],
        repetition=[1.0, repetition],
        presence=[0.0, presence],
        frequency=[0.0, frequency],
        history_slots=[3],
        history_start=[0, len(tokens)],
        history_tokens=tokens,
        history_num_prompt=[len(prompt)],
    )
    history = TokenHistory(8, 64, CPU)
    history.append(torch.tensor([3]), torch.tensor([40]), torch.tensor([1]))  # an earlier owner's
    history.begin(sampling)
    logits = logits_of(2, seed)
    expected = logits.clone().numpy()
    for token in set(tokens):
        value = expected[1, token]
        value = value / repetition if value > 0 else value * repetition
        count = output.count(token)
        expected[1, token] = value - frequency * count - presence * (count > 0)
    if not sampling.has_penalties:
        return
    got = sampler.penalize(logits, sampling, history)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_bias_mask_and_temperature_are_applied_in_this_order():
    """A mask beats any bias, and a bias counts before the temperature divides."""
    logits = torch.zeros(2, VOCAB)
    allowed = np.zeros((2, 3), np.uint32)
    allowed[:, 1] = 1 << 5 | 1 << 31  # tokens 37 and 63
    biased = {"bias_rows": [0, 1, 1], "bias_ids": [3, 37, 63], "bias_values": [1e6, 2.0, 1.0]}
    assert run(logits, plan(2, **biased)).tokens.tolist() == [3, 37]
    masked = run(logits, plan(2, mask=allowed, **biased)).tokens
    assert masked.tolist() == [37, 37]
    # Two logits apart by 1 at temperature 0.01 are apart by 100: never drawn the other way.
    seeds = {"seed": [1, 2], "temperature": [0.01, 0.01]}
    drawn = run(logits, plan(2, mask=allowed, **biased, **seeds)).tokens
    assert drawn[1] == 37


def test_masks_apply_to_the_highest_bit_and_the_last_token():
    mask = np.zeros((1, 3), np.uint32)
    mask[0, 0], mask[0, 2] = 1 << 31, 1 << 2
    masked = sampler.apply_mask(torch.zeros(1, VOCAB), mask)
    assert torch.nonzero(masked[0] == 0)[:, 0].tolist() == [31, 66]


def test_banned_tokens_are_never_drawn():
    logits = logits_of(1)
    best = int(logits.argmax())
    ban = {"bias_rows": [0], "bias_ids": [best], "bias_values": [-np.inf]}
    for seed in range(50):
        drawn = run(logits, plan(1, temperature=[5.0], seed=[seed], **ban)).tokens
        assert int(drawn) != best


def test_greedy_rows_of_a_mixed_batch_take_the_argmax():
    logits = logits_of(4)
    tokens = run(logits, plan(4, temperature=[0, 1.0, 0, 1.0], top_k=[3, 0, 1, 2])).tokens
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sampling_of_a_row_never_depends_on_the_other_rows(data):
    """Alone, or among rows that sort, mask, penalise and draw: the same token."""
    rows = 5
    options = {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 4, 50]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition": st.sampled_from([1.0, 1.3]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
        "num_logprobs": st.sampled_from([-1, 0, 4]),
    }
    drawn = {k: data.draw(st.lists(v, min_size=rows, max_size=rows)) for k, v in options.items()}
    logits = logits_of(rows, data.draw(st.integers(0, 99)))
    together = run(logits, plan(rows, **drawn)).tokens
    for row in range(rows):
        alone = sampling_inputs([0], [row], [20 + row], **{k: [v[row]] for k, v in drawn.items()})
        assert run(logits[row : row + 1], alone).tokens[0] == together[row]


def test_sampling_is_keyed_by_seed_choice_and_position():
    base = {"seed": [3], "choice": [1], "temperature": [1.0]}
    flat = torch.zeros(1, VOCAB)

    def token(position: int = 20, **changes: list) -> int:
        return int(run(flat, sampling_inputs([0], [0], [position], **base | changes)).tokens)

    assert token() == token()
    seeds = {token(seed=[s]) for s in range(200)}
    choices = {token(choice=[c]) for c in range(200)}
    positions = {token(position=p) for p in range(200)}
    for tokens in (seeds, choices, positions):
        assert len(tokens) > 55, "200 uniform draws of 67 tokens miss few"


def test_sampled_tokens_follow_the_distribution():
    """20,000 draws: each frequency within five standard deviations of its probability."""
    probs = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    count = 20_000
    keys = row_keys(np.full(count, 42), np.zeros(count), np.arange(count))
    noise = gumbel(torch.from_numpy(keys), torch.from_numpy(token_words(5)))
    tokens = (torch.from_numpy(np.log(probs)).float() + noise).argmax(-1)
    frequencies = np.bincount(tokens.numpy(), minlength=5) / count
    assert (np.abs(frequencies - probs) < 5 * np.sqrt(probs * (1 - probs) / count)).all()


def test_sampling_noise_equals_the_integer_oracle():
    """The words of another device, or of another framework, must come out the same."""
    keys = row_keys(np.array([7, -1]), np.array([0, 3]), np.array([5, 900]))
    words = token_words(VOCAB)
    bits = words.view(np.uint32) ^ keys.view(np.uint32)[:, :1]
    bits = bits * keys.view(np.uint32)[:, 1:]
    bits = (bits ^ (bits >> 15)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 16)) * np.uint32(0x846CA68B)
    uniform = (bits & 0x7FFFFFFF).astype(np.float64) / 2**31
    expected = -np.log(-np.log1p(-uniform))
    got = gumbel(torch.from_numpy(keys), torch.from_numpy(words)).numpy()
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_the_models_before_sampling_parameters(temperature):
    """Whatever penalties, bias and temperature did to the draw."""
    logits = logits_of(2)
    before = logits.clone()
    got = run(
        logits,
        plan(
            2,
            temperature=[temperature] * 2,
            num_logprobs=[3, -1],
            bias_rows=[0],
            bias_ids=[9],
            bias_values=[100.0],
        ),
    )
    assert got.tokens[0] == 9
    expected = torch.log_softmax(before, dim=-1)
    rows = torch.arange(2)
    torch.testing.assert_close(got.logprobs, expected[rows, got.tokens])
    torch.testing.assert_close(got.top_logprobs, expected.topk(3).values)
    assert got.top_ids.tolist() == expected.topk(3).indices.tolist()
    assert run(logits, plan(2)).logprobs is None
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
