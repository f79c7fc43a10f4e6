"""Linear layers whose results for a token do not depend on the other tokens of a step. They replace
`Linear` in a finished model, for inference on a GPU.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.torch.compiling import compiling_ahead
from engine.torch.device import keep_sums_whole
from engine.torch.kernels.invariant.linear import (
    compare_library,
    has_library,
    invariant_linear,
)
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm, fusion_of
from engine.torch.layers.quantized_linear import Fp8Linear

log = logging.getLogger(__name__)


class InvariantLinear(Linear):
    is_invariant = True

    def __init__(self, layer: Linear) -> None:
        """Takes over the parameters of `layer`."""
        nn.Module.__init__(self)
        self.parts, self.weight, self.bias = layer.parts, layer.weight, layer.bias

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
        normed = x if norm is None else norm(x)
        return invariant_linear(normed, self.weight, self.bias, fusion_of(None, gate, residual))


def make_invariant(model: nn.Module) -> None:
    """Replaces all `Linear` layers in `model`, and lets those with float8 weights use one kernel
    for any number of tokens.
    """
    keep_sums_whole()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, Fp8Linear):
                child.is_invariant = True
            elif isinstance(child, Linear):
                setattr(module, name, InvariantLinear(child))


@torch.inference_mode()
def choose_kernels(
    model: nn.Module, head: nn.Module, tokens: Sequence[int], samples: Sequence[int]
) -> None:
    """Finds out where cuBLASLt gives the bits of our kernel, for all matrices of a model and for
    the numbers of rows that steps have. Only tokens that are sampled pass the LM head.
    """
    last = set(head.modules())
    by_shape = {
        layer.weight.shape: (
            layer.weight,
            samples if layer in last else sorted({*tokens, *samples}),
        )
        for layer in model.modules()
        if isinstance(layer, InvariantLinear) and has_library(layer.weight)
    }
    if not by_shape:
        return
    with compiling_ahead(next(model.parameters()).device):
        for weight, counts in by_shape.values():
            compare_library(weight, counts[-1:])
    for weight, counts in by_shape.values():
        equal = compare_library(weight, counts)
        others = [count for count in counts if count not in equal]
        shape = tuple(weight.shape)
        log.info("matrix %s: cuBLASLt has other bits for %s rows", shape, others or "no")
