"""Samples tokens on the CPU with numpy, for runners whose device has no sampler of its own.

The order is: penalties, bias, mask, temperature, top-k, top-p, min-p, sample. Logprobs are computed
from the unmodified logits. Top-k, top-p and min-p each keep the tokens at or above a minimum
probability. All tokens that tie at the minimum are kept, so the result does not depend on the order
of tokens. Sampling adds Gumbel noise to the logits and takes the argmax. The noise is a hash of
seed, choice, position and token. With temperature 0, the argmax is taken without noise.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.runtime.model_runner import (
    F32,
    I32,
    I64,
    SAMPLE,
    U32,
    Bools,
    SamplingInputs,
)
from engine.runtime.outputs import Sampled

MIX_1, MIX_2 = 0x7FEB352D, -0x7B935975  # int32 multipliers of the integer hash
MASK_31 = 0x7FFFFFFF


def token_words(vocab_size: int) -> I32:
    """A 32-bit hash of each token id, (V,). These hashes are the same in every step."""
    return _mix64(np.arange(vocab_size, dtype=np.uint64)).astype(np.uint32).view(np.int32)


def row_keys(seed: I64, choice: I32, position: I32) -> I32:
    """Two 32-bit hash words for each row, (R, 2). The second word is odd, so that multiplying by it
    is a bijection.
    """
    key = _mix64(seed.astype(np.uint64))
    key = _mix64(key ^ choice.astype(np.uint64))
    key = _mix64(key ^ (position.astype(np.uint64) << np.uint64(32)))
    words = np.stack(((key >> np.uint64(32)), key | np.uint64(1)), axis=1)
    return words.astype(np.uint32).view(np.int32)


def gumbel(np_like: Any, keys: Any, words: Any) -> Any:
    """Standard Gumbel noise (R, V) from row keys (R, 2) and token words (V,).

    `np_like` is numpy or a library with the same function names.
    """
    bits = (words ^ keys[:, :1]) * keys[:, 1:]  # int32 multiplication wraps around
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * MIX_1
    bits = ((bits ^ ((bits >> 16) & 0xFFFF)) * MIX_2) & MASK_31
    # The numbers are uniform in (0, 1). Their resolution is finest near 0, where the noise is
    # largest and decides which token wins.
    uniform = np_like.clip(bits.astype(np.float32), 0.5, 2.0**31 - 128) * 2.0**-31
    return -np_like.log(-np_like.log1p(-uniform))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit integer hash: a bijection in which every input bit affects every output bit."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


Rows = NDArray[np.intp]


class PenaltyCounts(msgspec.Struct, frozen=True):
    """Token counts of one slot's sequence, for penalties."""

    in_prompt: Bools  # (V,)
    in_output: I32  # (V,)


