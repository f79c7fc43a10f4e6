"""Samples a token on the host with llama.cpp's samplers, in numpy. This is the only implementation
of these samplers, so all frameworks sample the same token from the same logits.

A sampler gets the logits of the candidates, which are the tokens that earlier samplers kept. It
returns them with -inf for each token that it drops. The order is that of `SamplingParams.samplers`.
Mirostat replaces all samplers except the penalties, DRY and the temperature.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.core.interfaces.request import SAMPLERS, USUAL_SAMPLERS, SamplingParams
from engine.runtime.model_runner import (
    F32,
    I32,
    I64,
    Bools,
    ModelRunner,
    SamplingInputs,
)
from engine.runtime.samplers.host_sampler import (
    allowed,
    gumbel,
    row_keys,
    token_words,
)
from engine.runtime.sequence import ScheduledBatch, Sequence

Sampler = Callable[[F32, SamplingParams, float], F32]
NEGLIGIBLE = 1e-30  # lower temperatures are greedy
XTC_STREAM = 0x5854433  # makes the random numbers of XTC independent of those that pick a token
MIROSTAT_TOKENS = 100  # the likeliest tokens from which Mirostat 1 estimates the distribution


class ChainSampler:
    """Samples the rows of a step that no device sampler can sample."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._vocab_size = runner.spec.vocab_size

    @cached_property
    def _words(self) -> I32:
        return token_words(self._vocab_size)

    def sample(
        self, handle: Any, sampling: SamplingInputs, batch: ScheduledBatch
    ) -> SamplingInputs:
        """Sample a token for each of `sampling.host_rows`. The runner then returns these tokens,
        because they are in `forced` of the result.
        """
        logits = self._runner.logits(handle, sampling.host_rows)
        forced = sampling.forced.copy()
        for row, values in zip(sampling.host_rows.tolist(), logits, strict=True):
            seq = batch.rows[sampling.sample_rows[row]].seq
            # The token of a sequence that has ended meanwhile is not used.
            forced[row] = 0 if seq.finish_reason else self._sample_row(seq, values, sampling, row)
        return replace(sampling, forced=forced)

    def _sample_row(self, seq: Sequence, logits: F32, sampling: SamplingInputs, row: int) -> int:
        params, position = seq.params, int(sampling.position[row])
        adjusted = logits.copy()
        if params.has_penalties:
            adjusted = penalized(logits, np.array(seq.token_ids), seq.num_prompt, params)
        biases = sampling.bias_rows == row
        np.add.at(adjusted, sampling.bias_ids[biases], sampling.bias_values[biases])
        if sampling.mask is not None:
            adjusted[~allowed(sampling.mask[row : row + 1], self._vocab_size)[0]] = -np.inf
        ids = np.flatnonzero(adjusted > -np.inf)  # NaN is left out
        if not len(ids):  # as on devices, token 0 is sampled if all tokens are banned
            ids, adjusted[0] = np.zeros(1, np.int64), 0
        mu, num_generated = 2 * params.mirostat_tau, position - seq.num_prompt
        if params.mirostat and num_generated:
            assert seq.rules is not None
            mu = seq.rules.surprise_limits[num_generated - 1]
        chance = xtc_chance(seq, position) if params.xtc_probability else 1.0
        kept, kept_logits = candidates(ids, adjusted[ids], params, chance, mu, self._vocab_size)
        keys = row_keys(*_noise_inputs(seq.seed, seq.choice, position))
        index = int((kept_logits + gumbel(np, keys, self._words[kept])[0]).argmax())
        if params.mirostat:
            assert seq.rules is not None
            bits = float(surprise(kept_logits)[index])
            mu -= params.mirostat_eta * (bits - params.mirostat_tau)
            # A step that failed is run again, so there may be a value already.
            seq.rules.surprise_limits[num_generated:] = [mu]
        return int(kept[index])


