"""Tiny models whose configurations have what plain Llamas lack: experts, layers that differ."""

from typing import Any

from engine.architectures.base import (
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
)
from tests.support.files import tokenizer_files
from tests.support.files.gguf_files import tiny_config

VOCAB_SIZE = len(tokenizer_files.byte_level_metadata()["tokenizer.ggml.tokens"])
_LOCAL = RopeConfig(theta=100.0, dim=16)
_GLOBAL = RopeConfig(theta=500.0, dim=16)


def _model(family: str, **settings: Any) -> ModelConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": VOCAB_SIZE}
    return tiny_config(family, **sizes, bos_id=0, eos_ids=(2,), **settings)


FAMILIES = {
    "gemma3": _model(
        "gemma3",
        tie_embeddings=True,
        activation="gelu_tanh",
        norm_placement="both",
        qk_norm="head",
        embedding_multiplier=16.0,
        rope=_GLOBAL,
        layers=(LayerConfig(8, _LOCAL, False), LayerConfig(None, _GLOBAL, False)),
    ),
    "qwen3_moe": _model(
        "qwen3_moe",
        num_layers=1,
        qk_norm="head",
        experts=ExpertsConfig(count=3, per_token=2, size=256, renormalizes=True),
    ),
    "deepseek": _model(
        "deepseek",
        num_layers=1,
        num_kv_heads=1,
        head_dim=256 + 16,
        rope=_GLOBAL,
        latent=LatentConfig(kv_rank=256, q_rank=256, nope_dim=32, rope_dim=16, value_dim=40),
        experts=ExpertsConfig(
            *(3, 2, 256, "sigmoid", True),
            group_score="best_two",
            correction=True,
            shared_size=256,
        ),
    ),
}
