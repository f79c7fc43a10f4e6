"""Compiles and launches the kernel in `grouped.cu`: a matmul of few rows and a quantized matrix, on
Hopper GPUs.
"""

import ctypes
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.torch.device import is_hopper, multiprocessors
from engine.torch.kernels.cuda.library import Function, compiled
from engine.torch.kernels.cuda.sources import NAMES, TARGET, source_of

if TYPE_CHECKING:
    from engine.torch.kernels.quantized import GroupedWeight
    from engine.torch.kernels.skinny import Fusion

TILE_ROWS, BLOCK_COLUMNS = 16, 128
MAX_TOKENS = 16
# More than half of a multiprocessor's. The rest is enough for a thread block of decode attention.
SHARED_BYTES = 128_000
MIN_STAGES = 3
LAYOUTS = {(4, 32, False), (4, 32, True), (4, 128, False), (4, 128, True), (8, 16, False)}
LAYOUTS |= {(8, 32, False), (8, 32, True)}
_GATES = {None: 0, "silu": 1, "gelu_tanh": 2}
_MAX_STAGES, _SUMS, _CHUNK = 16, 2, 256  # as in `grouped.cu`
_MIN_BLOCKS = 4  # of the columns of a part
_MAX_MEMBERS = 1024


class GroupedVariant(NamedTuple):
    """What a variant of the kernel is compiled for."""

    bits: int
    group: int
    has_minima: bool
    gate: int
    token_tiles: int
    splits: bool = False  # whether there are several parts

    @property
    def warps(self) -> int:
        """The warps that compute. A block of 8-bit values has twice the bytes."""
        return 64 // self.bits

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 2)

    @property
    def stage_bytes(self) -> int:
        scales = 2 * TILE_ROWS * (BLOCK_COLUMNS // self.group)
        values = TILE_ROWS * BLOCK_COLUMNS * self.bits // 8
        return self.warps * (values + scales * (1 + self.has_minima))

    def stages(self, tokens: int, columns: int, parts: int) -> int:
        """How many times the warps' blocks fit in what the inputs leave of shared memory."""
        blocks = -(-(columns // BLOCK_COLUMNS) // parts)
        warp_sums = _SUMS * self.warps * self.token_tiles * 32 * 16
        squares = -(-tokens * -(-columns // _CHUNK) * 4 // 16) * 16
        sums = blocks * BLOCK_COLUMNS // self.group * 8 * self.token_tiles * 4
        inputs = tokens * (blocks * BLOCK_COLUMNS * 2 + 64)
        barriers = 16 * (_MAX_STAGES + _SUMS)
        return (SHARED_BYTES - warp_sums - barriers - squares - sums - inputs) // self.stage_bytes


def supports(weight: "GroupedWeight") -> bool:
    """Whether the kernel multiplies by this matrix on its GPU, if it is tiled."""
    return weight.values.is_cuda and is_hopper(weight.values.device) and covers(weight)


def covers(weight: "GroupedWeight") -> bool:
    rows, columns = weight.shape
    fits = rows % TILE_ROWS == 0 and columns % BLOCK_COLUMNS == 0
    return fits and weight.layout in LAYOUTS


def suits(x: Tensor, weight: "GroupedWeight", fusion: "Fusion") -> bool:
    """Whether the kernel computes this product."""
    return (
        weight.is_tiled
        and 0 < len(x) <= MAX_TOKENS
        and x.dtype in NAMES
        and x.stride(0) % 8 == 0
        and fusion.gate in _GATES
        and (fusion.gate is None or weight.shape[0] % (2 * TILE_ROWS) == 0)
    )


class Division(NamedTuple):
    """How thread blocks divide a matrix: by columns, and each such part by rows."""

    parts: int
    members: int


def split(
    variant: GroupedVariant, tokens: int, columns: int, units: int, num_multiprocessors: int
) -> Division:
    """Parts are needed if the inputs leave too little room for the matrix, or if the matrix has
    fewer `units` of rows than the GPU has multiprocessors.
    """
    blocks = columns // BLOCK_COLUMNS
    parts = max(1, min(num_multiprocessors // units, blocks // _MIN_BLOCKS))
    while variant.stages(tokens, columns, parts) < MIN_STAGES and parts < blocks:
        parts += 1
    return Division(parts, max(1, min(units, num_multiprocessors // parts)))


def grouped_linear(
    x: Tensor, weight: "GroupedWeight", bias: Tensor | None, fusion: "Fusion", out: Tensor
) -> None:
    """Writes residual + act(rms_norm(x) W^T + bias) to `out`."""
    norm, eps, gate, residual = fusion
    (tokens, columns), rows = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and out.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    bits, group, has_minima = weight.layout
    variant = GroupedVariant(bits, group, has_minima, _GATES[gate], -(-tokens // 8))
    tiles = rows // TILE_ROWS
    units = tiles // 2 if gate else tiles
    parts, members = split(variant, tokens, columns, units, multiprocessors(x.device))
    variant = variant._replace(splits=parts > 1)
    assert members <= _MAX_MEMBERS, members
    room = parts * tiles * variant.token_tiles * 32 * 4 if parts > 1 else 0
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    minima = weight.minima
    tensors = (x, weight.values, weight.scales, minima, bias, norm, residual, out, partial)
    places = (0 if each is None else each.data_ptr() for each in tensors)
    sizes = (tokens, columns, tiles, parts, members, x.stride(0), out.stride(0))
    function(variant, x.dtype).launch(
        parts * members,
        variant.threads,
        (
            *map(ctypes.c_void_p, places),
            ctypes.c_void_p(counters(x.device).data_ptr()),
            *map(ctypes.c_int, sizes),
            ctypes.c_float(eps),
        ),
        overlaps=True,
    )


@cache
def counters(device: torch.device) -> Tensor:
    """How many parts of each member are done. All are zero between two launches."""
    return torch.zeros(_MAX_MEMBERS, dtype=torch.int32, device=device)


@cache
def function(variant: GroupedVariant, dtype: torch.dtype) -> Function:
    code = compiled(source_of("grouped", dtype, sizes_of(variant, dtype)), TARGET)
    return Function(code, "grouped_linear", SHARED_BYTES)


def sizes_of(variant: GroupedVariant, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel is compiled for, by the names that its source uses."""
    return {
        "BITS": variant.bits,
        "GROUP": variant.group,
        "MINIMA": int(variant.has_minima),
        "GATE": variant.gate,
        "TOKEN_TILES": variant.token_tiles,
        "SPLITS": int(variant.splits),
        "WARPS": variant.warps,
        "IS_BF16": int(dtype == torch.bfloat16),
        "SHARED_BYTES": SHARED_BYTES,
    }
