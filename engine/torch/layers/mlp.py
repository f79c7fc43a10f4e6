"""The MLP of a layer: gated in Llama and its descendants, without a gate in GPT-2."""

from torch import Tensor, nn

from engine.architectures.base import ModelConfig
from engine.torch.kernels.activation import activate
from engine.torch.layers.linear import Linear
from engine.torch.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """`inner` is the intermediate size; None means that of the config."""

    def __init__(self, config: ModelConfig, inner: int | None = None) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.mlp_bias
        inner = config.intermediate_size if inner is None else inner
        self.activation = config.activation
        self.gate_up = Linear(size, 2 * inner, bias, parts=(("gate", inner), ("up", inner)))
        self.down = Linear(inner, size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activated(x))

    def activated(self, x: Tensor) -> Tensor:
        """The input of the down projection, (T, F)."""
        return self.gate_up.fused(x, gate=self.activation)

    def fused(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + mlp(norm(x)). It uses fused kernels, which are fast for few tokens."""
        return self.down.fused(self.gate_up.fused(x, norm=norm, gate=self.activation), residual=x)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activated(x))

    def activated(self, x: Tensor) -> Tensor:
        """The input of the down projection, (T, F)."""
        return activate(self.up(x), self.activation)
