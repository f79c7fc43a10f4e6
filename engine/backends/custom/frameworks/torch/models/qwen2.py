"""Qwen2 and Qwen2.5: Llama's block with biases on query, key and value (`qkv_bias`)."""

from torch import nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm
from engine.backends.custom.frameworks.torch.layers.rotary import Rotary
from engine.backends.custom.frameworks.torch.models import llama
from engine.backends.custom.frameworks.torch.models.base import Decoder


class Qwen2(Decoder):
    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__(config, rotary)
        self.layers = nn.ModuleList(llama.block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
