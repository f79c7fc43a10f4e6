"""A matmul for any number of rows whose order of sums is always the same.

The products of an output are one chain of tensor-core instructions, in ascending order of columns.
On Hopper, cuBLASLt usually computes the same chain, if it may not split sums
(`device.keep_sums_whole`), and it is the fastest for many rows. But it chooses its kernel by the
number of rows. So it multiplies only as many rows as `compare_library` has compared: those for
which it gave the bits of our kernel.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.device import is_hopper
from engine.torch.kernels.activation import gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, Shape, op, size_of
from engine.torch.kernels.skinny import PLAIN, Fusion

FEW_ROWS = 16  # up to this many rows, our kernel is the fastest
# The numbers of rows for which cuBLASLt gives the bits of our kernel, by a weight's shape and dtype
_EQUAL: dict[tuple[torch.Size, torch.dtype], frozenset[int]] = {}


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion = PLAIN
) -> Tensor:
    """residual + act(x W^T + bias) for x (T, D), without a norm. Every part rounds its result."""
    if not suits_library(x, weight):
        return _invariant_linear(x, weight, bias, fusion)
    y = F.linear(x, weight)
    return fusion.finished(y if bias is None else y + bias)


@op("invariant.linear:invariant_linear")
def _invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, fusion: Fusion) -> Tensor:
    return fusion.finished(F.linear(x, weight, bias), gated_halves)


def suits_library(x: Tensor, weight: Tensor) -> bool:
    """Whether cuBLASLt computes the chain of our kernel, and is faster."""
    return len(x) > FEW_ROWS and len(x) in _EQUAL.get((weight.shape, weight.dtype), ())


def has_library(weight: Tensor) -> bool:
    """Whether cuBLASLt can have the bits of our kernel."""
    return weight.dtype != torch.float32 and weight.is_cuda and is_hopper(weight.device)


def compare_library(weight: Tensor, counts: Sequence[int]) -> frozenset[int]:
    """Multiplies as many rows as each of `counts` says, by cuBLASLt and by our kernel. From now on,
    cuBLASLt multiplies where all bits are equal. Returns these counts.
    """
    x = Inputs(weight.device, weight.dtype).normal(max(counts), weight.shape[1])
    ours = _invariant_linear(x, weight, None, PLAIN)
    equal = (each for each in counts if torch.equal(F.linear(x[:each], weight), ours[:each]))
    _EQUAL[weight.shape, weight.dtype] = found = frozenset(equal)
    return found


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim

    def weight(outputs: int, size: int) -> Tensor:
        return inputs.normal(outputs, size, scale=size**-0.5)

    qkv, o = weight(shape.qkv_size, hidden), weight(hidden, heads)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    bias = inputs.normal(shape.qkv_size)
    for rows in shape.rows:
        stream, attended = inputs.normal(rows, hidden), inputs.normal(rows, heads)
        added = Fusion(residual=stream)
        yield Example(f"qkv {rows}", (stream, qkv, bias, PLAIN))
        yield Example(f"o {rows}", (attended, o, None, added))
        yield Example(f"gate_up {rows}", (stream, gate_up, None, Fusion(gate="silu")))
        yield Example(f"down {rows}", (inputs.normal(rows, inner), down, None, added))


_invariant_linear.specify(
    _examples,
    lambda x, weight, bias, fusion: (
        size_of(x, weight, bias, fusion.residual)
        + len(x) * len(weight) * x.element_size() // (2 if fusion.gate else 1)
    ),
    flops_of=lambda x, weight, *_: 2 * len(x) * weight.numel(),
    tolerance=SUMMED,
)
