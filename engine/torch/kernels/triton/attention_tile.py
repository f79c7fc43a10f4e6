"""Attention to the keys of one KV head, tile by tile, with a base-2 online softmax.

`score_scale` includes log2(e), because exp2 is a hardware instruction. Multiplying a score by
`score_scale` and subtracting the max is one FMA. The running max starts at a finite number. So if a
query attends to no key of a tile, the softmax weights are 0 instead of NaN.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.attention_heads import AttentionHeads
from engine.torch.kernels.fp8 import FP8
from engine.torch.kernels.triton.assembly import (
    FP8_FACTOR,
    fp8_to_float16,
)


class Tile(NamedTuple):
    """The size of the tile that a program computes at a time, and the program's numbers of warps
    and pipeline stages.
    """

    queries: int  # lines of the tile; a line is the query of one token and one head
    keys: int
    warps: int
    stages: int


NOTHING_SEEN = tl.constexpr(-1.0e30)
# Weights are multiplied by the scales of float8 values and by this, so that float16 has them.
VALUE_FACTOR = tl.constexpr(4096.0)
# Bits of FEATURES: what a model's attention does besides scaling and masking scores.
SOFTCAP, ALIBI, SINKS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)


def scales(heads: AttentionHeads) -> tuple[float, float]:
    """The factor of scores in the base-2 softmax, and the factor of dot products inside of the soft
    cap's tanh. With a soft cap, scores are multiples of the cap.
    """
    if heads.softcap is None:
        return heads.scale * _LOG2_E, 0.0
    return heads.softcap * _LOG2_E, heads.scale / heads.softcap


def sizes(q: Tensor, cache: Tensor, heads: AttentionHeads) -> dict[str, Any]:
    """The compile-time constants of all attention kernels, for a cache (B, block size, 2, K, H)."""
    kv_heads, head_dim = cache.shape[3], cache.shape[4]
    assert cache.stride()[2:] == (kv_heads * head_dim, head_dim, 1), "keys are contiguous"
    assert cache.stride(0) == cache.shape[1] * cache.stride(1), "blocks are contiguous"
    features = (heads.softcap is not None) * SOFTCAP.value
    features += (heads.alibi_bias is not None) * ALIBI.value + heads.has_sinks * SINKS.value
    return {
        "KV_HEADS": kv_heads,
        "GROUP": q.shape[1] // kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_BLOCK": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": cache.shape[1],
        "FEATURES": features,
        "SLOT_SIZE": cache.stride(1),
        "SCALED": cache.dtype == FP8,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


@triton.jit
def load_slopes(slopes_ptr, head, there, FEATURES: tl.constexpr):
    """The ALiBi slope of each line's head, in units of scores before their scaling; 0 without
    ALiBi.
    """
    if ALIBI & FEATURES:
        slope = tl.load(slopes_ptr + head, mask=there, other=0.0)
    else:
        slope = tl.zeros_like(head).to(tl.float32)
    return slope


@triton.jit
def first_state(sinks_ptr, head, has_sink, score_scale, FEATURES: tl.constexpr):
    """The peak and the total of the online softmax before the first key. A sink counts like a key
    that has the value zero. `has_sink` says which lines count it.
    """
    peak = tl.zeros_like(head).to(tl.float32) + NOTHING_SEEN
    total = tl.zeros_like(head).to(tl.float32)
    if SINKS & FEATURES:
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=0.0).to(tl.float32)
        peak = tl.where(has_sink, sink * LOG2_E / score_scale, peak)
        total = tl.where(has_sink, 1.0, total)
    return peak, total


@triton.jit
def load_where(ptr, exists, MASKED: tl.constexpr):
    """Loads values, with zeros where none exist. Without MASKED, all are known to exist."""
    return tl.load(ptr, mask=exists, other=0.0) if MASKED else tl.load(ptr)


@triton.jit
def load_fp8(words_ptr, exists, HEAD_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """Loads float8 vectors (N, H), four numbers at a time, as float16 numbers.

    Triton's own conversion would come after the numbers are laid out for tensor cores, which takes
    a load of a single byte for each.
    """
    word = tl.arange(0, HEAD_BLOCK // 4)
    inside = exists[:, None] & (word < HEAD_DIM // 4)[None, :]
    words = tl.load(words_ptr + word[None, :], mask=inside, other=0)
    low, high = fp8_to_float16(words)
    even = tl.join((low & 0xFFFF).to(tl.int16), (high & 0xFFFF).to(tl.int16))
    odd = tl.join((low >> 16).to(tl.int16), (high >> 16).to(tl.int16))
    bits = tl.reshape(tl.join(even, odd), (words.shape[0], HEAD_BLOCK))
    values = bits.to(tl.float16, bitcast=True)
    return values if FP8_FACTOR == 1.0 else values * FP8_FACTOR


@triton.jit
def attend_span(
    q,
    acc,
    peak,
    total,
    cache_ptr,
    kv_head,
    table_ptr,
    first,
    last,
    query,
    slope,
    score_scale,
    cap_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of queries q (M, H) to the keys at positions first .. last - 1. Updates and returns
    the state of the online softmax: (acc, peak, total), which are the output vectors, the max
    scores and the sums of weights.

    `query` (M,) are the queries' positions, `slope` (M,) the slopes of their heads. Without MASKED,
    all key tiles must be full, and all queries attend to all keys.

    With SCALED, keys and values are in float8. They are multiplied in float16, which has all float8
    numbers, and their scales multiply scores and weights.
    """
    columns = tl.arange(0, HEAD_BLOCK)
    if SCALED:
        q = q.to(tl.float16)
        scales_ptr = (cache_ptr + 2 * KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float32))
        scales_ptr += kv_head
    cache_ptr += kv_head * HEAD_DIM
    for start in tl.range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        exists = position < last
        if WINDOW > 0:  # blocks that the window has left may be freed
            exists = exists & (position + WINDOW > tl.min(query, 0))
        block = load_where(table_ptr + position // BLOCK_SIZE, exists, MASKED)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        place = slot * SLOT_SIZE
        keys_ptr = cache_ptr + place[None, :] + columns[:, None]
        values_ptr = cache_ptr + KV_HEADS * HEAD_DIM + place[:, None] + columns[None, :]
        keys_mask = exists[None, :] & (columns < HEAD_DIM)[:, None]
        keys = load_where(keys_ptr, keys_mask, MASKED or HEAD_BLOCK > HEAD_DIM)
        if SCALED:
            keys = keys.to(tl.float16)
        scores = tl.dot(q, keys, input_precision=PRECISION)
        if SCALED:
            at = scales_ptr + slot * (SLOT_SIZE // 4)
            scores *= load_where(at, exists, MASKED)[None, :]
            value_scale = load_where(at + KV_HEADS, exists, MASKED)
        if SOFTCAP & FEATURES:
            scores = 2 * tl.sigmoid(2 * cap_scale * scores) - 1  # tanh
        if ALIBI & FEATURES:
            scores += slope[:, None] * (position[None, :] - query[:, None])
        if MASKED:
            visible = exists[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] <= query[:, None])
            if WINDOW > 0:
                visible = visible & (query[:, None] - position[None, :] < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores * score_scale - (new_peak * score_scale)[:, None])
        rescale = tl.exp2((peak - new_peak) * score_scale)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        if SCALED:
            words_ptr = (cache_ptr + KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.int32))
            values = load_fp8(words_ptr + place[:, None] // 4, exists, HEAD_DIM, HEAD_BLOCK)
            weights *= VALUE_FACTOR * value_scale[None, :]
        else:
            values_mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
            values = load_where(values_ptr, values_mask, MASKED or HEAD_BLOCK > HEAD_DIM)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def normalised(acc, total, SCALED: tl.constexpr = False):
    """The weighted mean of values. With SCALED, `acc` is a multiple of it, as `attend_span` has
    computed it.
    """
    if SCALED:
        total *= VALUE_FACTOR
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
