"""The native sampler against the torch one: equal logits and parameters give equal tokens.

Noise agrees up to the last bits of a logarithm. So tokens may differ where two scores, or a token's
probability and a filter's threshold, agree to about one part in a million; such rows must be rare.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.runtime.model_runner import SAMPLE, SamplingInputs
from engine.runtime.samplers.host_sampler import token_words
from engine.torch.execution.history import TokenHistory
from engine.torch.execution.sampler import Sampled, sample
from tests.parity.runner_driver import sampling_inputs

INFINITY = float("inf")
MAX_LEN = 64
F32 = NDArray[np.float32]


def plan(rows: int, **changes: object) -> SamplingInputs:
    """Each row in its own slot, at its own position and with its own seed."""
    defaults = {"seed": range(rows)}
    positions = [1 + row % (MAX_LEN - 1) for row in range(rows)]
    return sampling_inputs(range(rows), range(rows), positions, **(defaults | changes))


class Both:
    """A native and a torch sampler that are given the same steps."""

    def __init__(self, native: ModuleType, isa: str, vocab: int, slots: int) -> None:
        self.native = native.Sampler(vocab, slots, MAX_LEN)
        self._isa = isa
        self._history = TokenHistory(slots, MAX_LEN, torch.device("cpu"))
        self._words = torch.from_numpy(token_words(vocab))

    def draw(self, logits: F32, sampling: SamplingInputs) -> tuple[np.ndarray, ...]:
        return self.native.sample(self._isa, logits, sampling)

    def expect(self, logits: F32, sampling: SamplingInputs) -> Sampled:
        self._history.begin(sampling)
        return sample(torch.from_numpy(logits), sampling, self._history, self._words)

    def remember(self, sampling: SamplingInputs, tokens: NDArray[np.int32]) -> None:
        """As the torch runner does after a step with penalties."""
        drawn = np.flatnonzero(sampling.forced == SAMPLE)
        columns = [sampling.slots[drawn], sampling.position[drawn], tokens[drawn]]
        self._history.append(*(torch.from_numpy(each.astype(np.int64)) for each in columns))


def random_logits(generator: np.random.Generator, rows: int, vocab: int) -> F32:
    """From nearly flat to nearly certain, like a model's."""
    spread = generator.choice([0.1, 1.0, 3.0, 10.0], (rows, 1))
    return (generator.standard_normal((rows, vocab)) * spread).astype(np.float32)


