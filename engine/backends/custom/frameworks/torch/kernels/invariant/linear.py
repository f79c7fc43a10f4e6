"""A matmul for any number of rows whose order of sums depends only on the weight's shape.

The columns of a weight are cut into a fixed number of segments. Each segment is one chain of
tensor-core instructions in ascending order, and the sums of the segments are added in ascending
order. With few rows, the segments run in parallel; with many rows, one program runs all of them.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.activation import gated_halves
from engine.backends.custom.frameworks.torch.kernels.base import (
    Example,
    Inputs,
    KernelSpec,
    Shape,
    Tolerance,
    compiled,
    register,
    size_of,
)

MAX_PARALLEL = 128  # with fewer tiles than this, the segments of a matmul run in parallel


def counters(device: torch.device) -> Tensor:
    """A counter for each tile whose segments run in parallel. Every launch leaves zeros in them, so
    all layers can use the same ones.
    """
    return torch.zeros(MAX_PARALLEL, dtype=torch.int32, device=device)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + act(x W^T + bias) for x (T, D). `gate` names act, a gated activation. A part whose
    argument is None is skipped. `arrived` are `counters`.
    """
    return _INVARIANT_LINEAR(x, weight, bias, arrived, gate=gate, residual=residual)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    y = F.linear(x, weight, bias)
    if gate is not None:
        y = gated_halves(y, gate)
    return y if residual is None else residual + y


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs, arrived = Inputs(device, dtype), counters(device)
    hidden, inner, heads = shape.hidden_size, shape.inner_size, shape.num_heads * shape.head_dim

    def weight(outputs: int, size: int) -> Tensor:
        return inputs.normal(outputs, size, scale=size**-0.5)

    qkv, o = weight(shape.qkv_size, hidden), weight(hidden, heads)
    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    bias = inputs.normal(shape.qkv_size)
    for rows in shape.rows:
        stream, attended = inputs.normal(rows, hidden), inputs.normal(rows, heads)
        yield Example(f"qkv {rows}", (stream, qkv, bias, arrived))
        yield Example(f"o {rows}", (attended, o, None, arrived), {"residual": stream})
        yield Example(f"gate_up {rows}", (stream, gate_up, None, arrived), {"gate": "silu"})
        args = (inputs.normal(rows, inner), down, None, arrived)
        yield Example(f"down {rows}", args, {"residual": stream})


_INVARIANT_LINEAR = register(
    KernelSpec(
        name="invariant_linear",
        reference=_reference,
        triton=compiled("invariant_linear:invariant_linear"),
        examples=_examples,
        bytes_of=lambda x, weight, bias, arrived, **parts: (
            size_of(x, weight, bias, parts.get("residual"))
            + len(x) * len(weight) * x.element_size() // (2 if parts.get("gate") else 1)
        ),
        flops_of=lambda x, weight, *_, **__: 2 * len(x) * weight.numel(),
        tolerance={
            torch.float32: Tolerance(1e-4, 1e-4),
            torch.float16: Tolerance(1e-2, 1e-2),
            torch.bfloat16: Tolerance(4e-2, 4e-2),
        },
    )
)
