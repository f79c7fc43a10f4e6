"""Families as data: what a config.json or GGUF metadata means, and what is refused by its key."""

import math
from dataclasses import replace
from typing import Any

import pytest

from engine.architectures.base import EncoderConfig, ModelConfig, RopeConfig
from engine.architectures.checks import check_config
from engine.architectures.export import gguf_metadata
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from tests.support.files.gguf_files import MULTIPLIERS, tiny_config
from tests.support.files.safetensors_files import hf_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


def from_hf(family: str, **changes: Any) -> ModelConfig:
    """The tiny model of a family with some config.json keys changed; None removes a key."""
    config: ModelConfig = architecture(family).config_from_hf(
        hf_config(tiny_config(family), **changes)
    )
    return config


def rope_of(**changes: Any) -> RopeConfig:
    rope = from_hf("llama", **changes).rope
    assert rope is not None
    return rope


class TestRopeFromHf:
    """Old and new spelling must mean the same."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "llama3", **LLAMA3},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        ],
    )
    def test_old_and_new_config_spellings_of_rope_scaling_agree(
        self, settings: dict[str, Any]
    ) -> None:
        new = rope_of(rope_theta=None, rope_parameters=settings | {"rope_theta": 700.0})
        old = rope_of(rope_theta=700.0, rope_scaling=settings)
        kind = settings["rope_type"]
        oldest = {key: value for key, value in settings.items() if key != "rope_type"}
        assert new == old == rope_of(rope_theta=700.0, rope_scaling=oldest | {"type": kind})
        assert (new.kind, new.theta, new.factor) == (kind, 700.0, settings["factor"])

    def test_rope_theta_defaults_and_plain_parameters(self) -> None:
        assert rope_of() == RopeConfig(theta=500.0, dim=16)
        assert rope_of(rope_theta=None) == RopeConfig(theta=10_000.0, dim=16)
        plain = {"rope_type": "default", "rope_theta": 300.0}
        assert rope_of(rope_parameters=plain) == RopeConfig(theta=300.0, dim=16)

    def test_partial_rotary_factor_halves_the_rotated_dimensions(self) -> None:
        assert rope_of(partial_rotary_factor=0.5).dim == 8

    def test_llama3_rope_parameters_are_read(self) -> None:
        rope = rope_of(rope_scaling={"rope_type": "llama3", **LLAMA3})
        assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
        assert rope.original_max_position == 24

    def test_dynamic_rope_keeps_the_trained_context_length(self) -> None:
        config = from_hf("llama", rope_scaling={"type": "dynamic", "factor": 4.0})
        assert config.rope is not None
        assert config.max_position == config.rope.original_max_position == 48

    def test_yarn_defaults_and_extended_context_are_read(self) -> None:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
        config = from_hf("llama", rope_scaling=yarn)
        assert config.rope is not None
        assert (config.rope.beta_fast, config.rope.beta_slow) == (32.0, 1.0)
        assert config.rope.attention_factor is None
        assert config.max_position == 4 * 48  # the config states the length before stretching
        scaled = rope_of(rope_scaling=yarn | {"mscale": 2.0, "mscale_all_dim": 1.0})
        expected = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
        assert scaled.attention_factor == pytest.approx(expected)
        del yarn["factor"]
        assert rope_of(rope_scaling=yarn | {"original_max_position_embeddings": 12}).factor == 4.0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"rope_type": "xpos", "factor": 2.0}, "rope_scaling: rope type 'xpos'"),
            ({"rope_type": "longrope"}, "lacks the required key 'short_factor'"),
            (
                {"rope_type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7},
                "longrope needs 8 short and long factors",
            ),
            (
                {"rope_type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0, "2"] * 4},
                "'long_factor' must be float, found str",
            ),
            ({"type": "xpos"}, "rope type 'xpos' is not supported"),
            ({"type": "linear"}, "lacks the required key 'factor'"),
            ({"type": "linear", "factor": 0.0}, "factor must be above 0"),
            ({"type": "linear", "factor": math.inf}, "'factor' must be a finite number"),
            ({"type": "llama3", "factor": 8.0}, "lacks the required key 'low_freq_factor'"),
            ({"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "must differ"),
            ({"type": "yarn", "factor": 2.0, "truncate": 1}, "'truncate' must be bool"),
            ({"full_attention": {"rope_type": "default"}}, "differ between layers"),
        ],
    )
    def test_unsupported_rope_settings_are_refused(
        self, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ModelFormatError, match=message):
            rope_of(rope_scaling=settings)


class TestRopeFromGguf:
    @staticmethod
    def rope(**scaling: Any) -> RopeConfig:
        metadata = {
            "general.architecture": "qwen2",
            "qwen2.vocab_size": 40,
            "qwen2.block_count": 2,
            "qwen2.context_length": 48,
            "qwen2.embedding_length": 64,
            "qwen2.feed_forward_length": 96,
            "qwen2.attention.head_count": 4,
            "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
            **{f"qwen2.rope.{key.replace('__', '.')}": value for key, value in scaling.items()},
        }
        config: ModelConfig = architecture("qwen2").config_from_gguf(metadata)
        assert config.rope is not None
        return config.rope

    def test_gguf_rope_without_scaling_is_plain(self) -> None:
        plain = RopeConfig(theta=10_000.0, dim=16)
        assert self.rope() == self.rope(scaling__type="none") == plain
        assert self.rope(scaling__factor=1.0) == self.rope(scale_linear=0.0) == plain

    def test_gguf_linear_rope_scaling_is_read_in_three_spellings(self) -> None:
        stated = self.rope(scaling__type="linear", scaling__factor=2.0)
        assert (stated.kind, stated.factor) == ("linear", 2.0)
        assert stated == self.rope(scaling__factor=2.0) == self.rope(scale_linear=2.0)

    def test_gguf_yarn_attention_factor_includes_the_log_term(self) -> None:
        rope = self.rope(
            scaling__type="yarn",
            scaling__factor=4.0,
            scaling__original_context_length=32,
            scaling__attn_factor=0.5,
        )
        assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
        assert rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))


def test_mistral_sliding_window_has_a_default_and_can_be_null() -> None:
    assert from_hf("llama", model_type="mistral", sliding_window=16).sliding_window == 16
    assert from_hf("llama", model_type="mistral").sliding_window == 4096
    stated = hf_config(tiny_config("llama"), model_type="mistral") | {"sliding_window": None}
    assert architecture("llama").config_from_hf(stated).sliding_window is None
    assert from_hf("llama", sliding_window=16).sliding_window is None  # Llama has no window


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"sliding_window": 16}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ({"sliding_window": 16, "use_sliding_window": True}, None),  # 28 layers without one
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, None),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            16,
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_sliding_window_needs_use_sliding_window(
    family: str, settings: dict[str, Any], window: int | None
) -> None:
    assert from_hf(family, **settings).sliding_window == window


def test_attention_biases_follow_the_config() -> None:
    config = from_hf("llama", attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)
    names = {spec.name for spec in architecture("llama").tensors(config)}
    assert {f"layers.0.attn.{part}.bias" for part in "qkvo"} <= names
    assert {f"layers.1.mlp.{part}.bias" for part in ("gate", "up", "down")} <= names


def test_gguf_rows_are_unpermuted_where_converters_permute() -> None:
    def transforms(family: str) -> dict[str, int]:
        specs = architecture(family).tensors(tiny_config(family, qkv_bias=True))
        return {
            spec.name: spec.gguf_transform.paired for spec in specs if spec.gguf_transform.paired
        }

    assert (
        transforms("llama")
        == transforms("granite")
        == {
            f"layers.{layer}.attn.{part}.{kind}": 16
            for layer in (0, 1)
            for part in "qk"
            for kind in ("weight", "bias")
        }
    )
    assert transforms("qwen2") == transforms("qwen3") == transforms("gpt2") == {}
    assert transforms("olmo2") == {}


def test_keys_missing_from_old_configs_get_defaults() -> None:
    llama = from_hf("llama", num_key_value_heads=None, head_dim=None, tie_word_embeddings=None)
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (4, 16, False)
    gpt2 = from_hf("gpt2", n_inner=None, tie_word_embeddings=None)
    assert (gpt2.intermediate_size, gpt2.tie_embeddings) == (4 * 64, True)


def test_granite_multipliers_have_defaults_by_file_format() -> None:
    """Transformers scales scores by 1 where nothing is stated, llama.cpp by the usual root."""
    tiny = tiny_config("granite")
    assert tiny.attention_scale == MULTIPLIERS["attention_multiplier"] != tiny.head_dim**-0.5
    bare = from_hf("granite", **dict.fromkeys(MULTIPLIERS))
    assert (bare.embedding_multiplier, bare.residual_multiplier) == (1.0, 1.0)
    assert (bare.attention_scale, bare.logits_scaling) == (1.0, 1.0)
    stated = gguf_metadata(tiny)
    scales = [key for key in stated if key.endswith("scale")]
    assert len(scales) == len(MULTIPLIERS)
    for key in scales:
        del stated[key]
    read = architecture("granite").config_from_gguf(stated)
    assert (read.attention_multiplier, read.attention_scale) == (None, 0.25)
    with pytest.raises(ModelFormatError, match="without rotation is not supported"):
        architecture("granite").config_from_gguf(stated | {"granite.rope.scaling.finetuned": False})


def test_olmo2_normalizes_block_outputs_and_whole_queries_and_keys() -> None:
    config = from_hf("olmo2", attention_bias=True)
    assert (config.norm_placement, config.qk_norm) == ("output", "whole")
    shapes = {spec.gguf: spec.shape for spec in architecture("olmo2").tensors(config)}
    assert shapes["blk.1.attn_q_norm.weight"] == (64,)
    assert shapes["blk.1.attn_k_norm.weight"] == (32,)
    assert shapes["blk.1.post_attention_norm.weight"] == (64,)
    assert shapes["blk.1.post_ffw_norm.weight"] == (64,)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_num_params_equals_the_sum_of_the_matrices(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_embeddings=tied)
    specs = architecture(family).tensors(config)
    matrices = [spec for spec in specs if len(spec.shape) == 2 and "position" not in spec.name]
    assert config.num_params == sum(math.prod(spec.shape) for spec in matrices)


def test_kv_bytes_per_token_count_keys_and_values_of_every_layer() -> None:
    config = tiny_config("llama", num_layers=3, num_kv_heads=2, head_dim=16)
    assert config.kv_bytes_per_token(2) == (16 + 16) * 2 * 3 * 2
    encoder = replace(config, encoder=EncoderConfig(num_token_types=1, max_tokens=8))
    assert encoder.kv_bytes_per_token(2) == 0


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"vocab_size": 1}, {"vocab_size": 0}),
        ({"hidden_size": 1}, {"hidden_size": 0}),
        ({"num_layers": 1024}, {"num_layers": 1025}),
        ({"num_layers": 1}, {"num_layers": 0}),
        ({"num_heads": 1, "num_kv_heads": 1}, {"num_heads": 0, "num_kv_heads": 1}),
        ({"num_heads": 6, "num_kv_heads": 3}, {"num_heads": 6, "num_kv_heads": 4}),
        ({"head_dim": 1024}, {"head_dim": 1025}),
        ({"intermediate_size": 1}, {"intermediate_size": 0}),
        ({"max_position": 2**31 - 1}, {"max_position": 2**31}),
        ({"norm_eps": 0.999}, {"norm_eps": 1.0}),
        ({"rope": RopeConfig(theta=1e-3, dim=16)}, {"rope": RopeConfig(theta=0.0, dim=16)}),
        ({"rope": RopeConfig(theta=1.0, dim=2)}, {"rope": RopeConfig(theta=1.0, dim=0)}),
        ({"rope": RopeConfig(theta=1.0, dim=16)}, {"rope": RopeConfig(theta=1.0, dim=18)}),
        ({"rope": None}, {"rope": RopeConfig(theta=1.0, dim=3)}),
        ({"sliding_window": 1}, {"sliding_window": 0}),
    ],
)
def test_config_values_are_accepted_at_their_limit_and_refused_beyond(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    config = check_config(tiny_config("llama", **good))
    assert config == tiny_config("llama", **good)
    with pytest.raises(ModelFormatError):
        check_config(tiny_config("llama", **bad))


def test_special_ids_beyond_the_vocabulary_are_dropped() -> None:
    config = from_hf("gpt2", bos_token_id=50256, eos_token_id=50256)
    assert (config.bos_id, config.eos_ids) == (None, ())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "'hidden_act': activation 'relu' is not supported"),
        ("qwen2", {"num_local_experts": 8}, "'num_local_experts': mixtures of experts"),
        ("llama", {"num_local_experts": 8, "num_experts_per_tok": 9}, "per token <= experts"),
        ("qwen3", {"num_experts": 64}, "'num_experts': mixtures of experts"),
        ("llama", {"vocab_size": None}, "lacks the required key 'vocab_size'"),
        ("llama", {"vocab_size": "40"}, "'vocab_size' must be int, found str"),
        ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' must be int, found bool"),
        ("llama", {"num_hidden_layers": 0}, "1 <= num_layers"),
        ("llama", {"max_position_embeddings": 10**400}, "must fit into 64 bits"),
        ("llama", {"rms_norm_eps": 10**400}, "'rms_norm_eps' must be a finite number"),
        ("llama", {"num_hidden_layers": 2**40}, "num_layers <= 1024"),
        ("llama", {"head_dim": None, "num_attention_heads": 0}, "must divide the hidden size"),
        ("llama", {"head_dim": None, "num_attention_heads": 5}, "must divide the hidden size"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads divides num_heads"),
        ("llama", {"rms_norm_eps": 0.0}, "0 < norm_eps"),
        ("llama", {"rope_theta": -1.0}, "rotary theta must be above 0"),
        ("llama", {"head_dim": 15}, "rope dim even"),
        ("llama", {"partial_rotary_factor": 1e308}, "'partial_rotary_factor' must be above 0"),
        ("llama", {"partial_rotary_factor": 1e-9}, "rotated values of a head are too few"),
        ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "too few"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 1e308}}, "beyond position"),
        (
            "llama",
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "another rotary theta than 1",
        ),
        ("llama", {"eos_token_id": "</s>"}, "'eos_token_id' must be an int or a list"),
        ("llama", {"eos_token_id": [2, None]}, "'eos_token_id' must be an int or a list"),
        ("qwen3", {"head_dim": None}, "lacks the required key 'head_dim'"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["chunked"] * 2},
            "'layer_types' must have 'sliding_attention' or 'full_attention'",
        ),
        ("granite", {"residual_multiplier": 0}, "multipliers > 0"),
        ("granite", {"logits_scaling": "8"}, "'logits_scaling' must be float, found str"),
        ("gpt2", {"activation_function": "relu"}, "'activation_function': activation 'relu'"),
        ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights': False is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "'scale_attn_by_inverse_layer_idx'"),
        ("gpt2", {"add_cross_attention": True}, "'add_cross_attention'"),
    ],
)
def test_unsupported_config_values_are_refused_by_key(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        from_hf(family, **changes)
