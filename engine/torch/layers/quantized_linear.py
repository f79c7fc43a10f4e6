"""Linear layers and embedding tables with quantized weights, for inference only. They replace
`Linear` and `Embedding`.

While a model loads, each `Linear` is filled and quantized before the next one is filled. For GGUF
models with quantized weights, `models/quantized_loading.py` keeps the weights of the file instead.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.torch.kernels.fp8 import (
    FP8,
    LARGEST,
    QuantizedRows,
    add_rms_norm_rows,
    fp8_linear,
    gated_rows,
    rms_norm_rows,
)
from engine.torch.kernels.quantized import (
    GroupedWeight,
    dequantize,
    grouped_linear,
    prepared,
)
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm, fusion_of

_INT8_GROUP = 32


class GroupedLinear(nn.Module):
    """A linear layer with quantized weights. The rows of all `stacks` together form its matrix. A
    fused layer has several stacks if its parts have different quantized layouts. Each stack is then
    multiplied separately.
    """

    is_invariant = False

    def __init__(
        self,
        stacks: Iterable[GroupedWeight],
        bias: Tensor | None = None,
        parts: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        self.stacks = tuple(map(prepared, stacks))
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
        fusion = fusion_of(norm, gate, residual)
        if len(self.stacks) == 1:
            return grouped_linear(x, self.stacks[0], self.bias, fusion)
        normed = fusion_of(norm, None, None)
        rows = [stack.shape[0] for stack in self.stacks]
        y = torch.empty((len(x), sum(rows)), dtype=x.dtype, device=x.device)
        for stack, part in zip(self.stacks, y.split(rows, dim=-1), strict=True):
            grouped_linear(x, stack, None, normed, part)
        return fusion.finished(y if self.bias is None else y + self.bias)


class GroupedEmbedding(nn.Module):
    def __init__(self, table: GroupedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return dequantize(self.table, self.dtype, ids)


class Fp8Linear(nn.Module):
    """A linear layer with float8 weights and one scale per output channel. Inputs may be quantized
    already; the layer quantizes others, unless there is a single row.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        largest = weight.detach().abs().amax(dim=1).float().clamp(min=1e-12)
        self.scale = largest / LARGEST
        self.weight = (weight.detach().float() / self.scale[:, None]).to(FP8)
        self.bias = None if bias is None else bias.detach()
        self.dtype = weight.dtype
        # Whether the next layer takes quantized inputs. Only the result of a gate is quantized.
        self.feeds_fp8 = False
        self.is_invariant = False  # whether results must not depend on the number of rows

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        return fp8_linear(
            x, self.weight, self.scale, self.bias, self.dtype, invariant=self.is_invariant
        )

    def fused(
        self,
        x: Tensor | QuantizedRows,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | QuantizedRows:
        """Computes residual + act(norm(x) W^T + b). `gate` names act, a gated activation. A part
        whose argument is None is skipped.
        """
        if gate is not None and norm is None and residual is None and self.feeds_fp8:
            return gated_rows(self(x), gate)
        return fp8_linear(
            x,
            self.weight,
            self.scale,
            self.bias,
            self.dtype,
            fusion_of(norm, gate, residual),
            self.is_invariant,
        )


class Fp8RMSNorm(RMSNorm):
    """An RMSNorm whose results are quantized, because only `Fp8Linear` layers read them."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> QuantizedRows:  # type: ignore[override]
        return rms_norm_rows(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[QuantizedRows, Tensor]:  # type: ignore[override]
        return add_rms_norm_rows(x, residual, self.weight, self.eps)


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
