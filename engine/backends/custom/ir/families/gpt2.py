"""GPT-2: learned positions, layer norms, one matrix for q, k and v, a feed-forward half without
gate.
"""

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir.families.decoder import DecoderBuilder, pre_norm_decoder
from engine.backends.custom.ir.graph import Graph


def build(config: ModelConfig) -> Graph:
    return pre_norm_decoder(config, DecoderBuilder.fused_qkv, DecoderBuilder.plain_mlp)
