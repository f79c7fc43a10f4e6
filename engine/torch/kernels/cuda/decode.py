"""Compiles and launches the kernel in `decode.cu`: attention of rows with one query over a paged
cache in float8, on Hopper GPUs.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.torch.device import is_hopper
from engine.torch.kernels.cuda.library import Function, compiled
from engine.torch.kernels.cuda.sources import NAMES, TARGET, source_of
from engine.torch.kernels.fp8 import cache_slot_bytes

if TYPE_CHECKING:
    from engine.torch.kernels.attention_heads import (
        AttentionHeads,
        Scratch,
    )

# A step may have SPANS spans, or two per row. A multiprocessor holds two thread blocks, which have
# a span each. A row has at most ROW_SPANS spans on average, because one warp per head merges them.
SPANS, ROW_SPANS = 320, 32
MIN_SPAN = 64  # min keys of a span
_TILE = 16  # keys per tile
_WORKERS = 8  # warps that compute, if the number of KV heads divides it
_HALF_BYTES = 113_000  # of shared memory, for each of two thread blocks
_MIN_STAGES, _MAX_STAGES = 3, 8
_HEAD_DIMS, _BLOCK_SIZES, _MAX_HEADS = (64, 128), (8, 16, 32, 64, 128), 8
_LOG2_E = 1.4426950408889634
_LISTS = ("counts", "spans", "partials", "query_start", "seq_lens", "tables")


class DecodeConfig(NamedTuple):
    """The sizes that a variant of the kernel is compiled for."""

    head_dim: int
    heads: int  # query heads per KV head
    kv_heads: int
    block_size: int
    slot_bytes: int
    window: int
    merges: bool  # whether the kernel merges the results of a row's spans

    @property
    def warps_per_head(self) -> int:
        return max(1, _WORKERS // self.kv_heads)

    @property
    def threads(self) -> int:
        return 32 * (self.kv_heads * self.warps_per_head + 1)

    @property
    def stages(self) -> int:
        """The number of tiles that shared memory holds at once."""
        return min(_MAX_STAGES, _HALF_BYTES // (_TILE * self.slot_bytes + 16))

    @property
    def shared_bytes(self) -> int:
        """Bytes of tiles and barriers. In the end, the sums of warps take the place of tiles."""
        sums = (self.head_dim // 4 + 4) * 4 * self.threads if self.warps_per_head > 1 else 0
        return max(self.stages * (_TILE * self.slot_bytes + 16), sums)


def supports(heads: "AttentionHeads", block_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernel computes decode attention for these heads on this GPU."""
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda")):
        return False
    return covers(heads, block_size, dtype)


def covers(heads: "AttentionHeads", block_size: int, dtype: torch.dtype) -> bool:
    if not heads.in_fp8 or not heads.is_plain or heads.latent or dtype not in NAMES:
        return False
    slot_bytes = cache_slot_bytes(2 * heads.num_kv_heads, heads.head_dim)
    sizes = heads.head_dim, heads.heads_per_program, heads.num_kv_heads, block_size, slot_bytes
    config = DecodeConfig(*sizes, window=0, merges=True)
    return (
        config.head_dim in _HEAD_DIMS
        and config.block_size in _BLOCK_SIZES
        and config.heads <= _MAX_HEADS
        and config.kv_heads <= _WORKERS
        and config.stages >= _MIN_STAGES
    )


def span_room(rows: int) -> int:
    """The most spans that the keys of so many rows are cut into. A thread block without a span
    takes time too, so a step with few rows has fewer of them.
    """
    return min(max(SPANS, 2 * rows), rows * (1 + ROW_SPANS))


def decode(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    scratch: "Scratch",
    *,
    window: int,
    scale: float,
    merges: bool,
) -> None:
    """Computes the attention of all rows with one query, q (T, N, H). `arrays` has the work lists
    of the step. With `merges`, the results are written to `out`. Otherwise, those of each span are
    written to `scratch`.
    """
    _, block_size, _, kv_heads, head_dim = cache.shape
    heads = q.shape[1] // kv_heads
    config = DecodeConfig(head_dim, heads, kv_heads, block_size, cache.stride(1), window, merges)
    tensors = (q, cache, out, scratch.partial, scratch.weight, scratch.arrived)
    function(config, q.dtype).launch(
        len(arrays["spans"]),
        config.threads,
        (
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
            *(ctypes.c_void_p(arrays[name].data_ptr()) for name in _LISTS),
            ctypes.c_float(scale * _LOG2_E),
        ),
        overlaps=True,
    )


@cache
def function(config: DecodeConfig, dtype: torch.dtype) -> Function:
    return Function(compiled(source(config, dtype), TARGET), "decode_rows", config.shared_bytes)


def source(config: DecodeConfig, dtype: torch.dtype) -> str:
    warp = (Path(__file__).parent / "decode.cuh").read_text("utf-8")
    return source_of("decode", dtype, sizes(config, dtype), warp)


def sizes(config: DecodeConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for, by the names that its source uses."""
    return {
        "HEAD_DIM": config.head_dim,
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "BLOCK_SIZE": config.block_size,
        "SLOT_BYTES": config.slot_bytes,
        "WINDOW": config.window,
        "STAGES": config.stages,
        "SPLIT": config.warps_per_head,
        "MERGES": int(config.merges),
        "IS_BF16": int(dtype == torch.bfloat16),
    }
