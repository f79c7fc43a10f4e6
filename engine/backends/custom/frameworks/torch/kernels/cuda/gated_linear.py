"""Launches `gated_linear.cu`: which tiles for which sizes, and its code with those sizes in it."""

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.cuda.library import (
    Function,
    compiled,
    tensor_map,
)

TARGET = "sm_90a"
ROWS, DEPTH, THREADS = 128, 64, 384
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_STAGES = {256: 4, 224: 4, 128: 6}  # what a multiprocessor's memory holds, by columns
_TILE_COST = 28  # columns' worth of time that a tile takes whatever its width


class Config(NamedTuple):
    columns: int  # of a tile of the product
    cluster: int  # blocks that share the tiles of the weight

    @property
    def shared_bytes(self) -> int:
        return _STAGES[self.columns] * (ROWS + self.columns) * DEPTH * 2 + 1024


def choose(rows: int, outputs: int, multiprocessors: int) -> Config:
    """The tiles whose last round leaves the fewest multiprocessors idle."""
    cluster = 1 if rows <= ROWS else 2
    at_once = multiprocessors // cluster

    def cost(columns: int) -> int:
        tiles = -(-rows // (cluster * ROWS)) * -(-outputs // (columns // 2))
        return -(-tiles // at_once) * (columns + _TILE_COST)

    return Config(min(_STAGES, key=cost), cluster)


def gated_linear(x: Tensor, weight: Tensor, config: Config | None = None) -> Tensor:
    """x (T, D), weight (2 F, D) -> (T, F)"""
    rows, depth = x.shape
    outputs = len(weight) // 2
    multiprocessors = _multiprocessors(x.device)
    config = config or choose(rows, outputs, multiprocessors)
    columns, cluster = config
    n_tiles = -(-outputs // (columns // 2))
    tiles = -(-rows // (cluster * ROWS)) * n_tiles
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    _function(config, x.dtype).launch(
        min(multiprocessors // cluster, tiles) * cluster,
        THREADS,
        (
            tensor_map(x, ROWS, DEPTH),
            tensor_map(weight, columns // 2, DEPTH),
            ctypes.c_void_p(y.data_ptr()),
            *map(ctypes.c_int, (rows, outputs, depth, n_tiles)),
        ),
    )
    return y


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _function(config: Config, dtype: torch.dtype) -> Function:
    code = compiled(source(config, _NAMES[dtype]), TARGET)
    return Function(code, "gated_linear", config.shared_bytes)


def source(config: Config, name: str) -> str:
    """The file with its sizes, and the instruction for a tile of so many columns."""
    defined = {
        "COLUMNS": config.columns,
        "STAGES": _STAGES[config.columns],
        "CLUSTER": config.cluster,
        "IN": f'"{name}"',
    }
    lines = [f"#define {key} {value}" for key, value in defined.items()]
    text = (Path(__file__).parent / "gated_linear.cu").read_text(encoding="utf-8")
    return "\n".join([*lines, _multiply(config.columns, name), text])


def _multiply(columns: int, name: str) -> str:
    """A function for sums += (or =) a product of 64 x 16 by 16 x columns: an instruction of a warp
    group, each of whose threads holds columns / 2 of the sums.
    """
    count = columns // 2
    places = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"+f"(sums[{index}])' for index in range(count))
    return f"""
__device__ __forceinline__ void multiply(
    float (&sums)[{count}], unsigned long long x, unsigned long long w, int adds) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} {{{places}}}, "
        "%{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
        : {operands} : "l"(x), "l"(w), "r"(adds));
}}
"""
