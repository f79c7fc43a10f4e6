"""Attention by PyTorch's `scaled_dot_product_attention`, on blocks gathered from the cache.

Rows with one query are padded to a common length and computed in one call, with a mask. A row with
several queries is computed in a call of its own. If such a row starts at position 0, all its keys
are those of this step, so it needs no gather and no mask. For rows with one query, the query heads
that share a KV head are moved to the query axis, so that keys need not be repeated.

PyTorch's function has no soft cap and no sinks. Models with these use a plain computation instead.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.runtime.model_runner import I32, BatchInputs
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    additive_mask,
    attend_by_definition,
    two_way,
)
from engine.torch.kernels.fp8 import read_cache
from engine.torch.transfer import to_device

# Rows with one query are padded to a common length if their numbers of blocks round up to the same
# power of two. All rows of up to this many blocks are padded to a common length, because for short
# rows another call would cost more than the padding.
SHORT_BLOCKS = 8

Rows = NDArray[np.intp]
Tokens = slice | Tensor  # indices of a part's queries within the step's T tokens


class Part(Protocol):
    """A subset of a step's rows, which one call of `scaled_dot_product_attention` computes."""

    @property
    def tokens(self) -> Tokens: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attention of this part's queries: q (Q, N, H) -> (Q, N, U). k (T, K, H) and v (T, K, U)
        are the keys and values of all tokens of the step. `sinks` is (N,).
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """S rows with one query each, as in decode."""

    tokens: Tokens
    blocks: Tensor  # (S * B,)
    seen: slice  # which of the B * block_size gathered positions the queries attend to
    mask: Tensor | None  # (S, 1, 1, L), with ALiBi (S, K, N / K, L), added to the scores
    heads: AttentionHeads

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        rows = q.shape[0]
        size = self.heads.value_dim
        # (S, K, L, H or U)
        keys, values = _gather(cache, q.dtype, self.blocks, rows, self.seen, size)
        q = q.unflatten(1, (keys.shape[1], -1))  # (S, K, N / K, H)
        if sinks is not None:
            sinks = sinks.view(keys.shape[1], -1, 1)
        return _attention(q, keys, values, self.mask, self.heads, sinks).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class LaterChunk:
    """One row with several queries that starts after position 0 or is longer than the sliding
    window. Its keys are gathered from the cache.
    """

    tokens: slice
    blocks: Tensor  # (B,)
    seen: slice
    mask: Tensor  # (T, L), with ALiBi (N, T, L)
    heads: AttentionHeads

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        size = self.heads.value_dim
        # (1, K, L, H or U)
        keys, values = _gather(cache, q.dtype, self.blocks, 1, self.seen, size)
        group = q.shape[1] // keys.shape[1]
        out = _attention(
            q.transpose(0, 1)[None],  # (1, N, T, H)
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            self.mask,
            self.heads,
            None if sinks is None else sinks[:, None, None],
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """One row with several queries that starts at position 0. All its keys are keys of this step,
    and all are within the sliding window. The scores are only scaled.
    """

    tokens: slice
    scale: float

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, sinks: Tensor | None
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[self.tokens], v[self.tokens]))
        group = q.shape[1] // k.shape[1]
        out = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
            is_causal=True,
            scale=self.scale,
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    parts: dict[int | None, tuple[Part, ...]]  # by window

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        *,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        parts = self.parts[window]
        if len(parts) == 1:
            return parts[0].attend(q, k, v, cache, sinks)
        out = q.new_empty((*q.shape[:2], v.shape[-1]))
        for part in parts:
            out[part.tokens] = part.attend(q[part.tokens], k, v, cache, sinks)
        return out


class SdpaAttention:
    """The attention backend "sdpa"."""

    def __init__(self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype) -> None:
        self._planners = [
            _WindowPlanner(heads, window, block_size, dtype) for window in heads.windows
        ]

    def plan(self, inputs: BatchInputs, positions: Tensor) -> SdpaPlan:
        planners = self._planners
        return SdpaPlan({each.window: each.parts(inputs, positions) for each in planners})


