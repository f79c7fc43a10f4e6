"""A mixture of experts, which takes the place of the MLP in a layer. The router chooses a few
experts for each token. A shared expert, if there is one, computes all tokens.
"""

import torch
from torch import Tensor, nn

from engine.architectures.base import ExpertsConfig, ModelConfig
from engine.torch.kernels.experts import (
    ExpertMatrices,
    experts_mlp,
    grouped_experts_mlp,
    route,
)
from engine.torch.kernels.quantized import GroupedWeight
from engine.torch.layers.linear import Linear
from engine.torch.layers.mlp import GatedMLP


class ExpertLinear(nn.Module):
    """The matrices of all experts, (E, out, in). `parts` names row ranges that checkpoints store as
    separate matrices.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        out_features: int,
        bias: bool,
        parts: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(count, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(count, out_features)) if bias else None


class GroupedExpertLinear(nn.Module):
    """As `ExpertLinear`, with a quantized matrix that has the rows of all experts."""

    def __init__(
        self, rows: GroupedWeight, bias: nn.Parameter | None, parts: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__()
        self.parts = parts
        self.rows = rows
        self.bias = bias


class Experts(nn.Module):
    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        size, inner, count = config.hidden_size, experts.size, experts.count
        self.settings = experts
        self.activation = config.activation
        self.router = Linear(size, count, experts.router_bias)
        self.correction: nn.Parameter | None = None
        if experts.correction:  # float32, because its differences are small
            self.correction = nn.Parameter(torch.empty(count, dtype=torch.float32))
        parts = (("gate", inner), ("up", inner))
        # Loading replaces both if the checkpoint has them quantized.
        self.gate_up: ExpertLinear | GroupedExpertLinear
        self.gate_up = ExpertLinear(count, size, 2 * inner, experts.bias, parts)
        self.down: ExpertLinear | GroupedExpertLinear
        self.down = ExpertLinear(count, inner, size, experts.bias)

    def forward(self, x: Tensor) -> Tensor:
        routed = route(self.router(x), self.correction, self.settings)
        gate_up, down, kind = self.gate_up, self.down, self.activation
        biases = (gate_up.bias, down.bias)
        if isinstance(gate_up, GroupedExpertLinear):
            assert isinstance(down, GroupedExpertLinear)
            count = self.settings.count
            quantized = ExpertMatrices(gate_up.rows, down.rows, *biases, kind)
            return grouped_experts_mlp(x, *routed, quantized, count)
        assert isinstance(down, ExpertLinear)
        dense = ExpertMatrices(gate_up.weight, down.weight, *biases, kind)
        return experts_mlp(x, *routed, dense)


class SharedExpert(GatedMLP):
    """The expert that every token goes through. If it has a router, the router gives each token a
    sigmoid gate, which scales the expert's output.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts.shared_size)
        self.router = Linear(config.hidden_size, 1) if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.router is None else torch.sigmoid(self.router(x)) * y
