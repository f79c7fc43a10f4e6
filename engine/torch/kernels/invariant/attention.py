"""Paged attention with a fixed order of sums. The keys of every row are cut into chunks at the same
positions, and the results of chunks are merged in ascending order.

A row with one query may be cut into several spans of whole chunks. A row with several queries is
cut into tiles of queries. One kernel computes both, in two launches with tiles of different sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runners.runs import cut
from engine.runtime.model_runner import I32, BatchInputs
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    Scratch,
    TileSize,
)
from engine.torch.kernels.attention_triton import (
    LONE_PROGRAMS,
    SHARED_FIELDS,
    SPAN_FIELDS,
    ListLengths,
    TritonAttention,
    TritonPlan,
    span_room,
)

CHUNK = 256  # keys of a chunk, which begins at a multiple of this position
# Several programs may share the chunks of a row, while all such rows have at most this many
# chunks in total. For other rows, one program per KV head merges all chunks in registers.
MAX_PARTIALS = 2048
# Tile sizes as (queries, keys, warps, stages) per program. The number of keys must be the same for
# all rows, and a warp must have whole lines, because both decide the order of the softmax's sum.
PROMPT_TILE: TileSize = (128, 64, 4, 2)
WIDE_TILE: TileSize = (128, 64, 8, 3)  # for heads of more than NARROW_HEAD values
FP8_TILE: TileSize = (64, 64, 4, 2)
SPAN_TILE: TileSize = (16, 64, 1, 2)
# For up to FEW_ROWS rows with one query each, which leave most of the device idle: a program has
# all keys of a chunk under way at once.
FEW_ROWS, LONE_TILE = 8, (16, 64, 1, 4)
FLOAT32_TILE: TileSize = (64, 32, 4, 2)
# For wider heads, in float32 and with a float8 cache, all rows have the same tile.
NARROW_HEAD, WIDE_HEAD = 64, 128


def _prompt_tile(heads: AttentionHeads, dtype: torch.dtype) -> TileSize:
    if dtype == torch.float32:
        return FLOAT32_TILE
    if heads.in_fp8 or heads.head_dim > WIDE_HEAD:
        return FP8_TILE
    return PROMPT_TILE if heads.head_dim <= NARROW_HEAD else WIDE_TILE


@dataclass(frozen=True, slots=True)
class InvariantPlan(TritonPlan):
    span_tile: TileSize = SPAN_TILE
    prompt_tile: TileSize = PROMPT_TILE

    def attend_cached(
        self, q: Tensor, cache: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        from engine.torch.kernels.triton.attention_tile import Tile
        from engine.torch.kernels.triton.invariant.attention import (
            attend,
        )

        out = torch.empty_like(q)
        assert self.scratch is not None
        is_few = self.span_tile == SPAN_TILE and len(self.arrays["seq_lens"]) <= FEW_ROWS
        launches = (
            (self.room.tiles, True, self.prompt_tile),
            (self.room.spans, False, LONE_TILE if is_few else self.span_tile),
        )
        for _, prompts, tile in filter(lambda launch: launch[0], launches):
            attend(
                q,
                cache,
                out,
                self._arrays(window),
                self.scratch,
                self.heads,
                window=window or 0,
                slopes=self.slopes,
                sinks=sinks,
                prompts=prompts,
                tile=Tile(*tile),
                chunk=CHUNK,
            )
        return out


class InvariantAttention(TritonAttention):
    def __init__(self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype) -> None:
        assert not heads.latent, "latent attention has no kernel with a fixed order of sums"
        super().__init__(heads, block_size=block_size, dtype=dtype)
        self._prompt_tile = self._span_tile = _prompt_tile(heads, dtype)
        narrow = heads.head_dim <= WIDE_HEAD and self._group <= SPAN_TILE[0]
        if narrow and dtype != torch.float32 and not heads.in_fp8:
            self._span_tile = SPAN_TILE
        self.can_share = self._on_hopper = self._decodes_on_hopper = False
        self._tile_tokens = self._prompt_tile[0] // self._group
        assert self._tile_tokens, f"{self._group} heads share a KV head"

    def plan_on(self, arrays: Mapping[str, Tensor], room: ListLengths) -> InvariantPlan:
        return InvariantPlan(
            arrays,
            room,
            self._scratch,
            self._heads,
            self._slopes,
            self._tiles_of,
            self._on_hopper,
            self._decodes_on_hopper,
            self._group,
            self._tile_tokens,
            self._span_tile,
            self._prompt_tile,
        )

    def reserve(self, rows: int, device: torch.device) -> None:
        heads = self._heads
        self._reserve_slopes(device)
        if self._scratch is None or len(self._scratch.arrived) < rows:
            sizes = heads.num_heads, self._num_groups, heads.value_dim
            self._scratch = Scratch(MAX_PARTIALS, rows, *sizes, device)

    def room_for(self, tokens: int, rows: int, *, only_decodes: bool, shares: bool) -> ListLengths:
        tiles = 0 if only_decodes else tokens // self._tile_tokens + rows
        return ListLengths(span_room(rows, False), tiles, 0, MAX_PARTIALS)

    def lists(
        self, inputs: BatchInputs, room: ListLengths | None = None
    ) -> tuple[dict[str, I32], ListLengths]:
        counts = np.diff(inputs.query_start)
        decodes = np.flatnonzero(counts == 1)
        spans, partials = self._spans(inputs.seq_lens[decodes])
        spans[:, 0] = decodes[spans[:, 0]]
        row_partials = np.zeros((len(counts), 2), np.int32)
        row_partials[decodes] = partials
        tiles = self._tiles(inputs.seq_lens - counts, counts, np.flatnonzero(counts > 1))
        lengths = (inputs.block_tables.shape[1], len(spans), len(tiles), 0)
        lists = {
            "counts": np.array((*lengths, 0), np.int32),
            "spans": spans,
            "partials": row_partials,
            "tiles": tiles,
            "shared": np.zeros((0, SHARED_FIELDS), np.int32),
            "members": np.zeros(0, np.int32),
        }
        if inputs.window_tables is not None:
            lists["window_counts"] = np.array((*lengths, inputs.block_tables.size), np.int32)
        return lists, room or ListLengths(len(spans), len(tiles), 0, MAX_PARTIALS)

    def _spans(self, lengths: I32) -> tuple[I32, I32]:
        """Cuts rows with one query and this many keys into spans of whole chunks. In the spans that
        are returned, a row is an index of `lengths`. Also returns the first partial result and the
        number of partial results of each row, which is 1 for a row with one span.
        """
        count, chunks = len(lengths), -(-lengths // CHUNK)
        most = span_room(count, False)
        if count == 1:
            most = min(most, 1 + LONE_PROGRAMS // self._num_groups)
        size = max(1, -(-int(chunks.sum()) // (most - count)))
        width = -(-chunks // -(-chunks // size))
        ends = np.cumsum(np.where(width < chunks, chunks, 0))
        is_split = (width < chunks) & (ends <= MAX_PARTIALS)
        width = np.where(is_split, width, chunks)
        partials = np.stack((ends - chunks, chunks), axis=1) * is_split[:, None]
        partials[:, 1] += ~is_split
        rows, first = cut(chunks, width)
        spans = np.zeros((len(rows), SPAN_FIELDS), np.int32)
        spans[:, 0] = rows
        spans[:, 1] = first * CHUNK
        spans[:, 2] = spans[:, 1] + width[rows] * CHUNK
        # The longest spans come first, so that no long span starts when others are nearly done.
        return spans[np.argsort(-width[rows], kind="stable")], partials.astype(np.int32)
