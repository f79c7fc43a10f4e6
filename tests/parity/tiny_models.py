"""Tiny Hugging Face models with random weights, one per feature that a framework must get right.

Random weights are wide enough for attention to be peaked and norms to matter: a wrong rotation, a
lost bias or a window off by one moves logits by far more than the tolerance.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers as hf

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # slow to import

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


def _llama(**changes: Any) -> "PreTrainedModel":
    return hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON | {"tie_word_embeddings": False} | changes))


# Layer types that are no multiple of a period, so that a default is noticed.
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}


def _of(family: str, **settings: Any) -> "PreTrainedModel":
    model = getattr(hf, f"{family}ForCausalLM")
    return model(model.config_class(**COMMON | {"pad_token_id": 0} | settings))


LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
MSCALE = {"rope_theta": 10000.0, "mscale": 0.707, "mscale_all_dim": 0.707}


def _plain_rope(part: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}


def _rope(kind: str, **settings: Any) -> "PreTrainedModel":
    """Heads wide enough for frequencies on both sides of every rule's bounds, and between them."""
    rope = {"rope_type": kind, "rope_theta": 10000.0} | settings
    return _llama(head_dim=32, rope_parameters=rope)


def _gpt2(**changes: Any) -> "PreTrainedModel":
    config = hf.GPT2Config(
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
    return hf.GPT2LMHeadModel(config)


MODELS: "dict[str, Callable[..., PreTrainedModel]]" = {
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
    "mistral-window": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**COMMON, sliding_window=11, tie_word_embeddings=False)
    ),
    "qwen2": lambda: _of("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: _of("Qwen3", head_dim=12, tie_word_embeddings=False),
    "granite": lambda: _of(
        "Granite",
        tie_word_embeddings=True,
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.21,
        logits_scaling=5.0,
    ),
    "olmo2": lambda: _of("Olmo2", tie_word_embeddings=False),
}
# Models with settings that the first ones do not have.
MORE: "dict[str, Callable[..., PreTrainedModel]]" = {
    "ministral": lambda: _of("Ministral", head_dim=8, sliding_window=11, layer_types=MIXED),
    "qwen2-window": lambda: _of(
        "Qwen2", use_sliding_window=True, sliding_window=11, max_window_layers=1
    ),
    "smollm3": lambda: _of("SmolLM3", num_hidden_layers=4),
    "olmo3": lambda: _of(
        "Olmo3",
        head_dim=32,
        sliding_window=11,
        layer_types=MIXED,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": YARN | {"rope_theta": 5000.0},
        },
    ),
    "exaone4": lambda: _of("Exaone4", sliding_window=11, layer_types=MIXED),
    "seed_oss": lambda: _of("SeedOss", head_dim=12),
    "ernie4_5": lambda: _of("Ernie4_5", head_dim=12, use_bias=True),
    "gemma": lambda: _of("Gemma", head_dim=16),
    "gemma2": lambda: _of(
        "Gemma2",
        head_dim=16,
        sliding_window=11,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": lambda: _of(
        "Gemma3",
        head_dim=16,
        sliding_window=11,
        query_pre_attn_scalar=16,
        layer_types=MIXED,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "phi3": lambda: _of("Phi3", sliding_window=13),
    "phi3-long": lambda: _of(
        "Phi3",
        num_attention_heads=3,
        num_key_value_heads=1,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.25, 1.5, 1.75],
            "long_factor": [1.5, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 32,
        },
    ),
    "glm": lambda: _of("Glm", head_dim=16),
    "glm4": lambda: _of("Glm4", head_dim=16, attention_bias=True),
    "cohere": lambda: _of("Cohere", logit_scale=0.25),
    "cohere2": lambda: _of("Cohere2", logit_scale=0.25, sliding_window=11, layer_types=MIXED),
    "starcoder2": lambda: _of("Starcoder2", sliding_window=13),
    "stablelm": lambda: _of("StableLm", use_qkv_bias=True, rope_parameters=_plain_rope(part=0.5)),
    "stablelm-parallel": lambda: _of(
        "StableLm", use_parallel_residual=True, rope_parameters=_plain_rope(part=0.5)
    ),
    "nemotron": lambda: _of("Nemotron", head_dim=8, attention_bias=True, initializer_range=0.1),
    "gpt_neox": lambda: _of("GPTNeoX", rope_parameters=_plain_rope(part=0.5)),
    "gpt_neox-serial": lambda: _of(
        "GPTNeoX", use_parallel_residual=False, rope_parameters=_plain_rope(part=0.5)
    ),
    "mpt": lambda: hf.MptForCausalLM(
        hf.MptConfig(
            vocab_size=VOCAB,
            d_model=48,
            n_heads=6,
            n_layers=NUM_LAYERS,
            max_seq_len=MAX_POSITION,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "mixtral": lambda: _of("Mixtral", num_local_experts=4, head_dim=8),
    "qwen2_moe": lambda: _of("Qwen2Moe", **EXPERTS, shared_expert_intermediate_size=40),
    "qwen3_moe": lambda: _of("Qwen3Moe", **EXPERTS, head_dim=12, norm_topk_prob=True),
    "qwen3_moe-dense": lambda: _of("Qwen3Moe", **EXPERTS, head_dim=12, mlp_only_layers=[1]),
    "olmoe": lambda: _of("Olmoe", num_experts=6, num_experts_per_tok=2),
    "granitemoe": lambda: _of(
        "GraniteMoe",
        num_local_experts=6,
        num_experts_per_tok=3,
        embedding_multiplier=12,
        residual_multiplier=0.22,
        attention_multiplier=0.21,
        logits_scaling=5.0,
    ),
    "glm4_moe": lambda: _of(
        "Glm4Moe",
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    ),
    "glm4_moe-groups": lambda: _of(
        "Glm4Moe",
        head_dim=16,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        norm_topk_prob=False,
    ),
    "deepseek_v2": lambda: _of(
        "DeepseekV2", **LATENT, first_k_dense_replace=1, rope_parameters=YARN | MSCALE
    ),
    "deepseek_v2-groups": lambda: _of(
        "DeepseekV2",
        **LATENT
        | {"q_lora_rank": 28, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": lambda: _of(
        "DeepseekV3",
        **LATENT | {"q_lora_rank": 28, "n_group": 3, "topk_group": 2, "n_shared_experts": 1},
        first_k_dense_replace=1,
        rope_parameters=YARN | MSCALE,
    ),
    "glm4_moe_lite": lambda: _of("Glm4MoeLite", **LATENT | {"q_lora_rank": 28}, rms_norm_eps=0.05),
    "youtu": lambda: _of(
        "Youtu",
        **{key: value for key, value in LATENT.items() if "exper" not in key and "_g" not in key},
        tie_word_embeddings=True,
    ),
    "gpt_oss": lambda: _of(
        "GptOss",
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=11,
        rope_parameters=YARN | {"rope_theta": 10000.0, "truncate": False},
    ),
}


# Models whose layers keep states, not only keys and values. JAX and tinygrad refuse them.
def _mixed_with(kind: str) -> dict[str, list[str]]:
    return {"layer_types": [kind, "full_attention", kind][: COMMON["num_hidden_layers"]]}


MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 12, "mamba_n_groups": 1},
    **{"mamba_d_state": 16, "mamba_chunk_size": 8},
}


