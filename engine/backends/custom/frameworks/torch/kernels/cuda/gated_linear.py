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
_TILE_COST = 28  # fixed time per tile, in columns' worth of time


class GatedLinearConfig(NamedTuple):
    columns: int  # of an output tile, gate and up together
    cluster: int  # thread blocks that share the weight's tiles

    @property
    def shared_bytes(self) -> int:
        return _STAGES[self.columns] * (ROWS + self.columns) * DEPTH * 2 + 1024


def choose(rows: int, outputs: int, num_multiprocessors: int) -> GatedLinearConfig:
    """The tiles whose last wave leaves the fewest multiprocessors idle."""
    cluster = 1 if rows <= ROWS else 2
    at_once = num_multiprocessors // cluster

    def cost(columns: int) -> int:
        tiles = -(-rows // (cluster * ROWS)) * -(-outputs // (columns // 2))
        return -(-tiles // at_once) * (columns + _TILE_COST)

    return GatedLinearConfig(min(_STAGES, key=cost), cluster)


def gated_linear(x: Tensor, weight: Tensor, config: GatedLinearConfig | None = None) -> Tensor:
    """x (T, D), weight (2 F, D) -> (T, F)"""
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
    """The source with its sizes, and the WGMMA instruction for that many columns."""
    sizes = {
        "COLUMNS": config.columns,
        "STAGES": _STAGES[config.columns],
        "CLUSTER": config.cluster,
    }
    return source_of("gated_linear", dtype, sizes, wgmma("multiply", config.columns, dtype))
