"""Llama 1 to 3, Mistral, SmolLM and everything else published under those names."""

from collections.abc import Mapping
from typing import Any

from engine.backends.custom.architectures import gated_decoder
from engine.backends.custom.architectures.base import ModelConfig, Reader, TensorSpec
from engine.core.errors import ModelFormatError

HF_NAMES = ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM")
GGUF_NAMES = ("llama",)
HF_KEYS = gated_decoder.HF_KEYS | {"attention_bias": "qkv_bias", "mlp_bias": "mlp_bias"}
HF_ACTIVATION = gated_decoder.HF_ACTIVATION
GGUF_KEYS = gated_decoder.GGUF_KEYS

# What Transformers assumes when a Mistral config leaves the key out; null switches the window off.
_MISTRAL_WINDOW = 4096


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    reader = Reader(config, "config.json")
    attention_bias = reader.read(bool, "attention_bias", default=False)
    window = None
    if config.get("model_type") == "mistral" and "sliding_window" not in config:
        window = _MISTRAL_WINDOW
    elif config.get("model_type") == "mistral":
        window = reader.read(int, "sliding_window", default=None)
    return gated_decoder.config_from_hf(
        config,
        "llama",
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=reader.read(bool, "mlp_bias", default=False),
        sliding_window=window,
    )


def config_from_gguf(metadata: Mapping[str, Any]) -> ModelConfig:
    config = gated_decoder.config_from_gguf(metadata, "llama")
    if config.rope is None or config.rope.dim != config.head_dim:
        # Converters interleave whole heads, so a part of a head can't be told apart again.
        raise ModelFormatError(
            "GGUF metadata: key 'llama.rope.dimension_count' must equal the head size "
            f"({config.head_dim}): partial rotation is not supported"
        )
    return config


def tensors(config: ModelConfig) -> tuple[TensorSpec, ...]:
    specs = gated_decoder.tensors(config, gguf_interleaved=True)
    factors = TensorSpec(
        "rope.factors", (config.head_dim // 2,), None, "rope_freqs.weight", optional=True
    )
    return (*specs, factors)
