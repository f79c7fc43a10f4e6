"""Attention by PyTorch's `scaled_dot_product_attention`, on blocks gathered from the cache.

Rows with one query are padded to a common length and computed in one call, with a mask. A row with
several queries is computed in a call of its own. If such a row starts at position 0, all its keys
are those of this step, so it needs no gather and no mask. For rows with one query, the query heads
that share a KV head are moved to the query axis, so that keys need not be repeated.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.custom.frameworks.torch.execution.transfer import to_device
from engine.backends.custom.runtime.model_runner import I32, BatchInputs

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        """Attention of this part's queries: q (Q, N, H) -> (Q, N, H). k and v (T, K, H) are the
        keys and values of all tokens of the step.
        """
        ...


@dataclass(frozen=True, slots=True)
class SingleQueries:
    """S rows with one query each, as in decode."""

    tokens: Tokens
    blocks: Tensor  # (S * B,)
    seen: slice  # which of the B * block_size gathered positions the queries attend to
    mask: Tensor | None  # (S, 1, 1, L), added to the scores
    scale: float | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        rows = q.shape[0]
        keys, values = _gather(cache, self.blocks, rows, self.seen)  # (S, K, L, H)
        q = q.unflatten(1, (keys.shape[1], -1))  # (S, K, N / K, H)
        out = F.scaled_dot_product_attention(q, keys, values, self.mask, scale=self.scale)
        return out.flatten(1, 2)


@dataclass(frozen=True, slots=True)
class LaterChunk:
    """One row with several queries that starts after position 0 or is longer than the sliding
    window. Its keys are gathered from the cache.
    """

    tokens: slice
    blocks: Tensor  # (B,)
    seen: slice
    mask: Tensor  # (T, L)
    scale: float | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        keys, values = _gather(cache, self.blocks, 1, self.seen)  # (1, K, L, H)
        group = q.shape[1] // keys.shape[1]
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],  # (1, N, T, H)
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            self.mask,
            scale=self.scale,
        )
        return out[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """One row with several queries that starts at position 0. All its keys are keys of this step,
    and all are within the sliding window.
    """

    tokens: slice
    scale: float | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
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
    parts: tuple[Part, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].attend(q, k, v, cache)
        out = torch.empty_like(q)
        for part in self.parts:
            out[part.tokens] = part.attend(q[part.tokens], k, v, cache)
        return out


class SdpaAttention:
    """The attention backend "sdpa". `scale` multiplies the scores. If it is None, the scale is
    1 / sqrt(head_dim).
    """

    def __init__(
        self,
        window: int | None,
        *,
        block_size: int,
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        self._block_size = block_size
        self._window = window
        self._dtype = dtype
        self._scale = scale

    def plan(self, inputs: BatchInputs, positions: Tensor) -> SdpaPlan:
        counts = np.diff(inputs.query_start)
        parts: list[Part] = [
            self._single_queries(inputs, rows, positions)
            for rows in self._groups(inputs, np.flatnonzero(counts == 1))
        ]
        parts.extend(self._chunk(inputs, row, positions) for row in np.flatnonzero(counts > 1))
        return SdpaPlan(tuple(parts))

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
        if self._window is None:
            return np.zeros_like(query)
        return np.maximum(query - self._window + 1, 0)

    def _single_queries(self, inputs: BatchInputs, rows: Rows, positions: Tensor) -> SingleQueries:
        device, size = positions.device, self._block_size
        last = inputs.seq_lens[rows] - 1
        first = self._first_key(last)
        first_block = first // size
        width = int((last // size - first_block).max()) + 1
        # If a block table is shorter than the padded width, its last entry is repeated. The mask
        # hides the repeated blocks.
        columns = np.minimum(
            first_block[:, None] + np.arange(width), inputs.block_tables.shape[1] - 1
        )
        blocks = to_device(inputs.block_tables[rows[:, None], columns].reshape(-1), device)
        tokens = _tokens(inputs.query_start[rows], device)
        if len(rows) == 1:
            seen = slice(int(first[0]) % size, int(last[0] - first_block[0] * size) + 1)
            return SingleQueries(tokens, blocks, seen, None, self._scale)
        starts = to_device(first_block.astype(np.int64) * size, device)
        key_positions = starts[:, None] + torch.arange(width * size, device=device)  # (S, L)
        mask = self._mask(positions[tokens][:, None], key_positions)
        return SingleQueries(tokens, blocks, slice(None), mask[:, None, None], self._scale)

    def _chunk(self, inputs: BatchInputs, row: np.intp, positions: Tensor) -> Part:
        device, size = positions.device, self._block_size
        tokens = slice(int(inputs.query_start[row]), int(inputs.query_start[row + 1]))
        length = int(inputs.seq_lens[row])
        start = length - (tokens.stop - tokens.start)
        if start == 0 and (self._window is None or length <= self._window):
            return FirstChunk(tokens, self._scale)
        first = 0 if self._window is None else max(start - self._window + 1, 0)
        blocks = inputs.block_tables[row, first // size : -(-length // size)]
        seen = slice(first % size, length - first // size * size)
        key_positions = torch.arange(first, length, device=device)
        mask = self._mask(positions[tokens][:, None], key_positions)  # (T, L)
        return LaterChunk(tokens, to_device(blocks, device), seen, mask, self._scale)

    def _mask(self, query: Tensor, key: Tensor) -> Tensor:
        """A mask that is added to scores: 0 if the query at position `query` may attend to the key
        at position `key`, else -inf. The two arguments broadcast.
        """
        distance = query - key
        hidden = distance < 0
        if self._window is not None:
            hidden |= distance >= self._window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=key.device)
        return mask.masked_fill_(hidden, float("-inf"))


def _tokens(indices: I32, device: torch.device) -> Tokens:
    """Converts ascending indices to a slice if they are consecutive, because indexing by a slice
    makes no copy. Otherwise converts them to a tensor.
    """
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return slice(first, last + 1)
    return to_device(indices.astype(np.int64), device)


def _gather(cache: Tensor, blocks: Tensor, rows: int, seen: slice) -> tuple[Tensor, Tensor]:
    """Gathers the keys and the values of `rows` rows from the cache, (S, K, L, H) each. Both
    results are views of one copy.
    """
    taken = cache.index_select(0, blocks).flatten(0, 1).unflatten(0, (rows, -1))  # (S, L, 2, K, H)
    keys, values = taken[:, seen].transpose(1, 3).unbind(2)
    return keys, values
