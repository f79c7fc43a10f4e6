"""Norms over the last dimension. Mean and variance are computed in float32 for all dtypes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.torch.kernels.norm import add_rms_norm, rms_norm
from engine.torch.kernels.skinny import Fusion


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 2:  # a norm per head; on a GPU the RoPE kernel computes these norms
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns norm(x + residual), and the sum itself, which is the new residual stream."""
        return add_rms_norm(x, residual, self.weight, self.eps)


def fusion_of(norm: RMSNorm | None, gate: str | None, residual: Tensor | None) -> Fusion:
    """What a matmul's kernel computes besides the matmul."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return Fusion(weight, eps, gate, residual)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns norm(x + residual), and the sum itself, which is the new residual stream."""
        total = residual + x
        return self(total), total
