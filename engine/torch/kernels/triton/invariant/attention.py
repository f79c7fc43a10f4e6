"""The Triton kernel of `kernels/invariant/attention.py`, for rows with one query and with several.
The two kinds of rows have launches of their own, with tiles of different sizes.

The keys of a row are cut into chunks at fixed positions. A chunk is computed alone, and the results
of chunks are merged in ascending order. A program handles some queries of one row, with all heads
that share a KV head, and some chunks. If a program has all chunks of its queries, it merges them in
registers. Otherwise the program of the row that finishes last merges them in memory, by the same
operations.

A query that does not attend to a key gives it the weight zero, which changes no sum. So a result
depends neither on the other queries of a tile nor on the number of programs of a row.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    Scratch,
)
from engine.torch.kernels.triton.assembly import (
    launch_dependents,
    overlapping,
    wait_for_previous,
)
from engine.torch.kernels.triton.attention_decode import (
    merge,
    merged_spans,
)
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

_ALL_KEYS = tl.constexpr(1 << 30)
_ARRAYS = ("partials", "query_start", "seq_lens", "tables")


@triton.jit
def _attend_chunk(q, source, lines, keys, scales, CACHE: tl.constexpr, TILE: tl.constexpr):
    """The attention of the queries q to one chunk of keys: the weighted mean of its values, and the
    logarithm of the sum of weights. `lines` describes the queries. `keys` has the first position of
    the chunk, the first key that a query attends to, and the end of the keys.
    """
    cache_ptr, table_ptr, sinks_ptr, kv_head = source
    there, query, head, slope = lines
    start, seen, end = keys
    score_scale, cap_scale = scales
    HEAD_BLOCK: tl.constexpr = CACHE[2]
    SCALED: tl.constexpr = CACHE[5]
    CHUNK: tl.constexpr = TILE[2]
    FEATURES: tl.constexpr = TILE[4]
    has_sink = there & (query >= start) & (query < start + CHUNK)
    peak, total = first_state(sinks_ptr, head, has_sink, score_scale, FEATURES)
    acc, peak, total = attend_span(
        q,
        tl.zeros((TILE[0], HEAD_BLOCK), tl.float32),
        peak,
        total,
        cache_ptr,
        kv_head,
        table_ptr,
        tl.maximum(start, seen),
        tl.minimum(start + CHUNK, end),
        query,
        slope,
        score_scale,
        cap_scale,
        CACHE[0],
        CACHE[1],
        HEAD_BLOCK,
        CACHE[3],
        TILE[1],
        CACHE[4],
        SCALED,
        True,
        True,
        TILE[3],
        FEATURES,
        TILE[5],
    )
    return normalised(acc, total, SCALED), peak * score_scale + tl.log2(total)


@triton.jit
def _work_item(items_ptr, partials_ptr, item, PROMPTS: tl.constexpr):
    """The row of a work item, its first query, its first key, the end of its keys, and the row's
    first partial result and number of partial results.

    With PROMPTS, items are tiles of queries: (row, first query). Else they are spans of the keys of
    rows with one query: (row, first key, last key + 1, unused).
    """
    if PROMPTS:
        row, first_query = tl.load(items_ptr + item * 2), tl.load(items_ptr + item * 2 + 1)
        first, last = tl.zeros_like(row), tl.full((), _ALL_KEYS, tl.int32)
        first_partial, count = tl.zeros_like(row), tl.full((), 1, tl.int32)
    else:
        row = tl.load(items_ptr + item * 4)
        first_query = tl.zeros_like(row)
        first, last = tl.load(items_ptr + item * 4 + 1), tl.load(items_ptr + item * 4 + 2)
        first_partial, count = tl.load(partials_ptr + row * 2), tl.load(partials_ptr + row * 2 + 1)
    return row, first_query, first, last, first_partial, count


@triton.jit
def _has_item(counts_ptr, item, PROMPTS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Whether a program has a work item. One without an item waits for the previous kernel too, so
    that this kernel never ends before that one.
    """
    if OVERLAPS:
        launch_dependents()
    is_there = item < tl.load(counts_ptr + (2 if PROMPTS else 1))
    if OVERLAPS:  # noqa: SIM102 - known when it is compiled
        if not is_there:
            wait_for_previous()
    return is_there


@triton.jit
def _load_queries(places, here, OVERLAPS: tl.constexpr):
    """The previous kernel writes the queries, and their keys and values. Work lists are older."""
    if OVERLAPS:
        wait_for_previous()
    return tl.load(places, mask=here, other=0.0)


