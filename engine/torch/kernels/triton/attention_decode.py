"""Attention of rows with one query (decode), with split-K. The keys of long rows are cut into
spans, and the partial results of the spans are merged.

A program handles one span of a row and one KV head, with all query heads that share this KV head.
If a row has several spans, the program that finishes last merges their results. So this takes only
one launch. If rows share a prefix, a separate kernel merges the results at the end.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    Scratch,
)
from engine.torch.kernels.cuda import decode as hopper
from engine.torch.kernels.triton.attention_tile import (
    NOTHING_SEEN,
    Tile,
    attend_span,
    first_state,
    load_slopes,
    normalised,
    scales,
    sizes,
)

_SHARED_ARRAYS = ("counts", "shared", "members", "partials", "query_start", "tables")
_SPAN_ARRAYS = ("counts", "spans", "partials", "query_start", "seq_lens", "tables")
_MERGE_SIZES = ("KV_HEADS", "GROUP", "HEAD_DIM", "HEAD_BLOCK")


@triton.jit
def _decode_kernel(
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
    slopes_ptr,
    sinks_ptr,
    score_scale,
    cap_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MERGES: tl.constexpr,
    FEATURES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(counts_ptr + 1):
        return
    row = tl.load(spans_ptr + item * 4)
    length, count = tl.load(seq_lens_ptr + row), tl.load(partials_ptr + row * 2 + 1)
    first, partial = tl.load(spans_ptr + item * 4 + 1), tl.load(spans_ptr + item * 4 + 3)
    last = tl.minimum(tl.load(spans_ptr + item * 4 + 2), length)
    if WINDOW > 0:
        first = tl.maximum(first, (length - WINDOW) // BLOCK_SIZE * BLOCK_SIZE)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    group, columns = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    here = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    place = ((token * KV_HEADS + kv_head) * GROUP + group)[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + place, mask=here, other=0.0)
    acc, query = tl.zeros((GROUP_BLOCK, HEAD_BLOCK), tl.float32), tl.zeros_like(group) + length - 1
    own_head, is_last = kv_head * GROUP + group, query < last  # the last span counts the sink
    peak, total = first_state(sinks_ptr, own_head, is_last & (group < GROUP), score_scale, FEATURES)
    acc, peak, total = attend_span(
        q,
        acc,
        peak,
        total,
        cache_ptr,
        kv_head,
        tables_ptr + tl.load(counts_ptr + 4) + row.to(tl.int64) * tl.load(counts_ptr),
        first,
        last,
        query,
        load_slopes(slopes_ptr, own_head, group < GROUP, FEATURES),
        score_scale,
        cap_scale,
        KV_HEADS,
        HEAD_DIM,
        HEAD_BLOCK,
        BLOCK_SIZE,
        BLOCK_N,
        SLOT_SIZE,
        SCALED,
        True,
        False,
        WINDOW,
        FEATURES,
        PRECISION,
    )
    result = normalised(acc, total, SCALED)
    if MERGES and count == 1:
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=here)
        return
    slot = (partial * KV_HEADS + kv_head).to(tl.int64) * GROUP + group
    tl.store(partial_ptr + slot[:, None] * HEAD_DIM + columns[None, :], result, mask=here)
    tl.store(weight_ptr + slot, peak * score_scale + tl.log2(total), mask=group < GROUP)
    arrived_ptr += row * KV_HEADS + kv_head
    if MERGES:
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1) == count - 1:
            tl.store(arrived_ptr, 0)
            merged = merged_spans(
                partial_ptr,
                weight_ptr,
                tl.load(partials_ptr + row * 2),
                count,
                kv_head,
                KV_HEADS,
                GROUP,
                GROUP_BLOCK,
                HEAD_DIM,
                HEAD_BLOCK,
            )
            tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def merge(acc, peak, total, part, weight):
    """Adds a partial result, whose keys have the softmax weight 2 ** `weight`, to the state of
    results that are merged already. The FMA is explicit, so that every caller rounds alike.
    """
    new_peak = tl.maximum(peak, weight)
    rescale, share = tl.exp2(peak - new_peak), tl.exp2(weight - new_peak)
    acc = tl.fma(acc, rescale[:, None], part * share[:, None])
    return acc, new_peak, tl.fma(total, rescale, share)


@triton.jit
def merged_spans(
    partial_ptr,
    weight_ptr,
    first,
    count,
    kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    """Merges the partial results of a row: computes their weighted mean. Other programs wrote the
    partial results, so they must be loaded past the L1 cache.
    """
    group, columns = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    here = (group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    acc = tl.zeros((GROUP_BLOCK, HEAD_BLOCK), tl.float32)
    peak = tl.full((GROUP_BLOCK,), NOTHING_SEEN, tl.float32)
    total = tl.zeros((GROUP_BLOCK,), tl.float32)
    for index in tl.range(0, count):
        slot = ((first + index) * KV_HEADS + kv_head).to(tl.int64) * GROUP + group
        weight = tl.load(weight_ptr + slot, mask=group < GROUP, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_ptr + slot[:, None] * HEAD_DIM + columns[None, :],
            mask=here,
            other=0.0,
            cache_modifier=".cg",
        )
        acc, peak, total = merge(acc, peak, total, part, weight)
    return normalised(acc, total)


@triton.jit
def _merge_kernel(
    out_ptr,
    partial_ptr,
    weight_ptr,
    partials_ptr,
    query_start_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
):
    kv_head, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(partials_ptr + row * 2 + 1)
    if count == 0:
        return
    merged = merged_spans(
        partial_ptr,
        weight_ptr,
        tl.load(partials_ptr + row * 2),
        count,
        kv_head,
        KV_HEADS,
        GROUP,
        GROUP_BLOCK,
        HEAD_DIM,
        HEAD_BLOCK,
    )
    group, columns = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    token = tl.load(query_start_ptr + row).to(tl.int64)
    heads = (token * KV_HEADS + kv_head) * GROUP + group
    tl.store(
        out_ptr + heads[:, None] * HEAD_DIM + columns[None, :],
        merged.to(out_ptr.dtype.element_ty),
        mask=(group < GROUP)[:, None] & (columns < HEAD_DIM)[None, :],
    )


@triton.jit
def _shared_kernel(
    q_ptr,
    cache_ptr,
    partial_ptr,
    weight_ptr,
    counts_ptr,
    shared_ptr,
    members_ptr,
    partials_ptr,
    query_start_ptr,
    tables_ptr,
    score_scale,
    cap_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the attention of many rows to a span of their shared prefix. The keys are read once
    for all these rows. Writes a partial result per row.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(counts_ptr + 3):
        return
    first_member = tl.load(shared_ptr + item * 5)
    num_members = tl.load(shared_ptr + item * 5 + 1)
    first = tl.load(shared_ptr + item * 5 + 2)
    last = tl.load(shared_ptr + item * 5 + 3)
    split = tl.load(shared_ptr + item * 5 + 4)
    table_stride = tl.load(counts_ptr)
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_BLOCK)
    member, head = lane // GROUP, lane % GROUP
    there = member < num_members
    row = tl.load(members_ptr + first_member + member, mask=there, other=0)
    token = tl.load(query_start_ptr + row, mask=there, other=0).to(tl.int64)
    here = there[:, None] & (columns < HEAD_DIM)[None, :]
    heads = (token * KV_HEADS + kv_head) * GROUP + head
    q = tl.load(q_ptr + heads[:, None] * HEAD_DIM + columns[None, :], mask=here, other=0.0)
    acc = tl.zeros((BLOCK_M, HEAD_BLOCK), tl.float32)
    peak = tl.full((BLOCK_M,), NOTHING_SEEN, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    owner = tl.load(members_ptr + first_member).to(tl.int64)
    whole = first + (last - first) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(2):
        acc, peak, total = attend_span(
            q,
            acc,
            peak,
            total,
            cache_ptr,
            kv_head,
            tables_ptr + owner * table_stride,
            whole if masked else first,
            last if masked else whole,
            lane,
            total,  # stands for slopes: models with ALiBi do not share
            score_scale,
            cap_scale,
            KV_HEADS,
            HEAD_DIM,
            HEAD_BLOCK,
            BLOCK_SIZE,
            BLOCK_N,
            SLOT_SIZE,
            SCALED,
            masked == 1,
            False,
            0,
            FEATURES,
            PRECISION,
        )
    partial = tl.load(partials_ptr + row * 2, mask=there, other=0) + split
    slot = (partial * KV_HEADS + kv_head).to(tl.int64) * GROUP + head
    tl.store(
        partial_ptr + slot[:, None] * HEAD_DIM + columns[None, :],
        normalised(acc, total, SCALED),
        mask=here,
    )
    tl.store(weight_ptr + slot, peak * score_scale + tl.log2(total), mask=there)


def decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    scratch: Scratch,
    heads: AttentionHeads,
    *,
    window: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    shares: bool,
    on_hopper: bool,
    span_tile: Tile,
    shared_tile: Tile,
) -> None:
    """Computes the attention of all rows with one query and writes the results to `out`. `arrays`
    has the work lists of the step. `slopes` are in units of scores before their scaling. `shares`
    says whether the step has work items for shared prefixes. With `on_hopper`, a CUDA kernel
    computes the spans.
    """
    kv_heads, compiled_for = cache.shape[3], sizes(q, cache, heads)
    group_block = max(16, triton.next_power_of_2(compiled_for["GROUP"]))
    if shares:
        _attend_shared(q, cache, arrays, scratch, heads, shared_tile, group_block)
    if on_hopper:
        hopper.decode(
            q, cache, out, arrays, scratch, window=window, scale=heads.scale, merges=not shares
        )
    else:
        _decode_kernel[(kv_heads, len(arrays["spans"]))](
            q,
            cache,
            out,
            scratch.partial,
            scratch.weight,
            scratch.arrived,
            *map(arrays.__getitem__, _SPAN_ARRAYS),
            q if slopes is None else slopes,
            q if sinks is None else sinks,
            *scales(heads),
            GROUP_BLOCK=group_block,
            BLOCK_N=span_tile.keys,
            WINDOW=window,
            MERGES=not shares,
            **compiled_for,
            num_warps=span_tile.warps,
            num_stages=num_stages(span_tile.stages),
        )
    if shares:
        _merge_kernel[(kv_heads, len(arrays["partials"]))](
            out,
            scratch.partial,
            scratch.weight,
            arrays["partials"],
            arrays["query_start"],
            GROUP_BLOCK=group_block,
            **{name: compiled_for[name] for name in _MERGE_SIZES},
            num_warps=2,
        )


def _attend_shared(
    q: Tensor,
    cache: Tensor,
    arrays: Mapping[str, Tensor],
    scratch: Scratch,
    heads: AttentionHeads,
    tile: Tile,
    group_block: int,
) -> None:
    """Attention over the prefixes that rows share. The results go to `scratch`."""
    _shared_kernel[(cache.shape[3], len(arrays["shared"]))](
        q,
        cache,
        scratch.partial,
        scratch.weight,
        *map(arrays.__getitem__, _SHARED_ARRAYS),
        *scales(heads),
        BLOCK_M=max(tile.queries, group_block),
        BLOCK_N=tile.keys,
        **sizes(q, cache, heads),
        num_warps=tile.warps,
        num_stages=num_stages(tile.stages),
    )
