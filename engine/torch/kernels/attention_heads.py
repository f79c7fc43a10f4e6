"""What attention computes, apart from its keys and values: `AttentionHeads` has the settings, and
`attend_by_definition` is the arithmetic. `tiles_for` has the tile sizes of the GPU kernels, and
`Scratch` their memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.architectures.base import ModelConfig
from engine.ir.reference import alibi_slopes
from engine.runtime.model_runner import BatchInputs
from engine.torch.kernels.fp8 import read_cache
from engine.torch.transfer import to_device

# Tile sizes as (queries, keys, warps, stages) per program. They were the fastest on an H200. Where
# there are two, the first is for heads of up to 64 values and the second for wider heads.
CHUNK_TILES = (128, 64, 8, 2), (256, 64, 8, 3)
SPAN_TILE = (1, 128, 4, 3)
# With more spans than MANY_SPANS, the device is busy with programs of any size. Smaller programs
# then save energy.
MANY_SPANS, MANY_SPANS_TILES = 256, ((1, 64, 2, 3), (1, 32, 1, 4))
SHARED_TILES = (128, 64, 4, 2), (128, 64, 4, 3)
# Tile sizes for heads of more than 128 values. Larger tiles would not fit in shared memory.
WIDEST_TILE, WIDEST_SPAN_TILE, WIDEST_MANY_TILE = (64, 64, 8, 2), (1, 64, 4, 2), (1, 32, 2, 2)
# Tile sizes for float32. They are smaller, because float32 values take twice the shared memory.
FLOAT32_TILE, FLOAT32_SPAN_TILE = (64, 32, 4, 2), (1, 32, 4, 2)
# Tile sizes for latent attention, whose keys have some 576 values: those of chunks and of spans, in
# half precision and in float32.
LATENT_TILES, LATENT_FLOAT32_TILES = ((64, 64, 8, 2), (1, 128, 4, 2)), ((16, 16, 4, 1),) * 2
LATENT_GROUP = 16  # max heads of a program in latent attention
NARROW_HEAD, WIDE_HEAD = 64, 128


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a model and how they score keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...] = (None,)  # the different windows of all layers; None: no limit
    softcap: float | None = None  # bounds scores: softcap * tanh(score / softcap)
    has_sinks: bool = False
    alibi_bias: float | None = None
    latent: int = 0  # above 0: the cache has keys only, and the first values of a key are its value
    in_fp8: bool = False  # whether the cache has float8 keys and values

    @classmethod
    def of(cls, config: ModelConfig) -> "AttentionHeads":
        windows = (config.layer(index).window for index in range(config.num_layers))
        return cls(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            tuple(dict.fromkeys(windows)),
            config.attention_softcap,
            config.attention_sinks,
            config.alibi_bias,
            0 if config.latent is None else config.latent.kv_rank,
        )

    @property
    def value_dim(self) -> int:
        """Number of values that a head puts out."""
        return self.latent or self.head_dim

    @property
    def heads_per_program(self) -> int:
        """A program of the GPU kernels handles the heads that share a KV head. In latent attention,
        all heads do, and they are cut into groups.
        """
        if not self.latent:
            return self.num_heads // self.num_kv_heads
        sizes = range(min(LATENT_GROUP, self.num_heads), 0, -1)
        return next(size for size in sizes if self.num_heads % size == 0)

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled and masked, as most fused kernels can do it."""
        return self.softcap is None and not self.has_sinks and self.alibi_bias is None

    def slopes(self, device: torch.device) -> Tensor | None:
        """The slope of each head for ALiBi, (N,) float32. A score decreases by the slope for each
        position between query and key. None: the model has no ALiBi.
        """
        if self.alibi_bias is None:
            return None
        return torch.from_numpy(alibi_slopes(self.num_heads, self.alibi_bias)).to(device)


def additive_mask(distance: Tensor, window: int | None, slopes: Tensor | None = None) -> Tensor:
    """A float32 mask that is added to scores: -inf for keys that a query does not attend to, else
    the ALiBi term, or 0. `distance` is the position of the query minus that of the key. `slopes`
    broadcasts with it.
    """
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if slopes is None:
        mask = torch.zeros(distance.shape, device=distance.device)
    else:
        mask = -slopes * distance
    return mask.masked_fill(hidden, float("-inf"))


