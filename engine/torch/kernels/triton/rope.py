"""RoPE, and the write of keys and values to the cache. A program handles one token and a few of its
heads, which may be heads of q, k and v.

A program holds a head in three parts. The first two parts have the same size and are rotated
together. The third part, which may be empty, is not rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.fp8 import FP8
from engine.torch.kernels.triton.assembly import (
    launch_dependents,
    overlapping,
    wait_for_previous,
)
from engine.torch.kernels.triton.fp8 import fp8_scale, scaled_fp8

# Heads per program: _FEW_HEADS in steps with fewer than _MANY_TOKENS tokens, so that there are
# enough programs for the GPU; otherwise _MANY_HEADS. With norms it is always _FEW_HEADS, because
# the number of heads decides in which order squares are added.
_FEW_HEADS, _MANY_HEADS, _MANY_TOKENS = 4, 16, 256


@triton.jit
def _rope_kernel(
    qkv_ptr,
    positions_ptr,
    table_ptr,
    slots_ptr,
    cache_ptr,
    q_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    block_stride,
    offset_stride,
    kind_stride,
    head_stride,
    eps,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORMS: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)  # index among all N + 2 K heads
    columns, rest = tl.arange(0, HALF_BLOCK), 2 * HALF + tl.arange(0, REST_BLOCK)
    exists = (head < HEADS + 2 * KV_HEADS)[:, None]
    in_half, in_rest = exists & (columns < HALF)[None, :], exists & (rest < HEAD_DIM)[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * HEAD_DIM
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos, sin = _load_angles(table_ptr + position * 2 * HALF + columns, columns < HALF, HALF)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if OVERLAPS:
        wait_for_previous()
    first, second, third = _load_head(source, (columns, rest), (in_half, in_rest), HALF)
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    if NORMS:
        norms, kinds = (q_norm_ptr, k_norm_ptr), (is_query, is_value)
        parts, places = (first, second, third), (columns, rest)
        first, second, third = _normalised(parts, places, norms, kinds, eps, HALF, HEAD_DIM)
    turned_first = tl.where(is_value, first, first * cos - second * sin)
    turned_second = tl.where(is_value, second, second * cos + first * sin)
    cached = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride
    kv_head = head - HEADS
    kind = (kv_head >= KV_HEADS).to(tl.int64)
    in_cache = cached + kind * kind_stride + (kv_head - kind * KV_HEADS) * head_stride
    in_queries = q_ptr + (token * HEADS + head) * HEAD_DIM
    parts, places = (turned_first, turned_second, third), (columns, rest)
    _store_head(in_queries[:, None], parts, places, (in_half & is_query, in_rest & is_query), HALF)
    if SCALED:
        scales_ptr = (cached + 2 * KV_HEADS * HEAD_DIM).to(tl.pointer_type(tl.float32))
        is_cached = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
        parts = _scaled_parts(parts, scales_ptr + kv_head, is_cached)
    _store_head(in_cache[:, None], parts, places, (in_half & ~is_query, in_rest & ~is_query), HALF)


@triton.jit
def _load_angles(angle_ptr, here, HALF: tl.constexpr):
    cos = tl.load(angle_ptr, mask=here, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=here, other=0.0)[None, :]
    return cos, sin


@triton.jit
def _load_head(source, places, masks, HALF: tl.constexpr):
    columns, rest = places
    in_half, in_rest = masks
    first = tl.load(source + columns[None, :], mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + columns[None, :], mask=in_half, other=0.0).to(tl.float32)
    third = tl.load(source + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    return first, second, third


@triton.jit
def _normalised(parts, places, norms, kinds, eps, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The three parts of each head after RMSNorm. Heads of values are left as they are."""
    first, second, third = parts
    columns, rest = places
    q_norm_ptr, k_norm_ptr = norms
    is_query, is_value = kinds
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(third * third, 1)
    scale = tl.where(is_value, 1.0, tl.rsqrt(squares / HEAD_DIM + eps)[:, None])
    first *= scale * _weight(q_norm_ptr, k_norm_ptr, columns, HALF, is_query, is_value)
    second *= scale * _weight(
        q_norm_ptr + HALF, k_norm_ptr + HALF, columns, HALF, is_query, is_value
    )
    third *= scale * _weight(q_norm_ptr, k_norm_ptr, rest, HEAD_DIM, is_query, is_value)
    return first, second, third


@triton.jit
def _scaled_parts(parts, scale_ptr, here):
    """The parts of each head in FP8. Their scale, by the largest value, goes to the cache."""
    first, second, third = parts
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    largest = tl.maximum(largest, tl.max(tl.abs(third), 1))
    lost = tl.sum(first - first, 1) + tl.sum(second - second, 1)
    scale = fp8_scale(largest, lost + tl.sum(third - third, 1))
    tl.store(scale_ptr, scale, mask=here)
    scale = scale[:, None]
    return scaled_fp8(first, scale), scaled_fp8(second, scale), scaled_fp8(third, scale)


@triton.jit
def _store_head(target, parts, places, masks, HALF: tl.constexpr):
    first, second, third = parts
    columns, rest = places
    in_half, in_rest = masks
    tl.store(target + columns[None, :], first, mask=in_half)
    tl.store(target + HALF + columns[None, :], second, mask=in_half)
    tl.store(target + rest[None, :], third, mask=in_rest)


@triton.jit
def _weight(q_norm_ptr, k_norm_ptr, columns, END: tl.constexpr, is_query, is_value):
    """The norm weight for each head: that of the query norm for queries, that of the key norm for
    keys, and 1 for values.
    """
    for_q = tl.load(q_norm_ptr + columns, mask=columns < END, other=0.0).to(tl.float32)
    for_k = tl.load(k_norm_ptr + columns, mask=columns < END, other=0.0).to(tl.float32)
    return tl.where(is_query, for_q[None, :], tl.where(is_value, 1.0, for_k[None, :]))


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_table: Tensor,
    write_slots: Tensor,
    cache_layer: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    tokens, half = qkv.shape[0], cos_sin_table.shape[1] // 2
    assert cache_layer.stride(4) == 1 and cos_sin_table.is_contiguous()
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    group = _FEW_HEADS if tokens < _MANY_TOKENS or q_norm is not None else _MANY_HEADS
    grid = (tokens, triton.cdiv(heads + 2 * kv_heads, group))
    _rope_kernel[grid](
        qkv,
        positions,
        cos_sin_table,
        write_slots,
        cache_layer,
        q,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        qkv.stride(0),
        *cache_layer.stride()[:4],
        eps,
        BLOCK_SIZE=cache_layer.shape[1],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        GROUP=group,
        NORMS=q_norm is not None,
        SCALED=cache_layer.dtype == FP8,
        num_warps=2 if group == _FEW_HEADS else 4,
        **overlapping(qkv),
    )
    return q
