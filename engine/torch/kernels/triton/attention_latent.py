"""Latent attention over the paged cache, for rows with one query (decode) and with several queries
(prefill).

The cache has one vector per token: the latent, then the rotated key. A program scores latents and
rotated keys, and uses the same latents as values, so that it reads each of them once. All heads
share the cache. A program handles a group of heads, and the groups take the place of KV heads in
the work lists. Decode cuts the keys of long rows into spans, as `attention_decode.py` does.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    Scratch,
)
from engine.torch.kernels.triton.attention_decode import merged_spans
from engine.torch.kernels.triton.attention_tile import (
    NOTHING_SEEN,
    Tile,
    normalised,
    scales,
)

_SPAN_ARRAYS = ("counts", "spans", "partials", "query_start", "seq_lens", "tables")
_TILE_ARRAYS = ("counts", "tiles", "query_start", "seq_lens", "tables")


@triton.jit
def _load_queries(
    q_ptr,
    heads,
    there,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """The part of the queries that scores latents, and the part that scores rotated keys."""
    columns, turned = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    place = q_ptr + heads[:, None] * (LATENT + ROPE)
    scoring = there[:, None] & (columns < LATENT)[None, :]
    rotated = there[:, None] & (turned < ROPE)[None, :]
    plain = tl.load(place + columns[None, :], mask=scoring, other=0.0)
    return plain, tl.load(place + LATENT + turned[None, :], mask=rotated, other=0.0)


@triton.jit
def _attend_latents(
    plain,
    rotated,
    acc,
    peak,
    total,
    cache_ptr,
    table_ptr,
    first,
    last,
    query,
    score_scale,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of queries to the tokens at positions first .. last - 1. Updates and returns the
    state of the online softmax, as `attend_span` in `attention_tile.py` does.
    """
    columns, turned = tl.arange(0, LATENT_BLOCK), tl.arange(0, ROPE_BLOCK)
    for start in tl.range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        exists = position < last
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        place = cache_ptr + slot * (LATENT + ROPE)
        latents = tl.load(
            place[:, None] + columns[None, :],
            mask=exists[:, None] & (columns < LATENT)[None, :],
            other=0.0,
        )
        keys = tl.load(
            place[None, :] + LATENT + turned[:, None],
            mask=exists[None, :] & (turned < ROPE)[:, None],
            other=0.0,
        )
        scores = tl.dot(rotated, keys, input_precision=PRECISION)
        scores = tl.dot(plain, tl.trans(latents), scores, input_precision=PRECISION)
        visible = exists[None, :]
        if CAUSAL:
            visible = visible & (position[None, :] <= query[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores * score_scale - (new_peak * score_scale)[:, None])
        rescale = tl.exp2((peak - new_peak) * score_scale)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(latents.dtype), latents, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _latent_decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    arrived_ptr,
    counts_ptr,
    spans_ptr,
    partials_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    score_scale,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    own, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(counts_ptr + 1):
        return
    row = tl.load(spans_ptr + item * 4)
    length = tl.load(seq_lens_ptr + row)
    first = tl.load(spans_ptr + item * 4 + 1)
    last = tl.minimum(tl.load(spans_ptr + item * 4 + 2), length)
    partial = tl.load(spans_ptr + item * 4 + 3)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    head, columns = tl.arange(0, GROUP_BLOCK), tl.arange(0, LATENT_BLOCK)
    there = head < GROUP
    heads = (token * GROUPS + own) * GROUP + head
    plain, rotated = _load_queries(q_ptr, heads, there, LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK)
    acc, peak, total = _attend_latents(
        plain,
        rotated,
        tl.zeros((GROUP_BLOCK, LATENT_BLOCK), tl.float32),
        tl.full((GROUP_BLOCK,), NOTHING_SEEN, tl.float32),
        tl.zeros((GROUP_BLOCK,), tl.float32),
        cache_ptr,
        tables_ptr + tl.load(counts_ptr + 4) + row.to(tl.int64) * tl.load(counts_ptr),
        first,
        last,
        head,
        score_scale,
        LATENT,
        LATENT_BLOCK,
        ROPE,
        ROPE_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        PRECISION,
    )
    result = normalised(acc, total)
    here = there[:, None] & (columns < LATENT)[None, :]
    place = out_ptr + heads[:, None] * LATENT + columns[None, :]
    count = tl.load(partials_ptr + row * 2 + 1)
    if count == 1:
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=here)
        return
    slot = (partial * GROUPS + own).to(tl.int64) * GROUP + head
    tl.store(partial_ptr + slot[:, None] * LATENT + columns[None, :], result, mask=here)
    tl.store(weight_ptr + slot, peak * score_scale + tl.log2(total), mask=there)
    tl.debug_barrier()
    arrived = arrived_ptr + row * GROUPS + own
    if tl.atomic_add(arrived, 1) == count - 1:
        tl.store(arrived, 0)
        merged = merged_spans(
            partial_ptr,
            weight_ptr,
            tl.load(partials_ptr + row * 2),
            count,
            own,
            GROUPS,
            GROUP,
            GROUP_BLOCK,
            LATENT,
            LATENT_BLOCK,
        )
        tl.store(place, merged.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _latent_prefill_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    counts_ptr,
    tiles_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    score_scale,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    own, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(counts_ptr + 2):
        return
    row = tl.load(tiles_ptr + item * 2)
    first_query = tl.load(tiles_ptr + item * 2 + 1)
    row_start = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - row_start
    length = tl.load(seq_lens_ptr + row)
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, LATENT_BLOCK)
    offset, head = first_query + lane // GROUP, lane % GROUP
    there = (lane < TOKENS * GROUP) & (offset < num_queries)
    heads = ((row_start + offset).to(tl.int64) * GROUPS + own) * GROUP + head
    plain, rotated = _load_queries(q_ptr, heads, there, LATENT, LATENT_BLOCK, ROPE, ROPE_BLOCK)
    query = length - num_queries + offset
    acc, _, total = _attend_latents(
        plain,
        rotated,
        tl.zeros((BLOCK_M, LATENT_BLOCK), tl.float32),
        tl.full((BLOCK_M,), NOTHING_SEEN, tl.float32),
        tl.zeros((BLOCK_M,), tl.float32),
        cache_ptr,
        tables_ptr + tl.load(counts_ptr + 4) + row.to(tl.int64) * tl.load(counts_ptr),
        0,
        tl.minimum(length - num_queries + first_query + TOKENS, length),
        query,
        score_scale,
        LATENT,
        LATENT_BLOCK,
        ROPE,
        ROPE_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        PRECISION,
    )
    here = there[:, None] & (columns < LATENT)[None, :]
    place = out_ptr + heads[:, None] * LATENT + columns[None, :]
    tl.store(place, normalised(acc, total).to(out_ptr.dtype.element_ty), mask=here)


