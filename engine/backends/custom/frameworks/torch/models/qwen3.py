"""Qwen3, dense: Llama's block, query and key heads normalised before rotation (`qk_norm`)."""

from torch import nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm
from engine.backends.custom.frameworks.torch.layers.rotary import Rotary
from engine.backends.custom.frameworks.torch.models import llama
from engine.backends.custom.frameworks.torch.models.base import Decoder


class Qwen3(Decoder):
    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__(config, rotary)
        self.layers = nn.ModuleList(llama.block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
