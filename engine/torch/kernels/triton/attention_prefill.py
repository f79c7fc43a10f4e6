"""Attention of rows with several queries (prefill) over the paged cache. Rows may have different
lengths.

A program handles a tile of one row's queries, with all query heads that share a KV head. A line of
the tile is the query of one token and one head. The program first reads the keys that all queries
of the tile attend to, and needs no mask for them. Then it reads the other keys, with a causal mask.
With a sliding window, all keys are masked.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages
from engine.torch.kernels.attention_heads import AttentionHeads
from engine.torch.kernels.triton.attention_tile import (
    Tile,
    attend_span,
    first_state,
    load_slopes,
    normalised,
    scales,
    sizes,
)


@triton.jit
def _prefill_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    counts_ptr,
    tiles_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    slopes_ptr,
    sinks_ptr,
    score_scale,
    cap_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(counts_ptr + 2):
        return
    row = tl.load(tiles_ptr + item * 2)
    first_query = tl.load(tiles_ptr + item * 2 + 1)
    row_start = tl.load(query_start_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - row_start
    length = tl.load(seq_lens_ptr + row)
    table_ptr = tables_ptr + tl.load(counts_ptr + 4) + row.to(tl.int64) * tl.load(counts_ptr)
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_BLOCK)
    offset, head = first_query + lane // GROUP, lane % GROUP
    there = (lane < TOKENS * GROUP) & (offset < num_queries)
    here = there[:, None] & (columns < HEAD_DIM)[None, :]
    heads = ((row_start + offset).to(tl.int64) * KV_HEADS + kv_head) * GROUP + head
    place = heads[:, None] * HEAD_DIM + columns[None, :]
    q = tl.load(q_ptr + place, mask=here, other=0.0)
    first_position = length - num_queries + first_query
    query = length - num_queries + offset
    end = tl.minimum(first_position + TOKENS, length)
    acc = tl.zeros((BLOCK_M, HEAD_BLOCK), tl.float32)
    own_head = kv_head * GROUP + head
    slope = load_slopes(slopes_ptr, own_head, there, FEATURES)
    peak, total = first_state(sinks_ptr, own_head, there, score_scale, FEATURES)
    if WINDOW > 0:
        whole = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        whole = (first_position + 1) // BLOCK_N * BLOCK_N
    # With a window, all keys are masked. A first pass without a mask has no keys then.
    for masked in tl.static_range(WINDOW > 0, 2):
        acc, peak, total = attend_span(
            q,
            acc,
            peak,
            total,
            cache_ptr,
            kv_head,
            table_ptr,
            whole if masked else 0,
            end if masked else whole,
            query,
            slope,
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
            True,
            WINDOW,
            FEATURES,
            PRECISION,
        )
    result = normalised(acc, total, SCALED)
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=here)


def prefill(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    heads: AttentionHeads,
    *,
    window: int,
    slopes: Tensor | None,
    sinks: Tensor | None,
    tokens: int,
    tile: Tile,
) -> None:
    """Computes the attention of all rows with several queries and writes the results to `out`.
    `arrays` has the work lists of the step, whose tiles have `tokens` tokens each. `slopes` are in
    units of scores before their scaling.
    """
    compiled_for = sizes(q, cache, heads)
    _prefill_kernel[(cache.shape[3], len(arrays["tiles"]))](
        q,
        cache,
        out,
        arrays["counts"],
        arrays["tiles"],
        arrays["query_start"],
        arrays["seq_lens"],
        arrays["tables"],
        q if slopes is None else slopes,
        q if sinks is None else sinks,
        *scales(heads),
        **compiled_for,
        BLOCK_M=max(16, triton.next_power_of_2(tokens * compiled_for["GROUP"])),
        TOKENS=tokens,
        BLOCK_N=tile.keys,
        WINDOW=window,
        num_warps=tile.warps,
        num_stages=num_stages(tile.stages),
    )
