"""Launches `gated_linear.cu`: chooses tile sizes and compiles the kernel for them."""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.cuda.library import (
    Function,
    compiled,
    multiprocessors,
    tensor_map,
)
from engine.backends.custom.frameworks.torch.kernels.cuda.sources import (
    DEPTH,
    TARGET,
    source_of,
    wgmma,
)

ROWS, THREADS = 128, 384
_STAGES = {256: 4, 224: 4, 128: 6}  # tile columns -> stages that fit in shared memory
_TILE_COST = 28  # the fixed time per tile, as the number of columns that take the same time


class GatedLinearConfig(NamedTuple):
    columns: int  # weight rows per tile, of gate and up together
    cluster: int  # number of thread blocks that share the tiles of the weight

    @property
    def shared_bytes(self) -> int:
        return _STAGES[self.columns] * (ROWS + self.columns) * DEPTH * 2 + 1024


def choose(rows: int, outputs: int, num_multiprocessors: int) -> GatedLinearConfig:
    """Chooses the tile size with the shortest estimated time. All multiprocessors work in waves,
    so a tile size is bad if the last wave leaves many of them idle.
    """
    cluster = 1 if rows <= ROWS else 2
    at_once = num_multiprocessors // cluster

    def cost(columns: int) -> int:
        tiles = -(-rows // (cluster * ROWS)) * -(-outputs // (columns // 2))
        return -(-tiles // at_once) * (columns + _TILE_COST)

    return GatedLinearConfig(min(_STAGES, key=cost), cluster)


def gated_linear(x: Tensor, weight: Tensor, config: GatedLinearConfig | None = None) -> Tensor:
    """silu(x @ first half of weight) * (x @ second half): x (T, D), weight (2 F, D) -> (T, F)"""
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
    """The kernel's source with its compile-time sizes and the WGMMA instruction for its columns."""
    sizes = {
        "COLUMNS": config.columns,
        "STAGES": _STAGES[config.columns],
        "CLUSTER": config.cluster,
    }
    return source_of("gated_linear", dtype, sizes, wgmma("multiply", config.columns, dtype))
