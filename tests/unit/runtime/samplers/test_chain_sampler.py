"""The samplers that run on the host, against llama.cpp's own and against the plain reference."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.core.interfaces.request import SamplingParams
from engine.runtime.samplers.chain import (
    ChainSampler,
    candidates,
    mirostat_k,
    penalized,
    softmax,
    surprise,
)
from engine.runtime.samplers.host_sampler import HostSampler
from engine.runtime.samplers.repetition import (
    allowed_mask,
    banned_by_words,
    by_first_token,
    dry_penalties,
    logit_biases,
)
from engine.runtime.sequence import Row, ScheduledBatch, Sequence, TokenRules, packed
from tests.parity.runner_driver import sampling_inputs
from tests.support.references.sampler_reference import Reference

GOLDEN = json.loads((Path(__file__).parents[3] / "data" / "llamacpp_samplers.json").read_text())
ROWS = [np.array(row, np.float32) for row in GOLDEN["rows"]]
VOCAB = len(ROWS[0])
PROMPT = (1, 2, 3, 1, 2)


def params_of(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        **{name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
    )


def kept_by(logits: np.ndarray, params: SamplingParams, mu: float = 0.0) -> dict[int, float]:
    """The tokens that are left, with their logits. XTC always acts."""
    ids, left = candidates(np.arange(VOCAB), logits, params, 0.0, mu, VOCAB)
    return dict(zip(ids.tolist(), left, strict=True))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: ",".join(case["params"]))
def test_probabilities_after_each_sampler_equal_llama_cpps(case):
    params, logits = params_of(case["params"]), ROWS[case["row"]].copy()
    tokens = np.array(case.get("tokens", []), np.int32)
    if params.has_penalties:
        logits = penalized(logits, tokens, 0, params)
    if params.dry_multiplier:
        window = params.dry_penalty_last_n
        lost = dry_penalties(
            tokens if window < 0 else tokens[-window:],
            by_first_token(map(tuple, case["breakers"])),
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
        )
        for token, penalty in lost.items():
            logits[token] -= penalty
    left = kept_by(logits, params)
    assert sorted(left) == sorted(map(int, case["kept"]))
    found = softmax(np.array(list(left.values())))
    np.testing.assert_allclose(found, [case["kept"][str(token)] for token in left], rtol=1e-3)


@pytest.mark.parametrize("case", GOLDEN["mirostat"], ids=lambda case: str(case["mirostat"]))
def test_mirostat_keeps_the_same_tokens_as_llama_cpp(case):
    params = SamplingParams(**{name: each for name, each in case.items() if name != "steps"})
    mu = 2 * params.mirostat_tau
    for step in case["steps"]:
        left = kept_by(ROWS[step["row"]], params, mu)
        assert sorted(left) == step["kept"]
        bits = surprise(np.array(list(left.values())))[list(left).index(step["selected"])]
        mu -= params.mirostat_eta * (float(bits) - params.mirostat_tau)


def sequence(params: SamplingParams, choice: int = 0, **rules: Any) -> Sequence:
    return Sequence(
        request_id="r",
        choice=choice,
        tokens=packed(PROMPT),
        num_prompt=len(PROMPT),
        max_tokens=99,
        params=replace(params, seed=params.seed or 0),
        stop_ids=frozenset(),
        namespace="",
        tenant="",
        priority=0,
        arrival=0,
        rules=TokenRules(**rules),
    )


def step(sampler: ChainSampler, seqs: list[Sequence], logits: np.ndarray) -> list[int]:
    """Sample a token for each sequence. The tokens are not appended."""
    rows = tuple(Row(seq, len(seq.tokens) - 1, 1, True, slot, 1) for slot, seq in enumerate(seqs))
    bias_rows, bias_ids, bias_values = logit_biases(enumerate(rows))
    masks = [
        ~np.zeros(-(-VOCAB // 32), np.uint32) if s.rules.allowed is None else s.rules.allowed
        for s in seqs
    ]
    numbers = range(len(seqs))
    sampling = sampling_inputs(
        numbers,
        numbers,
        [len(seq.tokens) for seq in seqs],
        bias_rows=bias_rows,
        bias_ids=bias_ids,
        bias_values=bias_values,
        mask=np.array(masks),
        host_rows=numbers,
    )
    return sampler.sample(logits, sampling, ScheduledBatch(rows)).forced.tolist()


def new_sampler() -> ChainSampler:
    runner = SimpleNamespace(
        spec=SimpleNamespace(vocab_size=VOCAB), logits=lambda handle, rows: handle[rows]
    )
    return ChainSampler(runner)


CHAINS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.9]),
        "seed": st.integers(0, 2**63 - 1),
    },
    optional={
        "top_k": st.integers(1, VOCAB + 3),
        "top_p": st.sampled_from([0.1, 0.5, 0.93]),
        "min_p": st.sampled_from([0.02, 0.3]),
        "typical_p": st.sampled_from([0.15, 0.5, 0.9]),
        "top_n_sigma": st.sampled_from([0.4, 1.1, 2.0]),
        "xtc_probability": st.sampled_from([0.3, 0.8, 1.0]),
        "xtc_threshold": st.sampled_from([0.01, 0.06, 0.3, 0.7]),
        "min_keep": st.integers(0, 6),
        "dynatemp_range": st.sampled_from([0.3, 2.5]),
        "dynatemp_exponent": st.sampled_from([0.5, 2.0]),
        "mirostat": st.sampled_from([1, 2]),
        "mirostat_tau": st.sampled_from([0.5, 2.0, 4.5]),
        "mirostat_eta": st.sampled_from([0.05, 1.2]),
        "repetition_penalty": st.sampled_from([0.7, 1.5]),
        "presence_penalty": st.sampled_from([-0.4, 0.9]),
        "frequency_penalty": st.sampled_from([-0.1, 0.5]),
        "repeat_last_n": st.integers(-1, 7),
        "dry_multiplier": st.sampled_from([0.5, 4.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 3.0]),
        "dry_allowed_length": st.integers(0, 3),
        "dry_penalty_last_n": st.integers(-1, 9),
        "logit_bias": st.just({3: 2.0, 5: -1.5}),
        "allowed_token_ids": st.just((1, 2, 3, 4, 9, 30)),
        "samplers": st.permutations(["top_k", "min_p", "temperature", "xtc"]).map(tuple),
    },
)
BAD_WORDS = ((8,), (2, 1), (1, 2, 3))
BREAKERS = ((3,), (2, 9))


@settings(max_examples=60, deadline=None, derandomize=True)  # near-ties may go either way
@given(chains=st.lists(CHAINS, min_size=1, max_size=4), logits_seed=st.integers(0, 99))
# Mirostat keeps all six tokens, whose number is exp(log(6)) = 5.999... on some processors.
@example(
    chains=[{"seed": 0, "mirostat": 1, "allowed_token_ids": (1, 2, 3, 4, 9, 30)}], logits_seed=0
)
@example(  # each choice has random numbers of its own
    chains=[{"xtc_probability": 0.5, "xtc_threshold": 0.05, "seed": 7, "samplers": ("xtc",)}] * 8,
    logits_seed=0,
)
def test_batched_sampler_chains_equal_the_reference(chains, logits_seed):
    rng = np.random.default_rng(logits_seed)
    seqs, references = [], []
    for choice, fields in enumerate(chains):
        params = SamplingParams(**fields)
        allowed = params.allowed_token_ids and allowed_mask(params.allowed_token_ids, VOCAB)
        seqs.append(
            sequence(
                params,
                choice,
                bad_words=BAD_WORDS,
                dry_breakers=by_first_token(BREAKERS),
                allowed=None if isinstance(allowed, tuple) else allowed,
            )
        )
        references.append(Reference(params, PROMPT, params.seed, choice, BAD_WORDS, BREAKERS))
    sampler = new_sampler()
    for _ in range(5):
        logits = (rng.standard_normal((len(seqs), VOCAB)) * 2).astype(np.float32)
        logits[:, [1, 2, 3]] += 3  # repeats are likely
        before = logits.copy()
        tokens = step(sampler, seqs, logits)
        assert tokens == step(sampler, seqs, logits), "a step that is run again"
        np.testing.assert_array_equal(logits, before)
        for seq, reference, row, token in zip(seqs, references, logits, tokens, strict=True):
            assert token == reference.next_token(row), seq.params
            seq.tokens.append(token)
            if reference.mu is not None:
                assert seq.rules.surprise_limits[seq.num_generated - 1 :] == [
                    pytest.approx(reference.mu, abs=1e-3)
                ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_chain_in_the_devices_order_samples_the_devices_tokens(data):
    """A request with `samplers` and one without it, whose order is the same."""
    fields = {
        "temperature": data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        "top_k": data.draw(st.sampled_from([0, 1, 4, 20])),
        "top_p": data.draw(st.sampled_from([1.0, 0.9, 0.4])),
        "min_p": data.draw(st.sampled_from([0.0, 0.1])),
    }
    seed = data.draw(st.integers(0, 2**63 - 1))
    order = ("temperature", "top_k", "top_p", "min_p")
    seq = sequence(SamplingParams(**fields, seed=seed, samplers=order))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = (rng.standard_normal((1, VOCAB)) * 3).astype(np.float32)
    device = {name: [each] for name, each in fields.items()}
    sampling = sampling_inputs([0], [0], [len(PROMPT)], seed=[seed], **device)
    expected = HostSampler(VOCAB).sample(logits, sampling).tokens.tolist()
    assert step(new_sampler(), [seq], logits) == expected


def test_nonfinite_logits_do_not_stop_a_step():
    seqs = [sequence(SamplingParams(mirostat=version, seed=1)) for version in (1, 2)]
    for value in (np.nan, -np.inf):
        logits = np.full((2, VOCAB), value, np.float32)
        assert step(new_sampler(), seqs, logits) == [0, 0]
        for seq in seqs:
            seq.tokens.append(0)
        logits[:, 7] = 1.0
        assert step(new_sampler(), seqs, logits) == [7, 7]
        for seq in seqs:
            seq.tokens.append(7)


def test_mirostats_formula_is_defined_for_every_input():
    assert mirostat_k(np.zeros(1, np.float32), 5.0, VOCAB) == 1
    assert mirostat_k(np.zeros(VOCAB, np.float32), 5.0, VOCAB) == VOCAB  # exponent 0
    zipf = -np.log(np.arange(1, VOCAB + 1, dtype=np.float32))  # exponent 1
    assert 1 <= mirostat_k(zipf, 3.0, VOCAB) <= VOCAB
    assert mirostat_k(zipf, 1e6, VOCAB) == VOCAB and mirostat_k(zipf * 9, -50.0, VOCAB) == 1


def test_dry_penalty_of_a_long_repetition_is_fast_and_finite():
    tokens = np.ones(20_000, np.int32)
    (penalty,) = dry_penalties(tokens, {}, 1.0, 1.75, 2).values()
    assert 1e20 < penalty < np.finfo(np.float32).max
    assert dry_penalties(tokens, {}, 2.0, 1.0, 2) == {1: 2.0}
    assert dry_penalties(tokens, {}, 1e9, 90.0, 2) == {1: 1e38}
    assert dry_penalties(tokens[:0], {}, 2.0, 1.75, 0) == {}


def test_image_tokens_are_never_penalized():
    tokens = np.array([-3, -4, 5, -3], np.int32)
    assert dry_penalties(tokens, {}, 1.0, 1.75, 1) == {}


def test_a_bad_word_is_banned_only_after_its_own_prefix():
    words = ((4,), (5, 6), (5, 6, 7))
    assert banned_by_words([5, 6], 2, words) == [4], "the prompt does not count"
    assert banned_by_words([9, 5], 1, words) == [4, 6]
    assert banned_by_words([9, 5, 6], 1, words) == [4, 7]
    assert banned_by_words([6], 0, words) == [4]