def random_plan(generator: np.random.Generator, rows: int, vocab: int) -> SamplingInputs:
    """Every parameter, alone and together."""

    def some(*values: float) -> Sequence[float]:
        return generator.choice(values, rows).tolist()

    biased = generator.integers(0, rows, rows)
    mask = generator.integers(0, 2**32, (rows, -(-vocab // 32)), np.uint64).astype(np.uint32)
    mask[generator.random(rows) < 0.7] = 0xFFFFFFFF
    return plan(
        rows,
        temperature=some(0, 0.3, 1, 1, 2.5),
        top_k=some(0, 0, 1, 7, 50, 3 * vocab),
        top_p=some(1, 1, 0.99, 0.9, 0.4, 1e-7),
        min_p=some(0, 0, 0.02, 0.4, 1),
        seed=generator.integers(-(2**63), 2**63, rows),
        choice=generator.integers(0, 4, rows),
        bias_rows=biased,
        bias_ids=generator.integers(0, vocab, rows),
        bias_values=generator.choice([-INFINITY, 4.0, -2.5], rows),
        num_logprobs=some(-1, 0, min(5, vocab)),
        mask=mask,
    )


@pytest.mark.parametrize(("vocab", "rows"), [(1, 40), (67, 2000), (1031, 1500), (20011, 150)])
def test_tokens_and_logprobs_equal_those_of_torch(native, isa, vocab, rows):
    generator = np.random.default_rng(vocab)
    logits = random_logits(generator, rows, vocab)
    sampling = random_plan(generator, rows, vocab)
    both = Both(native, isa, vocab, rows)
    tokens, logprobs, top_ids, top_logprobs = both.draw(logits, sampling)
    expected = both.expect(logits, sampling)
    differ = np.flatnonzero(tokens != expected.tokens.numpy())
    assert len(differ) <= max(1, rows // 1000), differ
    told = np.setdiff1d(np.flatnonzero(sampling.num_logprobs >= 0), differ)
    np.testing.assert_allclose(logprobs[told], expected.logprobs.numpy()[told], atol=1e-4)
    told = np.flatnonzero(sampling.num_logprobs > 0)
    np.testing.assert_allclose(top_logprobs[told], expected.top_logprobs.numpy()[told], atol=1e-4)
    np.testing.assert_array_equal(top_ids[told], expected.top_ids.numpy()[told])


def test_sampled_tokens_follow_the_distribution(native, isa):
    """Independent of torch: 4,000 draws at temperature 2 with top-k 4 of a known distribution."""
    logits = np.log(np.array([0.02, 0.5, 0.08, 0.25, 0.03, 0.12], np.float32))[None]
    rows = 4000
    sampling = plan(rows, temperature=[2.0] * rows, top_k=[4] * rows)
    sampling = replace(sampling, slots=np.zeros(rows, np.int32))
    (tokens, *_) = native.Sampler(6, 1, MAX_LEN).sample(isa, logits.repeat(rows, 0), sampling)
    share = np.sqrt([0.0, 0.5, 0.08, 0.25, 0.0, 0.12])
    expected = share / share.sum()
    error = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(np.bincount(tokens, minlength=6) / rows - expected) <= 4 * error).all()


def test_a_row_samples_the_same_token_alone_and_batched(native, isa):
    rows, vocab = 40, 515
    generator = np.random.default_rng(1)
    logits = random_logits(generator, rows, vocab)
    sampling = replace(random_plan(generator, rows, vocab), bias_rows=np.arange(rows, dtype="i4"))
    together = native.Sampler(vocab, rows, MAX_LEN).sample(isa, logits, sampling)
    alone = native.Sampler(vocab, rows, MAX_LEN)
    for row in range(rows):
        one = {
            name: getattr(sampling, name)[row : row + 1]
            for name in SamplingInputs.__slots__
            if not name.startswith(("history", "hidden"))
        }
        one["bias_rows"] = np.zeros(1, np.int32)
        result = alone.sample(isa, logits[row : row + 1], replace(sampling, **one))
        width = int(sampling.num_logprobs[row])
        assert result[0][0] == together[0][row]
        if width >= 0:
            assert result[1][0] == together[1][row]
            assert result[2][0].tolist() == together[2][row, :width].tolist()
            assert result[3][0].tolist() == together[3][row, :width].tolist()


def test_penalties_follow_the_history_over_several_steps(native, isa):
    rows, vocab = 12, 41
    generator = np.random.default_rng(2)
    both = Both(native, isa, vocab, rows)
    penalties = {
        "repetition": generator.choice([1.0, 1.7, 0.6], rows),
        "presence": generator.choice([0.0, 1.5, -1.0], rows),
        "frequency": generator.choice([0.0, 0.7, -0.4], rows),
        "temperature": generator.choice([0.0, 0.9], rows),
    }
    lengths = generator.integers(3, 9, rows)
    given = {
        "history_slots": range(rows),
        "history_start": [0, *np.cumsum(lengths)],
        "history_tokens": generator.integers(0, vocab, lengths.sum()),
        "history_num_prompt": lengths - generator.integers(0, 3, rows),  # some were preempted
    }
    for step in range(12):
        logits = random_logits(generator, rows, vocab)
        forced = np.where(generator.random(rows) < 0.1, 3, SAMPLE)
        sampling = sampling_inputs(
            range(rows), range(rows), lengths + step, forced=forced, **penalties, **given
        )
        given = {}
        expected = both.expect(logits, sampling).tokens.numpy().astype(np.int32)
        (tokens, *_) = both.draw(logits, sampling)
        np.testing.assert_array_equal(tokens, expected)
        both.remember(sampling, expected)


def test_a_reused_slot_does_not_penalize_the_previous_sequences_tokens(native, isa):
    """What an earlier sequence left behind a shorter history is not penalized."""
    sampler = native.Sampler(9, 1, MAX_LEN)
    logits = np.zeros((1, 9), np.float32)
    for history in ([1, 2, 3, 4, 5, 6], [7, 0]):
        sampling = sampling_inputs(
            [0],
            [0],
            [len(history)],
            presence=[1.0],
            history_slots=[0],
            history_start=[0, len(history)],
            history_tokens=history,
            history_num_prompt=[0],
        )
        (tokens, *_) = sampler.sample(isa, logits, sampling)
        assert tokens[0] == min(set(range(9)) - set(history))


def test_logit_bias_bans_tokens_and_repeated_biases_add_up(native, isa):
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32).repeat(2, 0)
    sampling = plan(
        2,
        bias_rows=[1, 0, 1, 1],
        bias_ids=[0, 3, 2, 2],
        bias_values=[-INFINITY, 5.0, 0.75, 0.75],
    )
    (tokens, *_) = native.Sampler(4, 2, MAX_LEN).sample(isa, logits, sampling)
    assert tokens.tolist() == [3, 2]


@pytest.mark.parametrize("vocab", [5, 32, 100, 49152])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_a_mask_with_one_allowed_token_always_draws_that_token(native, isa, vocab, temperature):
    rows = 8
    generator = np.random.default_rng(vocab)
    allowed = generator.integers(0, vocab, rows)
    mask = np.zeros((rows, -(-vocab // 32)), np.uint32)
    mask[range(rows), allowed // 32] = 1 << (allowed % 32)
    sampling = plan(
        rows,
        temperature=[temperature] * rows,
        top_k=[0, 0, 0, 2, 2, 4, 0, 4],
        top_p=[1, 0.9, 1, 1, 0.9, 1, 0.2, 0.99],
        min_p=[0, 0, 0.1, 0, 0, 0.1, 0.5, 0.9],
        mask=mask,
    )
    logits = random_logits(generator, rows, vocab)
    sampler = native.Sampler(vocab, rows, MAX_LEN)
    np.testing.assert_array_equal(sampler.sample(isa, logits, sampling)[0], allowed)
    banned = np.full_like(logits, -INFINITY)
    banned[range(rows), allowed] = logits[range(rows), allowed]
    sampling = replace(sampling, mask=None)
    np.testing.assert_array_equal(sampler.sample(isa, banned, sampling)[0], allowed)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3, 1e6])
def test_extreme_temperatures_give_the_same_tokens_as_torch(native, isa, temperature):
    rows, vocab = 64, 300
    logits = random_logits(np.random.default_rng(4), rows, vocab)
    both = Both(native, isa, vocab, rows)
    for changes in ({}, {"top_p": [0.9] * rows}, {"top_k": [5] * rows}, {"min_p": [0.2] * rows}):
        sampling = plan(rows, temperature=[temperature] * rows, **changes)
        (tokens, *_) = both.draw(logits, sampling)
        if temperature < 1e-4:
            np.testing.assert_array_equal(tokens, logits.argmax(1))
        else:
            expected = both.expect(logits, sampling).tokens.numpy()
            assert (tokens != expected).sum() <= 1


def test_filters_keep_every_tie(native, isa):
    rows = 400
    logits = np.array([[2.0, 1.0, 1.0, 1.0, -3.0]], np.float32).repeat(rows, 0)
    for changes in ({"top_k": [2] * rows}, {"top_p": [0.6] * rows}, {"min_p": [0.3] * rows}):
        sampling = plan(rows, temperature=[1.0] * rows, **changes)
        (tokens, *_) = native.Sampler(5, rows, MAX_LEN).sample(isa, logits, sampling)
        assert set(tokens) == {0, 1, 2, 3}


def test_large_top_k_values_give_the_same_tokens_as_torch(native, isa):
    """Beyond the columns' maxima there is no bound to begin with."""
    rows, vocab = 4, 3000
    logits = random_logits(np.random.default_rng(5), rows, vocab)
    both = Both(native, isa, vocab, rows)
    sampling = plan(rows, temperature=[30.0] * rows, top_k=[97, 500, 2999, 3000])
    expected = both.expect(logits, sampling).tokens.numpy()
    np.testing.assert_array_equal(both.draw(logits, sampling)[0], expected)


def test_logprobs_of_forced_and_drawn_tokens_are_the_models_own(native, isa):
    logits = random_logits(np.random.default_rng(6), 2, 50)
    sampler = native.Sampler(50, 2, MAX_LEN)
    banned = int(logits[1].argmax())
    sampling = plan(
        2,
        forced=[31, SAMPLE],
        num_logprobs=[2, 1],
        bias_rows=[1],
        bias_ids=[banned],
        bias_values=[-INFINITY],
    )
    tokens, logprobs, top_ids, top_logprobs = sampler.sample(isa, logits, sampling)
    assert tokens.tolist() == [31, np.argsort(-logits[1])[1]]
    assert top_ids[1, 0] == banned
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[[0, 1], tokens], atol=1e-5)
    assert top_ids[0].tolist() == np.argsort(-logits[0])[:2].tolist()
    np.testing.assert_allclose(top_logprobs[0], exact[0, top_ids[0]], atol=1e-5)


def test_nan_is_never_drawn(native, isa):
    rows, vocab = 6, 100
    logits = np.full((rows, vocab), np.nan, np.float32)
    logits[3:, 70:73] = 1.0
    sampling = plan(
        rows,
        temperature=[0, 1, 1, 0, 1, 1],
        top_k=[0, 0, 3, 0, 0, 5],
        top_p=[1, 1, 0.5, 1, 0.5, 1],
        num_logprobs=[4] * rows,
    )
    tokens, *_ = native.Sampler(vocab, rows, MAX_LEN).sample(isa, logits, sampling)
    assert tokens[:3].tolist() == [0, 0, 0]
    assert all(70 <= token < 73 for token in tokens[3:])


@pytest.mark.parametrize(
    "changes",
    [
        {"forced": [50]},
        {"bias_rows": [1], "bias_ids": [0], "bias_values": [1.0]},
        {"bias_rows": [0], "bias_ids": [50], "bias_values": [1.0]},
        {"bias_rows": [0], "bias_ids": [0], "bias_values": []},
        {"mask": np.zeros((1, 1), np.uint32)},
        {"num_logprobs": [51]},
        {"top_k": [1, 2]},
        {"history_slots": [0], "history_start": [0, 2], "history_tokens": [1]}
        | {"history_num_prompt": [1]},
        {"history_slots": [0], "history_start": [0, 1], "history_tokens": [50]}
        | {"history_num_prompt": [1]},
        {"history_slots": [2], "history_start": [0, 0], "history_num_prompt": [1]},
    ],
)
def test_indices_out_of_bounds_are_refused(native, changes):
    sampler = native.Sampler(50, 2, MAX_LEN)
    logits = np.zeros((1, 50), np.float32)
    isa = native.instruction_sets()[0]
    with pytest.raises(ValueError):
        sampler.sample(isa, logits, plan(1, **changes))
    for slot, position in ((2, 1), (-1, 1), (0, MAX_LEN + 1)):
        with pytest.raises(ValueError):
            sampler.sample(isa, logits, sampling_inputs([0], [slot], [position]))
    assert sampler.sample(isa, logits, plan(1))[0].tolist() == [0]