@triton.jit
def _first_seen(first_position, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first key that a query at this position attends to, rounded down to a tile."""
    seen = tl.zeros_like(first_position)
    if WINDOW > 0:
        seen = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return seen


@triton.jit
def _attention_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    partial_ptr,
    weight_ptr,
    arrived_ptr,
    counts_ptr,
    items_ptr,
    partials_ptr,
    query_start_ptr,
    seq_lens_ptr,
    tables_ptr,
    slopes_ptr,
    sinks_ptr,
    score_scale,
    cap_scale,
    PROMPTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    SLOT_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if not _has_item(counts_ptr, item, PROMPTS, OVERLAPS):
        return
    row, first_query, first, last, first_partial, count = _work_item(
        items_ptr, partials_ptr, item, PROMPTS
    )
    row_start, length = tl.load(query_start_ptr + row), tl.load(seq_lens_ptr + row)
    num_queries = tl.load(query_start_ptr + row + 1) - row_start
    lane, columns = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_BLOCK)
    offset, head = first_query + lane // GROUP, lane % GROUP
    there = (lane < TOKENS * GROUP) & (offset < num_queries)
    here = there[:, None] & (columns < HEAD_DIM)[None, :]
    heads = ((row_start + offset).to(tl.int64) * KV_HEADS + kv_head) * GROUP + head
    place = heads[:, None] * HEAD_DIM + columns[None, :]
    q = _load_queries(q_ptr + place, here, OVERLAPS)
    first_position, query = length - num_queries + first_query, length - num_queries + offset
    end = tl.minimum(last, tl.minimum(first_position + TOKENS, length))
    seen = _first_seen(first_position, WINDOW, BLOCK_N)
    if count == 1:  # a row in memory has a partial result of each chunk, also of an empty one
        first = tl.maximum(first, seen)
    table_ptr = tables_ptr + tl.load(counts_ptr + 4) + row.to(tl.int64) * tl.load(counts_ptr)
    own_head = kv_head * GROUP + head
    lines = (there, query, own_head, load_slopes(slopes_ptr, own_head, there, FEATURES))
    acc = tl.zeros((BLOCK_M, HEAD_BLOCK), tl.float32)
    peak, total = tl.full((BLOCK_M,), NOTHING_SEEN, tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for chunk in tl.range(first // CHUNK, (end + CHUNK - 1) // CHUNK):
        part, weight = _attend_chunk(
            q,
            (cache_ptr, table_ptr, sinks_ptr, kv_head),
            lines,
            (chunk * CHUNK, seen, end),
            (score_scale, cap_scale),
            (KV_HEADS, HEAD_DIM, HEAD_BLOCK, BLOCK_SIZE, SLOT_SIZE, SCALED),
            (BLOCK_M, BLOCK_N, CHUNK, WINDOW, FEATURES, PRECISION),
        )
        if not PROMPTS:  # noqa: SIM102 - known when it is compiled
            if count > 1:
                slot = ((first_partial + chunk) * KV_HEADS + kv_head).to(tl.int64) * GROUP + head
                values_ptr = partial_ptr + slot[:, None] * HEAD_DIM + columns[None, :]
                tl.store(values_ptr, part, mask=here)
                tl.store(weight_ptr + slot, weight, mask=there)
        acc, peak, total = merge(acc, peak, total, part, weight)
    result = normalised(acc, total)
    if PROMPTS:  # noqa: SIM114 - known when it is compiled
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=here)
    elif count == 1:
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=here)
    else:
        done = (end + CHUNK - 1) // CHUNK - first // CHUNK
        arrived_ptr += row * KV_HEADS + kv_head
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, done) + done == count:
            tl.store(arrived_ptr, 0)
            merged = merged_spans(
                partial_ptr,
                weight_ptr,
                first_partial,
                count,
                kv_head,
                KV_HEADS,
                GROUP,
                BLOCK_M,
                HEAD_DIM,
                HEAD_BLOCK,
            )
            tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=here)


def attend(
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
    prompts: bool,
    tile: Tile,
    chunk: int,
) -> None:
    """Computes the attention of the rows with several queries (`prompts`) or of those with one, and
    writes the results to `out`. `arrays` has the work lists of the step. `slopes` are in units of
    scores before their scaling. `chunk` is the number of keys of a chunk.
    """
    items = arrays["tiles" if prompts else "spans"]
    _attention_kernel[(cache.shape[3], len(items))](
        q,
        cache,
        out,
        scratch.partial,
        scratch.weight,
        scratch.arrived,
        arrays["counts"],
        items,
        *map(arrays.__getitem__, _ARRAYS),
        q if slopes is None else slopes,
        q if sinks is None else sinks,
        *scales(heads),
        PROMPTS=prompts,
        **sizes(q, cache, heads),
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        CHUNK=chunk,
        WINDOW=window,
        TOKENS=tile.queries * cache.shape[3] // q.shape[1],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapping(q),
    )
