"""Launches the kernel in `gated_linear.cu`. Chooses its tile sizes and compiles it for them."""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.torch.device import multiprocessors
from engine.torch.kernels.cuda.library import (
    Function,
    compiled,
    tensor_map,
)
from engine.torch.kernels.cuda.sources import (
    DEPTH,
    TARGET,
    source_of,
    wgmma,
)

ROWS, THREADS = 128, 384
_STAGES = {256: 4, 224: 4, 128: 6}  # tile columns -> pipeline stages that fit in shared memory
_TILE_COST = 28  # the fixed time per tile: as long as computing this many columns takes


class GatedLinearConfig(NamedTuple):
    columns: int  # weight rows per tile, counting those of gate and up
    cluster: int  # number of thread blocks that share the tiles of the weight

    @property
    def shared_bytes(self) -> int:
        return _STAGES[self.columns] * (ROWS + self.columns) * DEPTH * 2 + 1024


def choose(rows: int, outputs: int, num_multiprocessors: int) -> GatedLinearConfig:
    """Chooses the tile size with the shortest estimated time. The multiprocessors compute tiles in
    waves, so a tile size is bad if many multiprocessors are idle in the last wave.
    """
    cluster = 1 if rows <= ROWS else 2
    at_once = num_multiprocessors // cluster

    def cost(columns: int) -> int:
        tiles = -(-rows // (cluster * ROWS)) * -(-outputs // (columns // 2))
        return -(-tiles // at_once) * (columns + _TILE_COST)

    return GatedLinearConfig(min(_STAGES, key=cost), cluster)


def gated_linear(x: Tensor, weight: Tensor, config: GatedLinearConfig | None = None) -> Tensor:
    """silu(x G^T) * (x U^T), for x (T, D) -> (T, F). The weight (2 F, D) has the rows of G, then
    the rows of U.
    """
    rows, depth = x.shape
    outputs = len(weight) // 2
    available = multiprocessors(x.device)
    config = config or choose(rows, outputs, available)
    columns, cluster = config
    n_tiles = -(-outputs // (columns // 2))
    tiles = -(-rows // (cluster * ROWS)) * n_tiles
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _function(config, x.dtype).launch(
        min(available // cluster, tiles) * cluster,
        THREADS,
        (
            tensor_map(x, (ROWS, DEPTH)),
            tensor_map(weight, (columns // 2, DEPTH)),
            ctypes.c_void_p(y.data_ptr()),
            *map(ctypes.c_int, (rows, outputs, depth, n_tiles)),
        ),
    )
    return y


@cache
def _function(config: GatedLinearConfig, dtype: torch.dtype) -> Function:
    code = compiled(source(config, dtype), TARGET)
    return Function(code, "gated_linear", config.shared_bytes)


def source(config: GatedLinearConfig, dtype: torch.dtype) -> str:
    """The source of the kernel for these tile sizes, with the matching WGMMA instruction."""
    sizes = {
        "COLUMNS": config.columns,
        "STAGES": _STAGES[config.columns],
        "CLUSTER": config.cluster,
    }
    return source_of("gated_linear", dtype, sizes, wgmma("multiply", config.columns, dtype))