def _nemotron_h(blocks: list[str]) -> "PreTrainedModel":
    return _of(
        "NemotronH",
        layers_block_type=blocks,
        head_dim=8,
        mamba_num_heads=12,
        mamba_head_dim=8,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        initializer_range=0.1,
        time_step_min=1e-9,  # Transformers applies it to prompts, but not to generated tokens
    )


HYBRIDS: "dict[str, Callable[..., PreTrainedModel]]" = {
    "lfm2": lambda: _of("Lfm2", **_mixed_with("conv")),
    "lfm2-biases": lambda: _of(
        "Lfm2", layer_types=["full_attention", "conv", "conv"], conv_bias=True, conv_L_cache=4
    ),
    "granitemoehybrid": lambda: _of(
        "GraniteMoeHybrid",
        **_mixed_with("linear_attention") | MAMBA,
        num_local_experts=0,
        shared_intermediate_size=72,
        residual_multiplier=0.22,
        attention_multiplier=0.21,
    ),
    "granitemoehybrid-experts": lambda: _of(
        "GraniteMoeHybrid",
        **_mixed_with("linear_attention") | MAMBA,
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
    ),
    "nemotron_h": lambda: _nemotron_h(["linear_attention", "mlp", "full_attention", "mlp"]),
    "nemotron_h-last": lambda: _nemotron_h(["full_attention", "mlp", "linear_attention"]),
    "qwen3_next": lambda: _of(
        "Qwen3Next",
        **_mixed_with("linear_attention") | EXPERTS,
        head_dim=16,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        shared_expert_intermediate_size=40,
    ),
    "qwen3_next-dense": lambda: _of(
        "Qwen3Next",
        **_mixed_with("linear_attention") | EXPERTS,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        mlp_only_layers=[1],
    ),
}

ALL = MODELS | MORE | HYBRIDS


def quick_first(
    names: Sequence[str], without: Sequence[str] = (), integration: Sequence[str] = ()
) -> list[Any]:
    """Parameters of a test: the names, those of `integration` with that mark, then all other models
    with the mark `slow`, but none of `without`.
    """
    others = (name for name in ALL if name not in (*names, *integration, *without))
    return [
        *names,
        *(pytest.param(name, marks=pytest.mark.integration) for name in integration),
        *(pytest.param(name, marks=pytest.mark.slow) for name in others),
    ]


def in_frameworks(
    names: Sequence[str], frameworks: Sequence[str], few: Mapping[str, Sequence[str]]
) -> list[Any]:
    """Parameters of a test: each model in each framework. A framework of `few` compiles anew for
    each model: all but the models that it names, which cover its code, have the mark `integration`.
    """
    return [
        pytest.param(
            *(name, framework),
            id=f"{framework}-{name}",
            marks=[pytest.mark.integration] * (name not in few.get(framework, names)),
        )
        for name in names
        for framework in frameworks
    ]


def make(name: str, **changes: Any) -> "PreTrainedModel":
    """The model in float32, the same weights every time; norms and biases are random as well."""
    torch.manual_seed(sum(map(ord, name)))
    model = ALL[name](**changes).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            # Transformers left it as it was.
            elif not parameter.any() or (parameter.std() > 1).any():
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.3)
    return model


def save(name: str, folder: Path) -> "tuple[PreTrainedModel, Path]":
    """The model, and the folder where it lies as a checkpoint."""
    model = make(name)
    path = folder / name
    model.save_pretrained(path)
    return model, path


def text(length: int = TEXT_LENGTH, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()
