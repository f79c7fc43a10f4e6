"""Qwen3 (dense): Llama's block with a norm on each query and key head, and its own head size."""

from collections.abc import Mapping
from typing import Any

from engine.backends.custom.architectures import gated_decoder
from engine.backends.custom.architectures.base import ModelConfig, Reader, TensorSpec
from engine.backends.custom.architectures.foreign import uniform_window

HF_NAMES = ("Qwen3ForCausalLM",)
GGUF_NAMES = ("qwen3",)
HF_KEYS = gated_decoder.HF_KEYS | {"attention_bias": "qkv_bias"}
HF_ACTIVATION = gated_decoder.HF_ACTIVATION
GGUF_KEYS = gated_decoder.GGUF_KEYS


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    reader = Reader(config, "config.json")
    reader.read(int, "head_dim")  # independent of hidden_size, so it can't be derived
    attention_bias = reader.read(bool, "attention_bias", default=False)
    return gated_decoder.config_from_hf(
        config,
        "qwen3",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
        sliding_window=uniform_window(config, reader.read(int, "num_hidden_layers")),
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    Reader(metadata, "GGUF metadata").read(int, "qwen3.attention.key_length")
    return gated_decoder.config_from_gguf(metadata, "qwen3", qk_norm=True)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    return gated_decoder.tensors(config, gguf_interleaved=False)
