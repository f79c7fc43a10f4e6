"""Writes tiny Hugging Face checkpoints with random weights, one per family, for the other scripts.

The weights vary enough for attention to be peaked and norms to matter. A lost bias or a wrong
rotation then changes a layer's output by far more than rounding does.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "granite", "olmo2")
_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_positions": 128},
    "llama": _GATED,
    "qwen2": _GATED | {"tie_word_embeddings": True},
    "qwen3": _GATED | {"head_dim": 12},
    "granite": _GATED
    | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.21,
        "logits_scaling": 5.0,
    },
    "olmo2": _GATED,
}


def save_tiny(family: str, folder: Path, num_layers: int = 3) -> Any:
    """Write a checkpoint into the folder and return Transformers' model, in float32."""
    logging.disable_progress_bar()
    torch.manual_seed(sum(map(ord, family)))
    config = AutoConfig.for_model(
        family, **_COMMON | _SIZES[family] | {"num_hidden_layers": num_layers}
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model
