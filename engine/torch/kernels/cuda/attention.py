"""Compiles and launches the kernel in `attention.cu`: prefill attention over the paged cache, on
Hopper GPUs.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.torch.device import is_hopper, multiprocessors
from engine.torch.kernels.cuda.library import (
    Function,
    compiled,
    tensor_map,
)
from engine.torch.kernels.cuda.sources import (
    DEPTH,
    NAMES,
    TARGET,
    source_of,
    wgmma,
)

KEYS = 128  # keys per tile
_LINES, _WARP_GROUP = 64, 128  # query lines per warp group, threads per warp group
_BLOCK_SIZES = (8, 16, 32, 64, 128)
_LOG2_E = 1.4426950408889634
_LISTS = ("counts", "tiles", "query_start", "seq_lens", "tables")


class _Tiling(NamedTuple):
    """The tiling for one head size. `workers` is the number of warp groups that compute. `stages`
    is the number of key tiles (and of value tiles) that shared memory holds at once.
    """

    workers: int
    stages: int


_TILINGS = {64: _Tiling(3, 4), 128: _Tiling(2, 2)}


class AttentionConfig(NamedTuple):
    """The sizes that a variant of the kernel is compiled for."""

    head_dim: int
    heads: int  # query heads per KV head
    kv_heads: int
    block_size: int
    window: int

    @property
    def tiling(self) -> _Tiling:
        return _TILINGS[self.head_dim]

    @property
    def lines(self) -> int:
        """The number of lines in a query tile. A line is the query of one token and one head."""
        return _LINES * self.tiling.workers

    @property
    def shared_bytes(self) -> int:
        return (self.lines + 2 * self.tiling.stages * KEYS) * self.head_dim * 2 + 1024


def lines_of_tile(head_dim: int, heads: int, block_size: int, dtype: torch.dtype) -> int | None:
    """The number of lines in a query tile. A line is the query of one token and one head. None if
    the kernel does not support this GPU or these sizes.
    """
    if not torch.cuda.is_available() or not is_hopper(torch.device("cuda")):
        return None
    if head_dim not in _TILINGS or block_size not in _BLOCK_SIZES or dtype not in NAMES:
        return None
    lines = _LINES * _TILINGS[head_dim].workers
    return lines if heads <= lines else None


def prefill(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    arrays: Mapping[str, Tensor],
    *,
    window: int,
    scale: float,
) -> None:
    """Computes the attention of all rows with several queries, q (T, N, H), and writes the results
    to `out`. `arrays` has the work lists of the step.
    """
    blocks, block_size, _, kv_heads, head_dim = cache.shape
    heads = q.shape[1] // kv_heads
    config = AttentionConfig(head_dim, heads, kv_heads, block_size, window)
    _function(config, q.dtype).launch(
        min(multiprocessors(q.device), len(arrays["tiles"]) * kv_heads),
        (config.tiling.workers + 1) * _WARP_GROUP,
        (
            tensor_map(q, (config.lines // heads, heads, DEPTH)),
            tensor_map(cache.view(blocks * block_size, -1), (block_size, DEPTH)),
            ctypes.c_void_p(out.data_ptr()),
            *(ctypes.c_void_p(arrays[name].data_ptr()) for name in _LISTS),
            ctypes.c_float(scale * _LOG2_E),
            ctypes.c_int(blocks * block_size),
        ),
    )


@cache
def _function(config: AttentionConfig, dtype: torch.dtype) -> Function:
    return Function(compiled(source(config, dtype), TARGET), "attend_prompts", config.shared_bytes)


def source(config: AttentionConfig, dtype: torch.dtype) -> str:
    sizes = {
        "HEAD_DIM": config.head_dim,
        "HEADS": config.heads,
        "KV_HEADS": config.kv_heads,
        "BLOCK_SIZE": config.block_size,
        "WINDOW": config.window,
        "WORKERS": config.tiling.workers,
        "STAGES": config.tiling.stages,
    }
    keys = wgmma("multiply_keys", KEYS, dtype)
    values = wgmma("multiply_values", config.head_dim, dtype, from_registers=True)
    return source_of("attention", dtype, sizes, keys, values)
