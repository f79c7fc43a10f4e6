"""Settings that differ between layers: windows, RoPE, experts; and the multipliers of families."""

from typing import Any

import numpy as np
import pytest

from engine.architectures.base import ModelConfig
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "sliding_window": 16,
}


def from_hf(family: str, **changes: Any) -> ModelConfig:
    return architecture(family).config_from_hf(SIZES | changes)


def from_gguf(family: str, num_layers: int = 8, **changes: Any) -> ModelConfig:
    row = architecture(family)
    prefix = row.gguf_names[0]
    keys: dict[str, Any] = {
        "vocab_size": 40,
        "embedding_length": 64,
        "block_count": num_layers,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "feed_forward_length": 96,
        "context_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 16,
    }
    stated = {f"{prefix}.{key}": value for key, value in (keys | changes).items()}
    return row.config_from_gguf({"general.architecture": prefix} | stated)


def windows(config: ModelConfig) -> str:
    """One letter per layer: L for a window, G for none."""
    layers = [config.layer(index) for index in range(config.num_layers)]
    return "".join("G" if layer.window is None else "L" for layer in layers)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", "LGLGLGLG"),
        ("gemma3", "LLLLLGLL"),
        ("cohere2", "LLLGLLLG"),
        ("exaone4", "LLLGLLLG"),
    ],
)
def test_window_layers_alternate_by_family_where_the_config_is_silent(
    family: str, expected: str
) -> None:
    assert windows(from_hf(family)) == windows(from_gguf(family)) == expected


def test_window_layers_can_be_listed_in_the_config() -> None:
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    listed = [kinds[letter] for letter in "LLGGLLGG"]
    assert windows(from_hf("gemma3", layer_types=listed)) == "LLGGLLGG"
    assert windows(from_hf("gemma3", sliding_window_pattern=2)) == "LGLGLGLG"
    assert windows(from_hf("exaone4", sliding_window_pattern="LLG")) == "LLGLLGLL"
    assert windows(from_hf("exaone4", sliding_window=None)) == "GGGGGGGG"
    array = {"attention.sliding_window_pattern": np.array([1, 1, 0, 0] * 2, np.bool_)}
    assert windows(from_gguf("gemma3", **array)) == "LLGGLLGG"
    assert windows(from_gguf("gemma3", **{"attention.sliding_window_pattern": 2})) == "LGLGLGLG"
    with pytest.raises(ModelFormatError, match="must have 8 entries"):
        from_gguf("gemma3", **{"attention.sliding_window_pattern": np.ones(4, np.bool_)})
    qwen = from_hf("qwen2", use_sliding_window=True, max_window_layers=6)
    assert windows(qwen) == "GGGGGGLL" and qwen.sliding_window is None


def test_windowed_layers_may_have_their_own_rope() -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = from_hf("gemma3", rope_theta=500.0, rope_local_base_freq=100.0, **scaling)
    local, full = gemma.layer(0).rope, gemma.layer(5).rope
    assert local is not None and full is not None and gemma.ropes == (local, full)
    assert (local.theta, local.kind) == (100.0, "default")
    assert (full.theta, full.kind, full.factor) == (500.0, "linear", 8.0)
    stored = from_gguf("gemma3", **{"rope.freq_base": 500.0})
    assert [rope.theta for rope in stored.ropes] == [10_000.0, 500.0]
    command = from_hf("cohere2")
    assert command.layer(0).rope == command.rope and command.layer(3).rope is None
    smol = from_hf("smollm3", sliding_window=None)
    assert [smol.layer(i).rope is None for i in range(8)] == [False, False, False, True] * 2


def test_qwen_layers_without_experts_are_dense() -> None:
    settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = from_hf("qwen3_moe", **settings, mlp_only_layers=[0, 5], decoder_sparse_step=2)
    found = [config.layer(index).experts for index in range(8)]
    assert found == [False, True, False, True, False, False, False, True]
    names = {spec.name for spec in architecture("qwen3_moe").tensors(config)}
    assert "layers.0.mlp.up.weight" in names and "layers.1.mlp.up.weight" not in names
    assert "layers.1.experts.up.weight" in names and "layers.0.experts.up.weight" not in names


def test_attention_scale_of_the_largest_gemma_models_follows_the_layer_count() -> None:
    """A GGUF file does not state it: the number of layers tells which model it is."""
    assert from_gguf("gemma2").attention_scale == 8**-0.5
    assert from_gguf("gemma2", num_layers=46).attention_scale == (64 / 4) ** -0.5
    assert from_gguf("gemma3", num_layers=62).attention_scale == (64 / 4) ** -0.5
    assert from_hf("gemma3", query_pre_attn_scalar=16).attention_scale == 0.25
    assert from_hf("gemma", sliding_window=None).embedding_multiplier == 8.0


def test_missing_multipliers_and_softcaps_get_family_defaults() -> None:
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": None}
    for config in (from_hf("gemma2"), from_gguf("gemma2")):
        assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    stated = from_hf("gemma2", **caps)
    assert (stated.attention_softcap, stated.logits_softcap) == (3.0, None)
    with pytest.raises(ModelFormatError, match="lacks the required key 'minicpm.embedding_scale'"):
        from_gguf("minicpm", **{"attention.sliding_window": 0})


def test_gguf_files_of_mistral_small_are_read() -> None:
    stated = {
        "general.architecture": "mistral3",
        "mistral3.vocab_size": 40,
        "mistral3.embedding_length": 64,
        "mistral3.block_count": 2,
        "mistral3.attention.head_count": 4,
        "mistral3.feed_forward_length": 96,
        "mistral3.context_length": 256,
        "mistral3.attention.layer_norm_rms_epsilon": 1e-5,
    }
    row = architecture("llama")
    assert "mistral3" in row.gguf_names and row.config_from_gguf(stated).num_layers == 2
    with pytest.raises(ModelFormatError, match=r"'mistral3\.attention\.temperature_scale'"):
        row.config_from_gguf(stated | {"mistral3.attention.temperature_scale": 0.1})


def test_logit_scale_is_inverted_and_multi_token_prediction_layers_are_dropped() -> None:
    assert from_hf("cohere2", logit_scale=0.25).logits_scaling == 4.0
    assert from_gguf("cohere2", logit_scale=0.125).logits_scaling == 8.0
    with pytest.raises(ModelFormatError, match="multipliers > 0"):
        from_hf("cohere2", logit_scale=0.0)
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1}
    plain = {"attention.sliding_window": 0, "leading_dense_block_count": 1}
    glm = from_gguf("glm4_moe", **experts, **plain, nextn_predict_layers=1)
    assert glm.num_layers == 7
    assert [glm.layer(index).experts for index in range(7)] == [False] + [True] * 6