class _WindowPlanner:
    """Plans the attention of all layers that have the same window."""

    def __init__(
        self, heads: AttentionHeads, window: int | None, block_size: int, dtype: torch.dtype
    ) -> None:
        self.window = window
        self._heads = heads
        self._block_size = block_size
        self._dtype = dtype

    def parts(self, inputs: BatchInputs, positions: Tensor) -> tuple[Part, ...]:
        counts = np.diff(inputs.query_start)
        parts: list[Part] = [
            self._single_queries(inputs, rows, positions)
            for rows in self._groups(inputs, np.flatnonzero(counts == 1))
        ]
        parts.extend(self._chunk(inputs, row, positions) for row in np.flatnonzero(counts > 1))
        return tuple(parts)

    def _groups(self, inputs: BatchInputs, rows: Rows) -> list[Rows]:
        """Groups rows with one query by their number of blocks, rounded up to a power of two."""
        if len(rows) < 2:
            return [rows] if len(rows) else []
        last = inputs.seq_lens[rows] - 1
        blocks = last // self._block_size - self._first_key(last) // self._block_size + 1
        size = np.ceil(np.log2(np.maximum(blocks, SHORT_BLOCKS)))
        return [rows[size == value] for value in np.unique(size)]

    def _first_key(self, query: I32) -> I32:
        """The first position that a query at position `query` attends to. It is 0 without a sliding
        window.
        """
        if self.window is None:
            return np.zeros_like(query)
        return np.maximum(query - self.window + 1, 0)

    def _single_queries(self, inputs: BatchInputs, rows: Rows, positions: Tensor) -> SingleQueries:
        device, size = positions.device, self._block_size
        last = inputs.seq_lens[rows] - 1
        first = self._first_key(last)
        first_block = first // size
        width = int((last // size - first_block).max()) + 1
        # If a block table is shorter than the padded width, its last entry is repeated. The mask
        # hides the repeated blocks.
        tables = inputs.tables_for(self.window)
        columns = np.minimum(first_block[:, None] + np.arange(width), tables.shape[1] - 1)
        blocks = to_device(tables[rows[:, None], columns].reshape(-1), device)
        tokens = _tokens(inputs.query_start[rows], device)
        if len(rows) == 1 and self._heads.alibi_bias is None:
            seen = slice(int(first[0]) % size, int(last[0] - first_block[0] * size) + 1)
            return SingleQueries(tokens, blocks, seen, None, self._heads)
        starts = to_device(first_block.astype(np.int64) * size, device)
        key_positions = starts[:, None] + torch.arange(width * size, device=device)  # (S, L)
        distance = positions[tokens][:, None] - key_positions
        slopes = self._heads.slopes(device)
        if slopes is not None:
            slopes = slopes.view(self._heads.num_kv_heads, -1, 1)
        mask = self._mask(distance[:, None, None], slopes)
        return SingleQueries(tokens, blocks, slice(None), mask, self._heads)

    def _chunk(self, inputs: BatchInputs, row: np.intp, positions: Tensor) -> Part:
        device, size = positions.device, self._block_size
        tokens = slice(int(inputs.query_start[row]), int(inputs.query_start[row + 1]))
        length = int(inputs.seq_lens[row])
        start = length - (tokens.stop - tokens.start)
        fits = self.window is None or length <= self.window
        ends = inputs.positions[tokens] + 1
        if inputs.visible_end is not None:
            ends = inputs.visible_end[tokens]
        looks_ahead = bool((ends > inputs.positions[tokens] + 1).any())
        if start == 0 and fits and self._heads.is_plain and not looks_ahead:
            return FirstChunk(tokens, self._heads.scale)
        first = 0 if self.window is None else max(start - self.window + 1, 0)
        blocks = inputs.tables_for(self.window)[row, first // size : -(-length // size)]
        seen = slice(first % size, length - first // size * size)
        key_positions = torch.arange(first, length, device=device)
        slopes = self._heads.slopes(device)
        distance = positions[tokens][:, None] - key_positions  # (T, L)
        if looks_ahead:
            distance = two_way(distance, key_positions, to_device(ends, device))
        mask = self._mask(distance, None if slopes is None else slopes[:, None, None])
        return LaterChunk(tokens, to_device(blocks, device), seen, mask, self._heads)

    def _mask(self, distance: Tensor, slopes: Tensor | None) -> Tensor:
        return additive_mask(distance, self.window, slopes).to(self._dtype)


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    heads: AttentionHeads,
    sinks: Tensor | None,
) -> Tensor:
    if heads.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=heads.scale)
    return attend_by_definition(
        q, keys, values, mask, scale=heads.scale, softcap=heads.softcap, sinks=sinks
    )


def _tokens(indices: I32, device: torch.device) -> Tokens:
    """Converts ascending indices to a slice if they are consecutive, because indexing by a slice
    makes no copy. Otherwise converts them to a tensor.
    """
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return to_device(indices.astype(np.int64), device)


def _gather(
    cache: Tensor, dtype: torch.dtype, blocks: Tensor, rows: int, seen: slice, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Gathers the keys (S, K, L, H) and the values (S, K, L, U) of `rows` rows from the cache. Both
    results are views of one copy.
    """
    taken = read_cache(cache, dtype, blocks).flatten(0, 1).unflatten(0, (rows, -1))
    parts = taken[:, seen].transpose(1, 3).unbind(2)  # taken: (S, L, 2, K, H)
    return parts[0], parts[-1][..., :value_dim]
