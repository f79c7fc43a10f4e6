"""A GEMM of many rows with a gated activation as its epilogue.

On Hopper this is CUDA C++ (`cuda/gated_linear.cu`). Its GEMM is as fast as cuBLAS, and the
activation takes almost no time. On other devices, GEMM and activation run as separate kernels. So
they do on Hopper if the number of rows would leave too much of the kernel's tiles empty.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.device import is_hopper
from engine.torch.kernels.activation import gated, gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, KernelOp, Shape, size_of

# Min rows for the fused kernel. With fewer rows, at least half of a tile is empty, and cuBLAS is as
# fast.
MIN_ROWS = 65
# A tile has _ONE_TILE rows. If there are more rows, tiles are computed in pairs that share the
# weight, with _TWO_TILES rows per pair. Padding rows cost as much as real rows. If there are more
# padding rows than the fraction _MOST_EMPTY of the real rows, cuBLAS is faster, because it has more
# tile sizes.
_ONE_TILE, _TWO_TILES, _MOST_EMPTY = 128, 256, 0.2
_VECTOR = 8  # the kernel copies this many values at once


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
    """activation(x G^T) * (x U^T), for x (T, D) -> (T, F). The weight (2 F, D) has the rows of G,
    followed by the rows of U. `bias` (2 F,) is added to the products. `gate` names the activation.
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
    from engine.torch.kernels.cuda import gated_linear as hopper

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


_GATED_LINEAR = KernelOp("gated_linear", _reference, _fastest)
_GATED_LINEAR.specify(
    _examples,
    lambda x, weight, bias, gate: size_of(x, weight) + len(x) * len(weight) // 2 * x.element_size(),
    flops_of=lambda x, weight, bias, gate: 2 * len(x) * weight.numel(),
    # The reference rounds the matmul's result before the activation, which the kernel does not.
    tolerance=SUMMED,
)