def candidates(
    ids: I64, logits: F32, params: SamplingParams, chance: float, mu: float, vocab_size: int
) -> tuple[I64, F32]:
    """The tokens that the samplers keep, and their logits. `chance` is XTC's random number from 0
    to 1. `mu` is Mirostat's limit for the surprise of a token, in bits.
    """
    order = params.samplers or (SAMPLERS if params.has_chain else USUAL_SAMPLERS)
    if params.mirostat:
        order = ("temperature",)
    for name in order:
        if name in _SAMPLERS:
            ids, logits = _compact(ids, _SAMPLERS[name](logits, params, chance))
    if params.mirostat == 1:
        return _compact(ids, _top_k(logits, mirostat_k(logits, mu, vocab_size)))
    if params.mirostat == 2:
        return _compact(ids, _drop(logits, surprise(logits) > mu))
    return ids, logits


def penalized(logits: F32, tokens: I64, num_prompt: int, params: SamplingParams) -> F32:
    """A copy of the logits (V,) with the penalties for the last `repeat_last_n` tokens."""
    logits = logits.copy()
    start = 0 if params.repeat_last_n < 0 else max(len(tokens) - params.repeat_last_n, 0)
    ids = np.unique(tokens[start:])
    counts = np.bincount(tokens[max(start, num_prompt) :], minlength=len(logits))[ids]
    values = logits[ids]
    repetition = np.float32(params.repetition_penalty)
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    values -= np.float32(params.presence_penalty) * (counts > 0)
    logits[ids] = values
    return logits


def xtc_chance(seq: Sequence, position: int) -> float:
    """A random number from 0 to 1, which depends on seed, choice and position."""
    keys = row_keys(*_noise_inputs(seq.seed ^ XTC_STREAM, seq.choice, position))
    return float(keys.view(np.uint32)[0, 0]) * 2.0**-32


def _noise_inputs(seed: int, choice: int, position: int) -> tuple[I64, I32, I32]:
    return np.array([seed]), np.array([choice], np.int32), np.array([position], np.int32)


def softmax(logits: F32) -> F32:
    probs = np.exp(logits - logits.max())
    total: F32 = probs / probs.sum()
    return total


def surprise(logits: F32) -> F32:
    """The surprise of each token in bits: the negative base-2 logarithm of its probability."""
    below = logits - logits.max()
    bits: F32 = (np.log(np.exp(below).sum()) - below) / np.float32(np.log(2))
    return bits


def entropy(logits: F32) -> float:
    """The entropy of the distribution in bits."""
    return float((softmax(logits) * surprise(logits)).sum())


def mirostat_k(logits: F32, mu: float, vocab_size: int) -> int:
    """The number of tokens that Mirostat 1 keeps. It assumes that probabilities follow Zipf's law
    and estimates the exponent from the likeliest tokens.
    """
    if len(logits) < 2:
        return 1
    best = np.sort(-_smallest(-logits, MIROSTAT_TOKENS))[::-1].astype(np.float64)
    ranks = np.arange(1, len(best) + 1)
    steps, drops = np.log(ranks[1:] / ranks[:-1]), best[:-1] - best[1:]
    exponent = float((steps * drops).sum() / (steps * steps).sum())
    above_one = exponent - 1
    if exponent <= 0 or above_one == 0:
        return len(logits)  # the formula has no value here
    # The formula of k, in logarithms, because its parts overflow.
    size = np.log(abs(above_one)) + mu * np.log(2)
    size -= np.log(abs(np.expm1(-above_one * np.log(vocab_size))))
    if size / exponent >= np.log(len(logits)):
        return len(logits)
    return max(1, int(np.exp(size / exponent)))


def _compact(ids: I64, logits: F32) -> tuple[I64, F32]:
    kept = logits > -np.inf
    return (ids, logits) if kept.all() else (ids[kept], logits[kept])


def _drop(logits: F32, is_dropped: Bools) -> F32:
    """The logits with -inf for the dropped tokens. The likeliest token is always kept."""
    kept = np.where(is_dropped, -np.inf, logits).astype(np.float32)
    kept[logits.argmax()] = logits.max()
    return kept


def _smallest(values: F32, count: int) -> F32:
    """The `count` smallest values, or all of them if there are fewer. The last is the largest."""
    count = min(max(count, 1), len(values))
    kept: F32 = np.partition(values, count - 1)[:count]
    return kept