def _sizes(q: Tensor, cache: Tensor, heads: AttentionHeads, group: int) -> dict[str, Any]:
    """The compile-time constants of both kernels, for a cache (B, block size, 1, 1, H)."""
    assert cache.is_contiguous() and q.is_contiguous(), "kernels know strides from shapes"
    rope_dim = heads.head_dim - heads.latent
    return {
        "GROUPS": heads.num_heads // group,
        "GROUP": group,
        "LATENT": heads.latent,
        "LATENT_BLOCK": max(16, triton.next_power_of_2(heads.latent)),
        "ROPE": rope_dim,
        "ROPE_BLOCK": max(16, triton.next_power_of_2(rope_dim)),
        "BLOCK_SIZE": cache.shape[1],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    scratch: Scratch,
    heads: AttentionHeads,
    group: int,
    tile: Tile,
) -> None:
    """Computes the attention of all rows with one query and writes the results to `out`. `group` is
    the number of heads of a program.
    """
    _latent_decode_kernel[(heads.num_heads // group, len(arrays["spans"]))](
        q,
        cache,
        out,
        scratch.partial,
        scratch.weight,
        scratch.arrived,
        *map(arrays.__getitem__, _SPAN_ARRAYS),
        scales(heads)[0],
        GROUP_BLOCK=max(16, triton.next_power_of_2(group)),
        BLOCK_N=tile.keys,
        **_sizes(q, cache, heads, group),
        num_warps=tile.warps,
        num_stages=num_stages(tile.stages),
    )


def prefill(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    heads: AttentionHeads,
    group: int,
    tile: Tile,
) -> None:
    """Computes the attention of all rows with several queries and writes the results to `out`."""
    _latent_prefill_kernel[(heads.num_heads // group, len(arrays["tiles"]))](
        q,
        cache,
        out,
        *map(arrays.__getitem__, _TILE_ARRAYS),
        scales(heads)[0],
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        **_sizes(q, cache, heads, group),
        num_warps=tile.warps,
        num_stages=num_stages(tile.stages),
    )
