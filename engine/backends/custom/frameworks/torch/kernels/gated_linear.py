"""A GEMM of many rows with a gated activation as its epilogue.

On Hopper this is CUDA C++ (`cuda/gated_linear.cu`). Its GEMM is as fast as cuBLAS, and the
activation is almost free. On other devices, and if the rows would leave too much of the tiles
empty, GEMM and activation run as separate kernels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.activation import gated, gated_halves
from engine.backends.custom.frameworks.torch.kernels.base import (
    Example,
    Inputs,
    KernelSpec,
    Shape,
    Tolerance,
    register,
    size_of,
)
from engine.backends.custom.frameworks.torch.kernels.cuda.library import is_hopper

# Min rows for the fused kernel. With fewer rows, half of a tile is empty, and cuBLAS is as fast.
MIN_ROWS = 65
# Rows per tile, rows per pair of tiles, and the max share of padding rows. With more than one tile
# of rows, two tiles share the weight. Padding rows cost as much as real rows. With more padding
# than this share, cuBLAS is faster, because it has more tile sizes.
_ONE_TILE, _TWO_TILES, _MOST_EMPTY = 128, 256, 0.2
_VECTOR = 8  # the kernel copies this many values at once


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    """activation(x @ first half of the weight) * (x @ second half): x (T, D), weight (2 F, D) ->
    (T, F). `gate` names the activation.
    """
    if not fills_tiles(len(x)):
        return _composed(x, weight, bias, gate)
    return _GATED_LINEAR(x, weight, bias, gate)


def fills_tiles(rows: int) -> bool:
    if rows <= _ONE_TILE:
        return rows >= MIN_ROWS
    return -rows % _TWO_TILES < _MOST_EMPTY * rows


def _fastest(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    if not _suits(x, weight, bias, gate):
        return _composed(x, weight, bias, gate)
    from engine.backends.custom.frameworks.torch.kernels.cuda import gated_linear as hopper

    return hopper.gated_linear(x, weight)


def _composed(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    return gated(F.linear(x, weight, bias), gate)


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> bool:
    """Whether the CUDA kernel supports these arguments."""
    return (
        gate == "silu"
        and bias is None
        and x.is_cuda
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and x.stride(0) % _VECTOR == 0
        and weight.is_contiguous()
        and weight.shape[1] % _VECTOR == 0
        and weight.shape[0] % (2 * _VECTOR) == 0
        and is_hopper(x.device)
    )


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    return gated_halves(F.linear(x, weight, bias), gate)


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner = shape.hidden_size, shape.inner_size
    weight = inputs.normal(2 * inner, hidden, scale=hidden**-0.5)
    for rows in (*shape.rows, 130):
        x = inputs.normal(rows, hidden)
        yield Example(f"{rows}x{hidden}x{inner}", (x, weight, None, "silu"))


_GATED_LINEAR = register(
    KernelSpec(
        name="gated_linear",
        reference=_reference,
        triton=_fastest,
        examples=_examples,
        bytes_of=lambda x, weight, bias, gate: (
            size_of(x, weight) + len(x) * len(weight) // 2 * x.element_size()
        ),
        flops_of=lambda x, weight, bias, gate: 2 * len(x) * weight.numel(),
        # The reference rounds the matmul's result before the activation, which the kernel does not.
        tolerance={
            torch.float32: Tolerance(1e-4, 1e-4),
            torch.float16: Tolerance(1e-2, 1e-2),
            torch.bfloat16: Tolerance(4e-2, 4e-2),
        },
    )
)
