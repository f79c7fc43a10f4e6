"""Linear layers. Fused ones (q, k, v; gate, up) are one matrix whose row ranges are loaded by name.

Parameters are created uninitialised: a model is allocated in its final dtype and then filled from a
checkpoint. `pack_linears` transforms a finished model, so model code does not know about it.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.custom.frameworks.torch.kernels.activation import gated
from engine.backends.custom.frameworks.torch.kernels.base import use_triton
from engine.backends.custom.frameworks.torch.kernels.skinny import fused_linear
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm


class Linear(nn.Module):
    """y = x W^T + b. `parts` names row ranges that checkpoints store as separate matrices."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        parts: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        assert not parts or sum(size for _, size in parts) == out_features, (parts, out_features)
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, stream: Tensor, x: Tensor, multiplier: float = 1.0) -> Tensor:
        """stream + multiplier W x, in place: the GEMM accumulates into the stream."""
        return torch.addmm(stream, x, self.weight.t(), alpha=multiplier, out=stream)

    def fused(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + gate(W norm(x) + b), in one launch for few rows."""
        if norm is None:
            return fused_linear(x, self.weight, self.bias, gate=gate, residual=residual)
        return fused_linear(
            x,
            self.weight,
            self.bias,
            norm=norm.weight,
            eps=norm.eps,
            gate=gate,
            residual=residual,
        )


def can_add(layer: nn.Module, stream: Tensor) -> TypeGuard[Linear]:
    """Whether `add_to` is possible and faster than a matmul followed by an adding norm."""
    return (
        isinstance(layer, Linear)
        and layer.bias is None
        and use_triton(stream)
        and not torch.is_grad_enabled()
    )


class PackedLinear(nn.Module):
    """A `Linear` with its weight in oneDNN's blocked layout: half the time in bfloat16.

    Inference only, on the CPU only; the packed tensor cannot be read back or trained.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def fused(self, x: Tensor, *, gate: str) -> Tensor:
        """gate(W x + b)"""
        return gated(self(x), gate)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Packing pays in bfloat16; in float32 the unpacked matrix is faster for a single row."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(module: nn.Module) -> None:
    """Replaces every `Linear` below `module`; a plain copy is freed before the next is packed."""
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
