"""Paged attention in plain XLA operations. It gathers one chunk of the context at a time.

The number of chunks is a value, not a shape, so one compiled step serves contexts of any length.
Attention items (see `work.py`) with a single query are computed in groups of 8. Each item with
several queries is computed on its own.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from engine.jax.kernels.matmul import einsum
from engine.jax.kernels.work import (
    AttentionShape,
    PerHead,
    Work,
    scores,
)
from engine.runners.scoring import HIDDEN

CHUNK = 128  # positions gathered at once; if a cache block is larger, one block is gathered
GROUP = 8  # number of single-query items that are computed together
NO_QUERY = -1  # position of a padding query
Attend = Callable[[Array, Array, Array, Array], Array]  # `_attend` for one layer


def xla_attention(
    q: Array, cache: Array, work: Work, shape: AttentionShape, per_head: PerHead
) -> Array:
    """See `AttentionBackend`."""
    attend = partial(_attend, shape=shape, per_head=per_head)
    out = jnp.zeros((*q.shape[:2], shape.value_dim), q.dtype)
    out = _singles(attend, q, out, cache, work)
    return out if shape.tile == 1 else _tiles(attend, q, out, cache, work, shape.tile)


def _singles(attend: Attend, q: Array, out: Array, cache: Array, work: Work) -> Array:
    size = min(GROUP, len(work.token))

    def attend_group(index: Array | int, out: Array) -> Array:
        item = index * size + jnp.arange(size)
        is_used = item < work.num_singles
        tokens, rows = _take(work.token, item), _take(work.row, item)
        positions = jnp.where(is_used, _take(work.positions, tokens), NO_QUERY)
        queries, tables = _take(q, tokens)[:, None], _take(work.tables, rows)
        attended = attend(queries, positions[:, None], tables, cache)
        return out.at[jnp.where(is_used, tokens, len(q))].set(attended[:, 0], mode="drop")

    if len(work.token) == size:
        return attend_group(0, out)
    num_groups = (work.num_singles + size - 1) // size
    return lax.fori_loop(0, num_groups, attend_group, out)


def _tiles(attend: Attend, q: Array, out: Array, cache: Array, work: Work, size: int) -> Array:
    """Computes the items with several queries and writes their results to `out`.

    An item is computed as a tile of `shape.tile` tokens. The tile may reach into the tokens of the
    next row or into the padding. The results of these tokens are not changed.
    """
    offsets = jnp.arange(size)
    padding = ((0, size), (0, 0), (0, 0))
    q, out = jnp.pad(q, padding), jnp.pad(out, padding)
    positions = jnp.pad(work.positions, (0, size))

    def attend_tile(item: Array, out: Array) -> Array:
        start, is_own = _take(work.token, item), offsets < _take(work.length, item)
        queries = lax.dynamic_slice_in_dim(q, start, size)
        where = jnp.where(is_own, lax.dynamic_slice_in_dim(positions, start, size), NO_QUERY)
        table = _take(work.tables, _take(work.row, item))
        attended = attend(queries[None], where[None], table[None], cache)[0]
        others = lax.dynamic_slice_in_dim(out, start, size)
        merged = jnp.where(is_own[:, None, None], attended, others)
        return lax.dynamic_update_slice_in_dim(out, merged, start, 0)

    return lax.fori_loop(work.num_singles, work.num_items, attend_tile, out)[:-size]


def _attend(
    q: Array,
    positions: Array,
    tables: Array,
    cache: Array,
    shape: AttentionShape,
    per_head: PerHead,
) -> Array:
    """Attention of G rows with Q queries each: q (G, Q, N, H) -> (G, Q, N, U).

    `positions` (G, Q) are the positions of the queries. `tables` (G, B) are the block tables of the
    rows.
    """
    rows, queries, num_heads, head_dim = q.shape
    parts, num_kv_heads = cache.shape[1:3]
    blocks = cache.reshape(-1, shape.block_size, *cache.shape[1:])
    width = max(1, CHUNK // shape.block_size)  # blocks per chunk
    chunk = width * shape.block_size
    grouped = (q.astype(jnp.float32) * shape.scoring.scale).astype(q.dtype)
    grouped = grouped.reshape(rows, queries, num_kv_heads, -1, head_dim).swapaxes(1, 2)
    slopes, sinks = (
        None if each is None else each.reshape(num_kv_heads, 1, -1, 1) for each in per_head
    )
    window = shape.scoring.window
    last = positions.max(axis=1)  # (G,)
    lowest = jnp.where(positions == NO_QUERY, last[:, None], positions).min(axis=1)  # (G,)

    def attend_chunk(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        best, total, mixed = state
        table = lax.dynamic_slice_in_dim(tables, index * width, width, axis=1)
        taken = _take(blocks, table).reshape(rows, chunk, parts, num_kv_heads, head_dim)
        keys, key_positions = taken[:, :, 0], index * chunk + jnp.arange(chunk)
        # Cache slots past a row's end belong to other sequences, and blocks that the window has
        # left may be freed. Their values may be NaN, so they are replaced by zeros.
        is_own = key_positions <= last[:, None]
        if window is not None:
            is_own &= key_positions > lowest[:, None] - window
        values = jnp.where(is_own[..., None, None], taken[:, :, -1, :, : shape.value_dim], 0)
        distance = positions[..., None] - key_positions  # (G, Q, C)
        products = einsum("gkqnh,gckh->gkqnc", grouped, keys)
        scored = scores(products, distance[:, None, :, None], shape.scoring, slopes)
        higher = jnp.maximum(best, scored.max(axis=-1))
        fading, weights = jnp.exp(best - higher), jnp.exp(scored - higher[..., None])
        added = einsum("gkqnc,gckh->gkqnh", weights.astype(values.dtype), values)
        return higher, total * fading + weights.sum(axis=-1), mixed * fading[..., None] + added

    first = jnp.zeros((), jnp.int32)
    if window is not None:
        seen = jnp.where(lowest == NO_QUERY, last.max(), lowest).min()
        first = jnp.maximum(seen - window + 1, 0) // chunk
    per_query = grouped.shape[:-1]
    best, total = jnp.full(per_query, HIDDEN, jnp.float32), jnp.zeros(per_query, jnp.float32)
    if sinks is not None:  # softmax starts with the sink as its only score
        best, total = jnp.broadcast_to(sinks[..., 0], per_query), jnp.ones_like(total)
    start = (best, total, jnp.zeros((*per_query, shape.value_dim), jnp.float32))
    _, total, mixed = lax.fori_loop(first, last.max() // chunk + 1, attend_chunk, start)
    attended = (mixed / total[..., None]).astype(q.dtype).swapaxes(1, 2)
    return attended.reshape(rows, queries, num_heads, shape.value_dim)


def _take(array: Array, indices: Array) -> Array:
    """The rows of an array at the given indices. There is no bounds check, because the host has
    already made sure that all indices are valid.
    """
    return array.at[indices].get(mode="promise_in_bounds")
