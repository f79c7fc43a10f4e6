"""Linear layers whose results for a token do not depend on the other tokens of a step. They replace
`Linear` in a finished model, for inference on a GPU.
"""

from torch import Tensor, nn

from engine.backends.custom.frameworks.torch.device import keep_sums_whole
from engine.backends.custom.frameworks.torch.kernels.invariant.linear import invariant_linear
from engine.backends.custom.frameworks.torch.layers.linear import Linear
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm
from engine.backends.custom.frameworks.torch.layers.quantized_linear import Fp8Linear


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
        return invariant_linear(normed, self.weight, self.bias, gate=gate, residual=residual)


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
