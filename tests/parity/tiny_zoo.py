"""Tiny random models of families that only Transformers has, one for each way to compute them.

Each says whether all sequences run in one pass ("paged") or one by one ("own").
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from tests.parity.tiny_models import MAX_POSITION, NUM_LAYERS, VOCAB

# The names that most configurations use.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}


def _of(family: str, **settings: Any) -> hf.PreTrainedModel:
    model = getattr(hf, f"{family}ForCausalLM")
    return model(model.config_class(**settings))


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names}


MODELS: dict[str, tuple[str, Callable[[], hf.PreTrainedModel]]] = {
    "gpt_neox": ("paged", lambda: _of("GPTNeoX", **SIZES, rotary_pct=0.5)),
    "opt": (
        "paged",
        lambda: _of(
            "OPT", **_without("intermediate_size"), ffn_dim=80, word_embed_proj_dim=48, init_std=0.2
        ),
    ),
    "phi": ("paged", lambda: _of("Phi", **GROUPED)),
    "gemma": ("paged", lambda: _of("Gemma", **GROUPED, head_dim=16)),
    "gemma3": (
        "paged",
        lambda: _of(
            "Gemma3",
            **GROUPED,
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=30,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "olmo2": ("paged", lambda: _of("Olmo2", **GROUPED)),
    "cohere": ("paged", lambda: _of("Cohere", **GROUPED, logit_scale=0.5)),
    "starcoder2": ("paged", lambda: _of("Starcoder2", **GROUPED, sliding_window=9)),
    "mixtral": ("paged", lambda: _of("Mixtral", **GROUPED, num_local_experts=4)),
    "deepseek": (
        "paged",
        lambda: _of(
            "DeepseekV3",
            **GROUPED | {"num_key_value_heads": 4},
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=12,
            q_lora_rank=20,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
        ),
    ),
    "stablelm": ("own", lambda: _of("StableLm", **GROUPED, partial_rotary_factor=0.5)),
    # Soft-capped scores, attention sinks, biases by distance: theirs alone.
    "gemma2": ("own", lambda: _of("Gemma2", **GROUPED, head_dim=16, sliding_window=9)),
    "gpt_oss": (
        "own",
        lambda: _of("GptOss", **GROUPED, head_dim=16, num_local_experts=4, sliding_window=9),
    ),
    "bloom": ("own", lambda: _of("Bloom", **_without("max_position_embeddings"), n_head=4)),
    "gpt_neo": (
        "own",
        lambda: _of(
            "GPTNeo",
            **_without("num_hidden_layers", "num_attention_heads"),
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=9,
        ),
    ),
    "codegen": (
        "own",
        lambda: _of(
            "CodeGen",
            vocab_size=VOCAB,
            n_embd=48,
            n_layer=NUM_LAYERS,
            n_head=4,
            n_positions=MAX_POSITION,
            rotary_dim=8,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    # States instead of keys and values, or beside them.
    "mamba": (
        "own",
        lambda: _of("Mamba", **_without("max_position_embeddings"), state_size=8),
    ),
    "mamba2": (
        "own",
        lambda: _of(
            "Mamba2",
            **_without("max_position_embeddings"),
            state_size=8,
            num_heads=12,
            head_dim=8,
            n_groups=1,
            chunk_size=8,
        ),
    ),
    "rwkv": (
        "own",
        lambda: _of(
            "Rwkv",
            vocab_size=VOCAB,
            hidden_size=48,
            attention_hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=NUM_LAYERS,
            context_length=MAX_POSITION,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "lfm2": (
        "own",
        lambda: _of("Lfm2", **GROUPED, layer_types=["conv", "full_attention", "conv"]),
    ),
    "falcon_h1": (
        "own",
        lambda: _of(
            "FalconH1",
            **GROUPED,
            mamba_d_ssm=48,
            mamba_n_heads=6,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=8,
        ),
    ),
    "qwen3_next": (
        "own",
        lambda: _of(
            "Qwen3Next",
            **GROUPED,
            head_dim=16,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
    ),
}


def make(name: str) -> hf.PreTrainedModel:
    """In float32, the same weights every time."""
    torch.manual_seed(sum(map(ord, name)))
    return MODELS[name][1]().float().eval()
