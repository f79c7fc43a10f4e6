"""Linear layers. A fused layer has one matrix for q, k and v, or for gate and up. Checkpoints store
the parts of this matrix as separate weights, which are loaded into row ranges of the matrix.

Parameters are created uninitialised, in their final dtype, and then filled from a checkpoint.
`pack_linears` replaces the linear layers of a finished model by packed ones for CPUs.
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.torch.kernels.activation import gated
from engine.torch.kernels.base import use_triton
from engine.torch.kernels.skinny import fused_linear
from engine.torch.layers.norm import RMSNorm, fusion_of


class Linear(nn.Module):
    """y = x W^T + b. If W is fused, `parts` are the name and the number of rows of each matrix that
    a checkpoint stores separately.
    """

    is_invariant = False  # whether its results do not depend on the number of tokens

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
        """stream += multiplier * x W^T. The GEMM itself adds to the residual stream, in place."""
        return torch.addmm(stream, x, self.weight.t(), alpha=multiplier, out=stream)

    def fused(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + act(norm(x) W^T + b). `gate` names act, a gated activation. A part whose
        argument is None is skipped. For few tokens, all parts run in one kernel.
        """
        return fused_linear(x, self.weight, self.bias, fusion_of(norm, gate, residual))


def can_add(layer: nn.Module, stream: Tensor) -> TypeGuard[Linear]:
    """Whether `add_to` is possible and fast. The alternative is a plain matmul, whose result the
    next norm adds to the residual stream.
    """
    return (
        isinstance(layer, Linear)
        and not layer.is_invariant  # a library's sum with the residual is rounded otherwise
        and layer.bias is None
        and use_triton(stream)
        and not torch.is_grad_enabled()
    )


class PackedLinear(nn.Module):
    """A `Linear` with its weight in oneDNN's blocked layout. In bfloat16, it takes half the time of
    a plain `Linear`.

    It is only for inference on the CPU. The packed tensor cannot be read back or trained.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def fused(self, x: Tensor, *, gate: str) -> Tensor:
        """act(x W^T + b). `gate` names act, a gated activation."""
        return gated(self(x), gate)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers can be packed and are faster then. In float32 they are not packed,
    because there the unpacked matrix is faster for a single token.
    """
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(module: nn.Module) -> None:
    """Replaces all `Linear` layers in `module` by packed ones. Each original weight is freed before
    the next layer is packed.
    """
    for name, child in module.named_children():
        if isinstance(child, Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
