"""RMSNorm, alone and fused with the residual addition that precedes it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.torch.kernels.base import Example, Inputs, Shape, op, size_of


@op("norm:rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm: x (T, D) -> (T, D). The mean of squares is computed in float32."""
    return F.rms_norm(x, weight.shape, weight, eps)


@op("norm:add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns rms_norm(x + residual), and the sum itself, which is the new residual stream."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    weight = inputs.normal(shape.hidden_size)
    for rows in shape.rows:
        x = inputs.normal(rows, shape.hidden_size, scale=3)
        yield Example(f"{rows}x{shape.hidden_size}", (x, weight, 1e-5))


def _add_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype, seed=1)
    for example in _examples(shape, device, dtype):
        x, weight, eps = example.args
        yield Example(example.label, (x, inputs.normal(*x.shape), weight, eps))


rms_norm.specify(_examples, lambda x, weight, eps: size_of(x, x, weight))
add_rms_norm.specify(_add_examples, lambda x, residual, weight, eps: size_of(x, x, x, x, weight))
