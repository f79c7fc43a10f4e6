"""Paged attention as a Pallas kernel for GPUs. There is one program per attention item (see
`work.py`) and KV head.

A program holds the queries of all heads that share its KV head. It reads the context in chunks,
through the block table, and uses an online softmax, so it never stores the scores of the whole
context. Without a GPU, Pallas interprets the kernel; only tests use this.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from engine.jax.kernels.matmul import precision
from engine.jax.kernels.work import (
    AttentionShape,
    PerHead,
    Work,
    scores,
)
from engine.runners.scoring import HIDDEN

CHUNK = 64  # context positions that one loop iteration reads
MIN_DOT = 16  # tensor core matmuls need at least this many rows
Ref = Any


def pallas_attention(
    q: Array, cache: Array, work: Work, shape: AttentionShape, per_head: PerHead
) -> Array:
    """See `AttentionBackend`."""
    group = q.shape[1] // cache.shape[2]  # query heads per KV head
    num_queries = max(MIN_DOT, pl.next_power_of_2(shape.tile * group))
    call = pl.pallas_call(
        partial(_attend, shape=shape, group=group, num_queries=num_queries),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(len(work.token), cache.shape[2]),
        interpret=jax.default_backend() != "gpu",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        name="paged_attention",
    )
    return call(
        *(work.token, work.length, work.row, work.positions, work.tables), q, cache, per_head
    )


def _attend(
    token_ref: Ref,
    count_ref: Ref,
    row_ref: Ref,
    positions_ref: Ref,
    tables_ref: Ref,
    q_ref: Ref,
    cache_ref: Ref,
    per_head: Ref,  # a `PerHead` of references
    out_ref: Ref,
    *,
    shape: AttentionShape,
    group: int,
    num_queries: int,
) -> None:
    item, kv_head = pl.program_id(0), pl.program_id(1)
    count, scoring = count_ref[item], shape.scoring

    @pl.when(count > 0)
    def _() -> None:
        first_token, row = token_ref[item], row_ref[item]
        first = positions_ref[first_token]
        head_dim = q_ref.shape[-1]
        index = jnp.arange(num_queries)
        is_own = index < count * group
        heads = kv_head * group + index % group
        slopes, sinks = (None if each is None else triton.load(each.at[heads]) for each in per_head)
        places = (first_token + index // group)[:, None], heads[:, None]
        dims = jnp.arange(head_dim)[None, :]
        query = q_ref.at[(*places, dims)]
        mask = jnp.broadcast_to(is_own[:, None], (num_queries, head_dim))
        scaled = triton.load(query, mask=mask, other=0.0) * jnp.asarray(scoring.scale, q_ref.dtype)
        positions = first + index // group
        end = first + count  # end of the context that the item's queries may attend to

        def attend_chunk(chunk: Array, state: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            best, total, mixed = state
            at = chunk * CHUNK + jnp.arange(CHUNK)
            is_there = at < end
            if scoring.window is not None:  # blocks that the window has left may be freed
                is_there = is_there & (at > first - scoring.window)
            blocks = triton.load(tables_ref.at[row, at // shape.block_size], mask=is_there, other=0)
            slots = (blocks * shape.block_size + at % shape.block_size)[:, None]
            wide = jnp.broadcast_to(is_there[:, None], (CHUNK, head_dim))
            keys = triton.load(cache_ref.at[slots, 0, kv_head, dims], mask=wide, other=0.0)
            values = triton.load(cache_ref.at[slots, 1, kv_head, dims], mask=wide, other=0.0)
            distance = positions[:, None] - at[None, :]
            of_each = None if slopes is None else slopes[:, None]
            scored = scores(_dot(scaled, keys.T), distance, scoring, of_each)
            higher = jnp.maximum(best, scored.max(axis=1))
            fading, weights = jnp.exp(best - higher), jnp.exp(scored - higher[:, None])
            added = _dot(weights.astype(values.dtype), values)
            return higher, total * fading + weights.sum(axis=1), mixed * fading[:, None] + added

        start = jnp.int32(0)
        if scoring.window is not None:
            start = jnp.maximum(first - scoring.window + 1, 0) // CHUNK
        best, total = jnp.full(num_queries, HIDDEN, jnp.float32), jnp.zeros(num_queries)
        if sinks is not None:  # softmax starts with the sink as its only score
            best, total = sinks, jnp.ones(num_queries)
        state = (best, total, jnp.zeros((num_queries, head_dim), jnp.float32))
        _, total, mixed = lax.fori_loop(start, (end + CHUNK - 1) // CHUNK, attend_chunk, state)
        attended = (mixed / total[:, None]).astype(out_ref.dtype)
        triton.store(out_ref.at[(*places, dims)], attended, mask=mask)


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=precision(a.dtype), preferred_element_type=jnp.float32)