def two_way(distance: Tensor, keys: Tensor, visible_end: Tensor) -> Tensor:
    """The distances (T, L) for `additive_mask`, if queries also attend to later positions: to those
    before `visible_end` (T,). `keys` (L,) are the positions of the keys.
    """
    is_later = (distance < 0) & (keys < visible_end[:, None])
    return distance.masked_fill(is_later, 0)


def attend_by_definition(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (..., Q, H), keys (..., L, H), values (..., L, U) -> (..., Q, U), in float32. `mask`
    (..., Q, L) is added to the scores; None: all keys are visible. `sinks` (..., Q, 1) are logits
    that only add to the sum of the softmax.
    """
    scores = q.float() @ keys.float().mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ values.float()).to(q.dtype)


TileSize = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Tiles:
    chunk: TileSize
    span: TileSize
    many_spans: TileSize
    shared: TileSize


def tiles_for(heads: AttentionHeads, dtype: torch.dtype) -> Tiles:
    if heads.latent:
        chunk, span = LATENT_FLOAT32_TILES if dtype == torch.float32 else LATENT_TILES
        return Tiles(chunk, span, span, chunk)
    if dtype == torch.float32:
        return Tiles(FLOAT32_TILE, FLOAT32_SPAN_TILE, FLOAT32_SPAN_TILE, FLOAT32_TILE)
    if heads.head_dim > WIDE_HEAD:
        return Tiles(WIDEST_TILE, WIDEST_SPAN_TILE, WIDEST_MANY_TILE, WIDEST_TILE)
    wide = heads.head_dim > NARROW_HEAD
    return Tiles(CHUNK_TILES[wide], SPAN_TILE, MANY_SPANS_TILES[wide], SHARED_TILES[wide])


class Scratch:
    """Device memory for the partial results of spans. All layers use the same memory, because the
    attention of one layer finishes before that of the next layer starts.
    """

    def __init__(
        self,
        partials: int,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self.partial = torch.empty((partials, heads, head_dim), device=device)
        self.weight = torch.empty((partials, heads), device=device)
        self.arrived = torch.zeros((rows, kv_heads), dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    inputs: BatchInputs
    device: torch.device
    block_size: int
    heads: AttentionHeads
    slopes: Tensor | None  # (N,)

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
        out = q.new_empty((*q.shape[:2], self.heads.value_dim))
        starts = self.inputs.query_start
        tables = to_device(self.inputs.tables_for(window), self.device)
        for row, length in enumerate(self.inputs.seq_lens):
            tokens = slice(starts[row], starts[row + 1])
            position = torch.arange(length, device=q.device)
            blocks = tables[row, position // self.block_size].long()
            offsets = position % self.block_size
            known = read_cache(cache, q.dtype, blocks, offsets).unbind(1)  # (L, K, H) each
            keys, values = known[0], known[-1][..., : self.heads.value_dim]
            distance = position[-(starts[row + 1] - starts[row]) :, None] - position  # (T, L)
            if self.inputs.visible_end is not None:
                ends = to_device(self.inputs.visible_end[tokens], q.device)
                distance = two_way(distance, position, ends)
            out[tokens] = self._row(q[tokens], keys, values, distance, window, sinks)
        return out

    def _row(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        distance: Tensor,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of one sequence of L positions: q (T, N, H) -> (T, N, U).

        q has the queries of the last T positions. Keys (L, K, H) and values (L, K, U) are of all L
        positions.
        """
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)  # (L, N, H)
        values = values.repeat_interleave(group, dim=1)
        slopes = None if self.slopes is None else self.slopes[:, None, None]
        out = attend_by_definition(
            q.transpose(0, 1),  # (N, T, H)
            keys.transpose(0, 1),
            values.transpose(0, 1),
            additive_mask(distance, window, slopes),
            scale=self.heads.scale,
            softcap=self.heads.softcap,
            sinks=None if sinks is None else sinks[:, None, None],
        )
        return out.transpose(0, 1)


class ReferenceAttention:
    def __init__(self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype) -> None:
        self._block_size = block_size
        self._heads = heads

    def plan(self, inputs: BatchInputs, positions: Tensor) -> ReferencePlan:
        device = positions.device
        slopes = self._heads.slopes(device)
        return ReferencePlan(inputs, device, self._block_size, self._heads, slopes)
