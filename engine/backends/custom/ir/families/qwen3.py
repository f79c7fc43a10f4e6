"""Llama's block, with a norm on each head of queries and keys."""

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir.families.decoder import DecoderBuilder, pre_norm_decoder
from engine.backends.custom.ir.graph import Graph


def build(config: ModelConfig) -> Graph:
    return pre_norm_decoder(config, DecoderBuilder.split_qkv, DecoderBuilder.gated_mlp)
