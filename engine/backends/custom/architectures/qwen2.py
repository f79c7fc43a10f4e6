"""Qwen2 and Qwen2.5: Llama's block with biases on the query, key and value projections."""

from collections.abc import Mapping
from typing import Any

from engine.backends.custom.architectures import gated_decoder
from engine.backends.custom.architectures.base import ModelConfig, Reader, TensorSpec
from engine.backends.custom.architectures.foreign import uniform_window

HF_NAMES = ("Qwen2ForCausalLM",)
GGUF_NAMES = ("qwen2",)
HF_KEYS = gated_decoder.HF_KEYS
HF_ACTIVATION = gated_decoder.HF_ACTIVATION
GGUF_KEYS = gated_decoder.GGUF_KEYS


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    num_layers = Reader(config, "config.json").read(int, "num_hidden_layers")
    return gated_decoder.config_from_hf(
        config,
        "qwen2",
        qkv_bias=True,
        out_bias=False,
        sliding_window=uniform_window(config, num_layers),
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    return gated_decoder.config_from_gguf(metadata, "qwen2", qkv_bias=True)


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    return gated_decoder.tensors(config, gguf_interleaved=False)
