"""Tiny Hugging Face models with random weights, one per feature that a framework must get right.

Random weights are wide enough for attention to be peaked and norms to matter: a wrong rotation, a
lost bias or a window off by one moves logits by far more than the tolerance.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 97
NUM_LAYERS = 3
MAX_POSITION = 128
# Longer than the sliding window and than the context that scaled rotary rules start from.
TEXT_LENGTH = 40

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**COMMON | {"tie_word_embeddings": False} | changes))


def _rope(kind: str, **settings: Any) -> PreTrainedModel:
    """Heads wide enough for frequencies on both sides of every rule's bounds, and between them."""
    rope = {"rope_type": kind, "rope_theta": 10000.0} | settings
    return _llama(head_dim=32, rope_parameters=rope)


def _gpt2(**changes: Any) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=48,
        n_layer=NUM_LAYERS,
        n_head=4,
        n_positions=MAX_POSITION,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "gpt2": _gpt2,
    "gpt2-untied": lambda: _gpt2(tie_word_embeddings=False),
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: _llama(head_dim=16, num_key_value_heads=6),
    "llama-four-ways": lambda: _llama(head_dim=16, num_attention_heads=8, num_key_value_heads=4),
    "llama-linear": lambda: _rope("linear", factor=4.0),
    "llama-dynamic": lambda: _rope("dynamic", factor=4.0),
    "llama-llama3": lambda: _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "llama-yarn": lambda: _rope(
        "yarn", factor=4.0, beta_fast=4.0, original_max_position_embeddings=64
    ),
    "mistral-window": lambda: MistralForCausalLM(
        MistralConfig(**COMMON, sliding_window=11, tie_word_embeddings=False)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**COMMON, head_dim=12, tie_word_embeddings=False)
    ),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            **COMMON,
            tie_word_embeddings=True,
            embedding_multiplier=12,
            residual_multiplier=0.22,
            attention_multiplier=0.21,
            logits_scaling=5.0,
        )
    ),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**COMMON, tie_word_embeddings=False)),
}


def make(name: str, **changes: Any) -> PreTrainedModel:
    """The model in float32, the same weights every time; norms and biases are random as well."""
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name](**changes).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """The model, and the folder where it lies as a checkpoint."""
    model = make(name)
    path = folder / name
    model.save_pretrained(path)
    return model, path


def text(length: int = TEXT_LENGTH, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
