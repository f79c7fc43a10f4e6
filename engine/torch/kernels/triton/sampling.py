"""Sampling in three kernel launches. The first kernel finds the thresholds of top-k, top-p and
min-p for each row. The second kernel finds the best token of each part of the vocabulary. The third
kernel finds the best of these tokens.

A threshold is found by bisection, which sets two bits of the float at a time. This works because
the bits of floats sort like their values. Rows without top-k, top-p and min-p skip this search.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.sampling import RowSettings

_PART = 4096  # vocabulary entries per program
_FLOOR_BLOCK = 8192
_LOWEST = tl.constexpr(-(1 << 31))  # int32 with only the sign bit set
# The bits of the float 2 ** -63, the smallest threshold of top-p.
_SMALLEST_BITS = tl.constexpr(64 << 23)
_MIX_1 = tl.constexpr(0x7FEB352D)
_MIX_2 = tl.constexpr(-0x7B935975)


@triton.jit
def _scaled(logits, mask, columns, temperature, VOCABULARY: tl.constexpr, MASKED: tl.constexpr):
    """Loads a part of a row's logits and divides them by the temperature. The result is -inf for
    tokens that the mask forbids, and for columns past the end of the vocabulary.
    """
    inside = columns < VOCABULARY
    x = tl.load(logits + columns, mask=inside, other=float("-inf"))
    if MASKED:
        word = tl.load(mask + columns // 32, mask=inside, other=0)
        x = tl.where(((word >> (columns % 32)) & 1) != 0, x, float("-inf"))
    return x / temperature


@triton.jit
def _ordered(x):
    """Converts float32 values to int32 values that sort in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _top_k_floor(
    logits,
    mask,
    temperature,
    top_k,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The top-k threshold of a row: its k-th largest logit, divided by the temperature."""
    floor = tl.zeros((), tl.int32)  # read as unsigned: a value of `_ordered`, plus 2 ** 31
    for step in range(16):
        shift = 30 - 2 * step
        one, two = tl.full((), 1, tl.int32) << shift, tl.full((), 2, tl.int32) << shift
        above_1 = tl.zeros((BLOCK,), tl.int32)
        above_2 = tl.zeros((BLOCK,), tl.int32)
        above_3 = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            key = _ordered(_scaled(logits, mask, columns, temperature, VOCABULARY, MASKED))
            above_1 += (key >= ((floor | one) ^ _LOWEST)).to(tl.int32)
            above_2 += (key >= ((floor | two) ^ _LOWEST)).to(tl.int32)
            above_3 += (key >= ((floor | one | two) ^ _LOWEST)).to(tl.int32)
        if tl.sum(above_3, axis=0) >= top_k:
            floor = floor | one | two
        elif tl.sum(above_2, axis=0) >= top_k:
            floor = floor | two
        elif tl.sum(above_1, axis=0) >= top_k:
            floor = floor | one
    key = floor ^ _LOWEST
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _nucleus_floor(
    logits,
    mask,
    temperature,
    floor,
    best,
    total,
    top_p,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The top-p threshold of a row: the largest probability such that the probabilities at or above
    it sum to at least `top_p`.
    """
    bits = tl.full((), _SMALLEST_BITS, tl.int32)
    for step in range(11):
        shift = 27 - 2 * step
        one, two = tl.full((), 1, tl.int32) << shift, tl.full((), 2, tl.int32) << shift
        mass_1 = tl.zeros((BLOCK,), tl.float32)
        mass_2 = tl.zeros((BLOCK,), tl.float32)
        mass_3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(logits, mask, columns, temperature, VOCABULARY, MASKED)
            p = tl.where(x >= floor, tl.exp(x - best), 0.0) / total
            mass_1 += tl.where(p >= (bits | one).to(tl.float32, bitcast=True), p, 0.0)
            mass_2 += tl.where(p >= (bits | two).to(tl.float32, bitcast=True), p, 0.0)
            mass_3 += tl.where(p >= (bits | one | two).to(tl.float32, bitcast=True), p, 0.0)
        if tl.sum(mass_3, axis=0) >= top_p:
            bits = bits | one | two
        elif tl.sum(mass_2, axis=0) >= top_p:
            bits = bits | two
        elif tl.sum(mass_1, axis=0) >= top_p:
            bits = bits | one
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _floors_kernel(
    logits_ptr,
    mask_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floors_ptr,
    logits_stride,
    mask_stride,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Writes four numbers per row. The first is the min logit (divided by the temperature) that
    top-k keeps. The second is the min probability that top-p and min-p keep. The third and fourth
    are the max and the sum of the softmax that defines these probabilities.
    """
    row = tl.program_id(0).to(tl.int64)
    logits, mask = logits_ptr + row * logits_stride, mask_ptr + row * mask_stride
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_count = (temperature > 0.0) & (top_k > 0) & (top_k < VOCABULARY)
    by_share = (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0))
    floor = tl.full((), float("-inf"), tl.float32)
    least = tl.zeros((), tl.float32)
    best = tl.zeros((), tl.float32)
    total = tl.full((), 1.0, tl.float32)
    if by_count:
        floor = _top_k_floor(logits, mask, temperature, top_k, VOCABULARY, BLOCK, MASKED)
    if by_share:
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(logits, mask, columns, temperature, VOCABULARY, MASKED)
            highest = tl.maximum(highest, x)
        best = tl.max(highest, axis=0)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(logits, mask, columns, temperature, VOCABULARY, MASKED)
            sums += tl.where(x >= floor, tl.exp(x - best), 0.0)
        total = tl.sum(sums, axis=0)
        least = min_p / total
        if top_p < 1.0:
            nucleus = _nucleus_floor(
                logits, mask, temperature, floor, best, total, top_p, VOCABULARY, BLOCK, MASKED
            )
            least = tl.maximum(least, nucleus)
    tl.store(floors_ptr + row * 4, floor)
    tl.store(floors_ptr + row * 4 + 1, least)
    tl.store(floors_ptr + row * 4 + 2, best)
    tl.store(floors_ptr + row * 4 + 3, total)


@triton.jit
def _gumbel(words, key, factor):
    """Standard Gumbel noise for each token. It depends only on the token's word, and on `key` and
    `factor`, the two words of the row's key.
    """
    bits = (words ^ key) * factor
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _MIX_2
    drawn = (bits & 0x7FFFFFFF).to(tl.float32)
    uniform = tl.minimum(tl.maximum(drawn, 0.5), 2147483520.0) * 4.656612873077393e-10
    # Computes -log(1 - u), also for small u without loss of precision. The quotient corrects the
    # rounding error of 1 - u.
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    exponential = tl.where(rest == 1.0, uniform, uniform * tl.log(rest) / lost)
    return -tl.log(exponential)


@triton.jit
def _part_kernel(
    logits_ptr,
    mask_ptr,
    temperature_ptr,
    floors_ptr,
    keys_ptr,
    words_ptr,
    values_ptr,
    ids_ptr,
    logits_stride,
    mask_stride,
    parts,
    VOCABULARY: tl.constexpr,
    PART: tl.constexpr,
    MASKED: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Finds the token with the largest logit in one part of the vocabulary. If the row's
    temperature is above 0, the logits are first filtered, and noise is added.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    temperature = 1.0
    if SAMPLES:
        stated = tl.load(temperature_ptr + row)
        temperature = tl.where(stated > 0.0, stated, 1.0)
    logits, mask = logits_ptr + row * logits_stride, mask_ptr + row * mask_stride
    x = _scaled(logits, mask, columns, temperature, VOCABULARY, MASKED)
    if SAMPLES:
        floor, least = tl.load(floors_ptr + row * 4), tl.load(floors_ptr + row * 4 + 1)
        best, total = tl.load(floors_ptr + row * 4 + 2), tl.load(floors_ptr + row * 4 + 3)
        kept = (x >= floor) & (tl.exp(x - best) / total >= least)
        words = tl.load(words_ptr + columns, mask=columns < VOCABULARY, other=0)
        key, factor = tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1)
        noisy = tl.where(kept, x + _gumbel(words, key, factor), float("-inf"))
        x = tl.where(stated > 0.0, noisy, x)
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(values_ptr + row * parts + part, value)
    tl.store(ids_ptr + row * parts + part, part * PART + index)


@triton.jit
def _best_kernel(
    values_ptr, ids_ptr, out_ptr, parts, VOCABULARY: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    values = tl.load(values_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.argmax(values, axis=0)
    token = tl.load(ids_ptr + row * parts + tl.minimum(index, parts - 1))
    tl.store(out_ptr + row, tl.minimum(token, VOCABULARY - 1).to(tl.int64))


def _choose(
    logits: Tensor, mask: Tensor | None, settings: tuple[Tensor, ...], samples: bool
) -> Tensor:
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, _PART)
    values = torch.empty((rows, parts), device=logits.device)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = logits if mask is None else mask
    _part_kernel[(rows, parts)](
        logits,
        given,
        *settings,
        values,
        ids,
        logits.stride(0),
        given.stride(0),
        parts,
        VOCABULARY=vocabulary,
        PART=_PART,
        MASKED=mask is not None,
        SAMPLES=samples,
        num_warps=8,
    )
    _best_kernel[(rows,)](
        values,
        ids,
        tokens,
        parts,
        VOCABULARY=vocabulary,
        PARTS=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return tokens


def greedy(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    return _choose(logits, mask, (logits, logits, logits, logits), samples=False)


def random_sample(
    logits: Tensor, settings: RowSettings, words: Tensor, mask: Tensor | None
) -> Tensor:
    temperature, *floors_of, keys = settings
    rows, vocabulary = logits.shape
    floors = torch.empty((rows, 4), device=logits.device)
    given = logits if mask is None else mask
    _floors_kernel[(rows,)](
        logits,
        given,
        temperature,
        *floors_of,
        floors,
        logits.stride(0),
        given.stride(0),
        VOCABULARY=vocabulary,
        BLOCK=_FLOOR_BLOCK,
        MASKED=mask is not None,
        num_warps=16,
    )
    return _choose(logits, mask, (temperature, floors, keys, words), samples=True)
