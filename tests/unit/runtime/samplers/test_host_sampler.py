"""The sampler of runners with logits on the host, beside PyTorch's, which is tested against an
oracle: the same tokens from the same logits, whatever is asked for.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.model_runner import SamplingInputs
from engine.runtime.samplers.host_sampler import HostSampler, token_words
from engine.torch.execution import sampler as torch_sampler
from engine.torch.execution.history import TokenHistory
from tests.parity.runner_driver import sampling_inputs

VOCAB = 67  # no multiple of 32 or of a vector register
ROWS = 5
WORDS = torch.from_numpy(token_words(VOCAB))


def each(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, min_size=ROWS, max_size=ROWS)


def expected_of(logits: np.ndarray, sampling: SamplingInputs) -> torch_sampler.Sampled:
    history = TokenHistory(ROWS, 64, torch.device("cpu"))
    history.begin(sampling)
    return torch_sampler.sample(torch.from_numpy(logits), sampling, history, WORDS)


@settings(max_examples=100, deadline=None, derandomize=True)  # near-ties may go either way
@given(data=st.data())
def test_host_sampler_draws_the_torch_samplers_tokens(data) -> None:
    """All stages at once, so that their order is part of it."""
    options = {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 4, 50, VOCAB + 9]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition": st.sampled_from([1.0, 1.3, 0.8]),
        "presence": st.sampled_from([0.0, 0.7, -0.5]),
        "frequency": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
        "forced": st.sampled_from([-1, -1, 3]),
        "num_logprobs": st.sampled_from([-1, 0, 2]),
    }
    drawn = {name: data.draw(each(strategy)) for name, strategy in options.items()}
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = (rng.standard_normal((ROWS, VOCAB)) * 3).astype(np.float32)
    logits[:, :8] += 3  # the tokens of outputs, some of them there twice: penalties decide
    allowed = rng.random((ROWS, 96)) < 0.8
    allowed[:, :8] = True
    mask = np.packbits(allowed, axis=1, bitorder="little").view(np.uint32)
    prompt = rng.integers(0, VOCAB, 6).tolist()
    histories = [prompt + rng.integers(0, 8, 4).tolist() for _ in range(ROWS)]
    drawn |= {
        "history_slots": range(ROWS),
        "history_start": range(0, 10 * ROWS + 1, 10),
        "history_tokens": np.concatenate(histories),
        "history_num_prompt": [len(prompt)] * ROWS,
        "bias_rows": [0, 2, 2],
        "bias_ids": [5, 66, 7],
        "bias_values": [3.0, -np.inf, 1.5],
    }
    if data.draw(st.booleans()):
        drawn["mask"] = mask
    # The history of a row is as long as its position.
    sampling = sampling_inputs(range(ROWS), range(ROWS), [10] * ROWS, **drawn)
    before = logits.copy()
    found, expected = HostSampler(VOCAB).sample(logits, sampling), expected_of(logits, sampling)
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(found.tokens, expected.tokens.numpy())
    assert (found.logprobs is None) == (expected.logprobs is None)
    if expected.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, expected.logprobs.numpy(), atol=1e-5)
        np.testing.assert_array_equal(found.top_ids, expected.top_ids.numpy())
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs.numpy(), atol=1e-5)


def test_a_sampled_token_is_penalized_from_the_next_step_on() -> None:
    """Two steps of one slot: the second penalizes the first one's token, unless it was forced."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [4, 9]] = 2.0, 1.5
    first = {
        "presence": [1.0],
        "history_slots": [0],
        "history_start": [0, 1],
        "history_tokens": [1],
        "history_num_prompt": [1],
    }
    for forced, then in ((-1, 9), (4, 4)):
        sampler = HostSampler(VOCAB)
        sampling = sampling_inputs([0], [0], [1], forced=[forced], **first)
        assert sampler.sample(logits, sampling).tokens == [4]
        again = sampling_inputs([0], [0], [2], presence=[1.0])
        assert sampler.sample(logits, again).tokens == [then]