class HostSampler:
    """Samples tokens, and keeps each slot's token counts for penalties."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = token_words(vocab_size)
        self._counts: dict[int, PenaltyCounts] = {}

    def sample(self, logits: F32, sampling: SamplingInputs) -> Sampled:
        """Sample a token for each row of logits (R, V). The logits are not modified."""
        self._begin(sampling)
        adjusted = logits
        if sampling.has_penalties or len(sampling.bias_rows) or sampling.mask is not None:
            adjusted = logits.copy()
            self._penalize(adjusted, sampling)
            np.add.at(adjusted, (sampling.bias_rows, sampling.bias_ids), sampling.bias_values)
            if sampling.mask is not None:
                adjusted[~allowed(sampling.mask, self._vocab_size)] = -np.inf
        tokens = adjusted.argmax(axis=1).astype(np.int32)
        rows = np.flatnonzero(sampling.temperature)
        if len(rows):
            tokens[rows] = sample_tokens(adjusted[rows], sampling, rows, self._words)
        tokens = np.where(sampling.forced == SAMPLE, tokens, sampling.forced).astype(np.int32)
        self._append(tokens, sampling)
        num_top = int(sampling.num_logprobs.max(initial=-1))
        return Sampled(tokens) if num_top < 0 else with_logprobs(logits, tokens, num_top)

    def _begin(self, sampling: SamplingInputs) -> None:
        """Set the token counts of the slots whose token history came with this step."""
        for slot, in_prompt, in_output in histories(sampling, self._vocab_size):
            self._counts[slot] = PenaltyCounts(in_prompt, in_output)

    def _penalize(self, logits: F32, sampling: SamplingInputs) -> None:
        """Apply the penalties to `logits` in place. The repetition penalty applies to tokens of the
        prompt and of the output: positive logits are divided by it, negative logits are multiplied
        by it. Presence and frequency penalties are subtracted from the logits of output tokens.
        """
        for row in np.flatnonzero(_penalized(sampling)):
            counts = self._counts[int(sampling.slots[row])]
            ids = np.flatnonzero(counts.in_prompt | (counts.in_output > 0))
            values, num_output = logits[row, ids], counts.in_output[ids]
            repetition = sampling.repetition[row]
            values = np.where(values > 0, values / repetition, values * repetition)
            values -= sampling.frequency[row] * num_output
            values -= sampling.presence[row] * (num_output > 0)
            logits[row, ids] = values

    def _append(self, tokens: I32, sampling: SamplingInputs) -> None:
        for row in np.flatnonzero(_penalized(sampling) & (sampling.forced == SAMPLE)):
            self._counts[int(sampling.slots[row])].in_output[tokens[row]] += 1


def histories(sampling: SamplingInputs, vocab_size: int) -> Iterator[tuple[int, Bools, I32]]:
    """Yields a tuple for each slot whose token history came with this step. It has the slot,
    whether each token is in the prompt (V,), and how often each token is in the output (V,).
    """
    for index, slot in enumerate(sampling.history_slots.tolist()):
        start, end = sampling.history_start[index : index + 2]
        middle = start + sampling.history_num_prompt[index]
        in_prompt = np.zeros(vocab_size, np.bool_)
        in_prompt[sampling.history_tokens[start:middle]] = True
        output = sampling.history_tokens[middle:end]
        yield slot, in_prompt, np.bincount(output, minlength=vocab_size).astype(np.int32)


def _penalized(sampling: SamplingInputs) -> Bools:
    found: Bools = (sampling.repetition != 1) | (sampling.presence != 0) | (sampling.frequency != 0)
    return found


def allowed(mask: U32, vocab_size: int) -> Bools:
    """Unpack the mask's bits to booleans (R, V)."""
    bits = np.unpackbits(mask.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def sample_tokens(logits: F32, sampling: SamplingInputs, rows: Rows, words: I32) -> Rows:
    """Sample one token for each of `rows`, which are indices into the arrays of `sampling`. All of
    these rows have a temperature above 0. `logits` (len(rows), V) has only these rows.
    """
    logits = logits / sampling.temperature[rows, None]
    top_k, top_p, min_p = sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]
    keep_top_k(logits, top_k)
    if (top_p < 1).any() or min_p.any():
        keep_likely(logits, top_p, min_p)
    keys = row_keys(sampling.seed[rows], sampling.choice[rows], sampling.position[rows])
    tokens: Rows = (logits + gumbel(np, keys, words)).argmax(axis=1)
    return tokens


def keep_top_k(logits: F32, top_k: I32) -> None:
    size = logits.shape[1]
    for row in np.flatnonzero((top_k > 0) & (top_k < size)):
        floor = np.partition(logits[row], size - top_k[row])[size - top_k[row]]
        logits[row, logits[row] < floor] = -np.inf


def keep_likely(logits: F32, top_p: F32, min_p: F32) -> None:
    """Apply top-p and min-p in place: the logits of tokens that are not kept become -inf. Min-p is
    relative to the probability of the most likely token. That token is always kept.
    """
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    floor = probs.max(axis=1) * min_p
    rows = np.flatnonzero(top_p < 1)
    if len(rows):
        floor[rows] = np.maximum(floor[rows], nucleus_floor(probs[rows], top_p[rows]))
    logits[probs < floor[:, None]] = -np.inf


def nucleus_floor(probs: F32, target: F32) -> F32:
    """The minimum probability that top-p keeps, (R,). It is the largest value such that the tokens
    at or above this value have a total probability of at least `target`.

    This bisects over the bit patterns of float32, which sort like the values. The last 7 bits stay
    0, so tokens whose probabilities agree to one part in 65,536 count as ties.
    """
    floor = np.full(len(probs), 2.0**-63, np.float32).view(np.int32)
    # Float32 values from 2 ** -63 to 1 differ only in bits 0 to 28. Bits 0 to 6 are not searched.
    for bit in reversed(range(7, 29)):
        higher = floor | np.int32(1 << bit)
        mass = np.where(probs >= higher.view(np.float32)[:, None], probs, 0).sum(axis=1)
        floor = np.where(mass >= target, higher, floor)
    return floor.view(np.float32)


def with_logprobs(logits: F32, tokens: I32, num_top: int) -> Sampled:
    best = logits.max(axis=1, keepdims=True)
    total = best + np.log(np.exp(logits - best).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(logits, tokens[:, None], axis=1) - total
    size = logits.shape[1]
    likely = np.argpartition(logits, size - max(num_top, 1), axis=1)[:, size - num_top :]
    values = np.take_along_axis(logits, likely, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    ids = np.take_along_axis(likely, order, axis=1).astype(np.int32)
    return Sampled(tokens, chosen[:, 0], ids, np.take_along_axis(values, order, axis=1) - total)