def _limit(values: F32, probs: F32, mass: float, least: int, is_above: bool = False) -> float:
    """The largest of the smallest values whose probabilities sum to at least `mass`, or to more
    than that if `is_above`. They are at least `least` values.
    """
    count = 256
    while True:
        count = min(max(count, least), len(values))
        some = np.argpartition(values, count - 1)[:count]
        some = some[np.argsort(values[some], kind="stable")]
        sums = np.cumsum(probs[some], dtype=np.float64)
        rank = int(np.searchsorted(sums, mass, side="right" if is_above else "left"))
        if rank < count or count == len(values):
            return float(values[some[min(max(rank, least - 1), count - 1)]])
        count *= 8


def _top_k(logits: F32, count: int) -> F32:
    return _drop(logits, -logits > _smallest(-logits, count)[-1])


def _keep_top_k(logits: F32, params: SamplingParams, chance: float) -> F32:
    return _top_k(logits, params.top_k) if params.top_k > 0 else logits


def _keep_top_n_sigma(logits: F32, params: SamplingParams, chance: float) -> F32:
    """Keep the tokens whose logit is within n standard deviations of the largest one."""
    if params.top_n_sigma <= 0:
        return logits
    deviation = logits.std(dtype=np.float64)  # DRY's penalties may overflow in float32
    return _drop(logits, logits < logits.max() - params.top_n_sigma * deviation)


def _keep_typical(logits: F32, params: SamplingParams, chance: float) -> F32:
    """Locally typical sampling: keep the tokens whose surprise is nearest to the entropy, until
    their probabilities sum to more than `typical_p`. The likeliest token may be dropped.
    """
    if params.typical_p >= 1:
        return logits
    distance = np.abs(surprise(logits) - entropy(logits))
    limit = _limit(distance, softmax(logits), params.typical_p, params.min_keep, is_above=True)
    return np.where(distance > limit, np.float32(-np.inf), logits)


def _keep_top_p(logits: F32, params: SamplingParams, chance: float) -> F32:
    if params.top_p >= 1:
        return logits
    limit = _limit(-logits, softmax(logits), params.top_p, params.min_keep)
    return _drop(logits, -logits > limit)


def _keep_min_p(logits: F32, params: SamplingParams, chance: float) -> F32:
    if params.min_p <= 0:
        return logits
    limit = np.float32(-np.log(params.min_p)) - logits.max()
    return _drop(logits, -logits > max(limit, _smallest(-logits, params.min_keep)[-1]))


def _exclude_top_choices(logits: F32, params: SamplingParams, chance: float) -> F32:
    """XTC: with the given probability, drop every token that reaches the threshold, except for the
    least likely of them.
    """
    if chance >= params.xtc_probability or params.xtc_threshold > 0.5:
        return logits
    likely = np.flatnonzero(softmax(logits) >= params.xtc_threshold)
    if len(likely) < 2 or len(logits) - len(likely) + 1 < params.min_keep:
        return logits
    kept = logits.copy()
    kept[likely[np.argsort(logits[likely], kind="stable")[1:]]] = -np.inf
    return kept


def _scale(logits: F32, params: SamplingParams, chance: float) -> F32:
    """Divide by the temperature. With `dynatemp_range`, the temperature grows with the entropy."""
    temperature = params.temperature
    if params.dynatemp_range > 0 and len(logits) > 1:
        share = min(max(entropy(logits) / np.log2(len(logits)), 0), 1) ** params.dynatemp_exponent
        lowest = max(0.0, temperature - params.dynatemp_range)
        temperature = lowest + (temperature + params.dynatemp_range - lowest) * share
    if temperature <= NEGLIGIBLE:
        return _drop(logits, np.ones(len(logits), np.bool_))
    scaled: F32 = logits / np.float32(temperature)
    return scaled


_SAMPLERS: dict[str, Sampler] = {
    "top_n_sigma": _keep_top_n_sigma,
    "top_k": _keep_top_k,
    "typical_p": _keep_typical,
    "top_p": _keep_top_p,
    "min_p": _keep_min_p,
    "xtc": _exclude_top_choices,
    "temperature": _scale,
}
