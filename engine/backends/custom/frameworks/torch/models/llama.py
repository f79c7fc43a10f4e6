"""Llama 1 to 3, and what shares its block: Mistral (a sliding window) and SmolLM."""

from torch import nn

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.torch.layers.attention import Attention
from engine.backends.custom.frameworks.torch.layers.mlp import GatedMLP
from engine.backends.custom.frameworks.torch.layers.norm import RMSNorm
from engine.backends.custom.frameworks.torch.layers.rotary import Rotary
from engine.backends.custom.frameworks.torch.models.base import Decoder, PreNormBlock


class Llama(Decoder):
    def __init__(self, config: ModelConfig, rotary: Rotary | None) -> None:
        super().__init__(config, rotary)
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


def block(config: ModelConfig, layer: int) -> PreNormBlock:
    return PreNormBlock(
        attn_norm=RMSNorm(config.hidden_size, config.norm_eps),
        attn=Attention(config, layer),
        mlp_norm=RMSNorm(config.hidden_size, config.norm_eps),
        mlp=GatedMLP(config),
    )
