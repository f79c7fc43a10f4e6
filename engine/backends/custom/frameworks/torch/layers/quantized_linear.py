"""Linear layers and embedding tables with quantized weights, for inference only. They replace
`Linear` and `Embedding`.

While a model loads, each `Linear` is filled and quantized before the next one is filled. For GGUF
models with quantized weights, `models/quantized_loading.py` keeps the weights of the file instead.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.backends.custom.frameworks.torch.kernels.activation import gated
from engine.backends.custom.frameworks.torch.kernels.quantized import (
    GroupedWeight,
    dequantize,
    grouped_linear,
)
from engine.backends.custom.frameworks.torch.kernels.skinny import fused_linear
from engine.backends.custom.frameworks.torch.layers.linear import Linear
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm

_INT8_GROUP = 32
_LARGEST_FP8 = 448.0


class GroupedLinear(nn.Module):
    """A linear layer with quantized weights. The rows of all `stacks` together form its matrix. A
    fused layer has several stacks if its parts have different quantized layouts. Each stack is then
    multiplied separately.
    """

    def __init__(
        self,
        stacks: Iterable[GroupedWeight],
        bias: Tensor | None = None,
        parts: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        self.stacks = tuple(stacks)
        self.bias = bias
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)

    def fused(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes residual + act(norm(x) W^T + b). `gate` names act, a gated activation. A part
        whose argument is None is skipped.
        """
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if len(self.stacks) == 1:
            return grouped_linear(
                x, self.stacks[0], self.bias, norm=weight, eps=eps, gate=gate, residual=residual
            )
        y = torch.cat(
            [grouped_linear(x, stack, norm=weight, eps=eps) for stack in self.stacks], dim=-1
        )
        if self.bias is not None:
            y = y + self.bias
        if gate is not None:
            y = gated(y, gate)
        return y if residual is None else residual + y


class GroupedEmbedding(nn.Module):
    def __init__(self, table: GroupedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return dequantize(self.table, self.dtype, ids)


class Fp8Linear(nn.Module):
    """A linear layer with float8 weights and one scale per output channel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        largest = weight.detach().abs().amax(dim=1).float().clamp(min=1e-12)
        self.scale = largest / _LARGEST_FP8
        self.weight = (weight.detach().float() / self.scale[:, None]).to(torch.float8_e4m3fn)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.fused(x)

    def fused(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Computes residual + act(norm(x) W^T + b). `gate` names act, a gated activation. A part
        whose argument is None is skipped.
        """
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        return fused_linear(
            x,
            self.weight,
            self.bias,
            scale=self.scale,
            norm=weight,
            eps=eps,
            gate=gate,
            residual=residual,
        )


def int8_weight(weight: Tensor) -> GroupedWeight:
    """Quantizes a matrix to int8, with one scale for each group of 32 values. The scale maps the
    largest absolute value of the group to 127. Values are rounded to the nearest integer.
    """
    groups = weight.detach().float().unflatten(1, (-1, _INT8_GROUP))  # (F, D / 32, 32)
    scales = (groups.abs().amax(dim=2) / 127).clamp(min=2.0**-24).half()
    values = (groups / scales.float()[..., None]).round().clamp(-127, 127) + 128
    return GroupedWeight(values.to(torch.uint8).flatten(1), scales, None, 8, _INT8_GROUP)


def can_quantize(layer: Linear, kind: str) -> bool:
    """Whether a layer's size allows quantization to `kind`, which is "fp8" or "int8"."""
    return kind == "fp8" or layer.weight.shape[1] % _INT8_GROUP == 0


def quantized(layer: Linear, kind: str) -> GroupedLinear | Fp8Linear:
    if kind == "fp8":
        return Fp8Linear(layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.detach()
    return GroupedLinear([int8_weight(layer.weight)], bias)


def quantize_linears(module: nn.Module, kind: str) -> None:
    """Quantizes all `Linear` layers in `module` whose size allows it."""
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            quantize_linears(child, kind)
        elif can_quantize(child, kind):
            setattr(module, name, quantized(child, kind))
