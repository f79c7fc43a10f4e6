"""DeepSeek's configs and files: what they mean, what the cache takes, and what is refused."""

import json
import logging
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.architectures import deepseek, export
from engine.architectures.base import ExpertsConfig, ModelConfig
from engine.architectures.deepseek import DEEPSEEK
from engine.architectures.weight_rows import Stored
from engine.conversion.convert import convert
from engine.core.errors import ConfigError, ModelFormatError
from engine.ipc.options import EngineOptions
from engine.ir.execute import ReferenceBatch, State, run_graph
from engine.ir.models.decoder import build_graph
from engine.ir.reference import F32
from engine.native.execution.allocation import kv_token_bytes
from engine.native.execution.build import build_runner
from engine.runtime.model_runner import DeviceInfo, RunnerConfig
from engine.weights.model import open_model
from engine.worker.memory import dense_needs, plan_memory
from tests.parity.runner_driver import RunnerDriver
from tests.scoreboard.mutations.models import FAMILIES
from tests.support.files import safetensors_files, tokenizer_files
from tests.support.files.gguf_files import random_weights
from tests.support.references.ir_driver import Driver, new_state, text

# The sizes of DeepSeek-V2-Lite.
LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}
# What DeepSeek-V3 has in other ways.
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def config_of(**changes: Any) -> ModelConfig:
    return DEEPSEEK.config_from_hf(LITE | changes)


def test_the_mla_cache_holds_a_latent_and_a_rotated_key_per_token_and_layer() -> None:
    config = config_of()
    assert config.kv_bytes_per_token(2) == (512 + 64) * 2 * 27
    assert kv_token_bytes(config, "bfloat16") == (512 + 64) * 2 * 27
    device = DeviceInfo("cpu", "bfloat16", 2**36)
    needs = dense_needs(config, device)
    made = plan_memory(
        config.max_position, EngineOptions(model_path="m", framework="torch"), device, needs
    )
    assert made.bytes_per_token == (512 + 64) * 2 * 27
    matrices = [spec for spec in DEEPSEEK.tensors(config) if len(spec.shape) > 1]
    assert config.num_params == sum(math.prod(spec.shape) for spec in matrices) == 15_706_357_760


def test_yarn_scales_deepseeks_attention_scores() -> None:
    config = config_of()
    assert config.attention_scale == pytest.approx((1 + 0.0707 * math.log(40)) ** 2 / 192**0.5)
    assert config.rope is not None and config.rope.attention_factor == 1
    plain = config_of(rope_scaling=None)
    assert plain.attention_scale == pytest.approx(192**-0.5)


def test_deepseeks_expert_selection_settings_are_read() -> None:
    assert config_of().experts == ExpertsConfig(64, 6, 1408, shared_size=2816)
    limited = config_of(topk_method="group_limited_greedy", n_group=8, topk_group=3)
    assert limited.experts == ExpertsConfig(
        64, 6, 1408, groups=8, groups_per_token=3, shared_size=2816
    )
    # Without that method, the groups of a config mean nothing.
    assert config_of(n_group=8, topk_group=3).experts == config_of().experts
    assert config_of(**V3).experts == ExpertsConfig(
        *(64, 6, 1408, "sigmoid", True, 2.5, 8, 4, "best_two", True), shared_size=2816
    )
    layers = [layer.experts for layer in config_of(**V3).layers]
    assert layers == [False] + [True] * 26


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"index_topk": 2048}, "index_topk"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"kv_lora_rank": 0}, "kv_rank >= 1"),
        ({"kv_lora_rank": 2000}, "head_dim <= 1024"),
        ({"q_lora_rank": -1}, "1 <= q_rank"),
        ({"v_head_dim": 0}, "value_dim"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": 7}, "rope dim even"),
        (V3 | {"topk_method": "greedy"}, "topk_method"),
        (V3 | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ],
)
def test_unsupported_deepseek_settings_are_refused_by_key(
    changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ModelFormatError, match=key):
        config_of(**changes)


def test_older_deepseek_gguf_metadata_is_read() -> None:
    """The sizes of the heads under other keys, and neither groups nor how experts are scored."""
    config = config_of(**V3 | {"n_routed_experts": 256})
    newer = export.gguf_metadata(config)
    older = dict(newer)
    for key in ("key_length_mla", "value_length_mla"):
        older[f"deepseek2.attention.{key.removesuffix('_mla')}"] = older.pop(
            f"deepseek2.attention.{key}"
        )
    for key in ("expert_group_count", "expert_group_used_count"):
        del older[f"deepseek2.{key}"]
    older["deepseek2.attention.head_count_kv"] = 16
    assert DEEPSEEK.config_from_gguf(older) == DEEPSEEK.config_from_gguf(newer)
    del older["deepseek2.expert_gating_func"]
    softmax = DEEPSEEK.config_from_gguf(older).experts
    assert softmax is not None and softmax.scoring == "softmax" and not softmax.correction
    for key, value in (("expert_gating_func", 3), ("rope.scaling.attn_factor", 0.5)):
        with pytest.raises(ModelFormatError, match=key):
            DEEPSEEK.config_from_gguf(newer | {f"deepseek2.{key}": value})


def folder_of(place: Path, name: str = "deepseek", **more: Any) -> Path:
    """A checkpoint of Hugging Face with random weights."""
    config = FAMILIES[name]
    folder = place / name
    folder.mkdir()
    tokenizer_files.write_directory(folder)
    (folder / "config.json").write_text(json.dumps(export.hf_config(config, "float32")))
    stored = safetensors_files.hf_layout(config, random_weights(config))
    save_file(stored | more, folder / "model.safetensors")
    return folder


def test_multi_token_prediction_layers_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"model.layers.1.{name}.weight": np.ones(3, np.float32) for name in ("eh_proj", "x")}
    with caplog.at_level(logging.WARNING), closing(open_model(folder_of(tmp_path, **extra))):
        pass
    assert [each.message for each in caplog.records] == [
        "deepseek: layers that predict further tokens are not used"
    ]


def runner_config(**changes: Any) -> RunnerConfig:
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 16}
    limits = {"max_slots": 2, "max_seq_len": 48, "num_threads": 1}
    return RunnerConfig(**settings | limits | changes)


def test_an_int8_cache_is_refused_for_mla(tmp_path: Path) -> None:
    with closing(open_model(folder_of(tmp_path))) as source:
        for kv_dtype in ("float32", "bfloat16"):
            build_runner(source, runner_config(kv_dtype=kv_dtype)).close()
        with pytest.raises(ConfigError, match="kv_dtype int8 does not cover"):
            build_runner(source, runner_config(kv_dtype="int8"))


@pytest.mark.parametrize("dtype", ["F32", "Q8_0"])
def test_a_joint_kv_b_matrix_of_older_gguf_files_is_split(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older GGUF files have it, quantized too: the rows of keys become columns."""
    folder = folder_of(tmp_path)
    newer, older = tmp_path / "newer.gguf", tmp_path / "older.gguf"
    convert(folder, newer, dtype=dtype)
    with monkeypatch.context() as changed:
        rows = tuple(
            replace(row, gguf=row.older_gguf, gguf_stored=row.hf_stored) if row.older_gguf else row
            for row in DEEPSEEK.weights
        )
        changed.setattr(deepseek, "DEEPSEEK", replace(DEEPSEEK, weights=rows))
        convert(folder, older, dtype=dtype)
    with closing(open_model(newer)) as ours, closing(open_model(older)) as source:
        assert any(".attn_kv_b." in name for name in source.checkpoint.tensors)
        assert source.config == ours.config
        assert source.weights["layers.0.attn.v_up.weight"].kernel_dtype == dtype
        for name, weight in ours.weights.items():
            atol = 0 if dtype == "F32" else 0.05
            np.testing.assert_allclose(source.weights[name].numpy(), weight.numpy(), 0, atol)
        weights = {name: weight.numpy() for name, weight in source.weights.items()}
        if dtype == "Q8_0":  # the native kernels read the columns as float16
            name = "layers.0.attn.k_up.weight"
            weights[name] = weights[name].astype(np.float16).astype(np.float32)
        graph = build_graph(source.config)

        def forward(batch: ReferenceBatch, state: State) -> F32:
            return run_graph(graph, weights, batch, state)

        tokens = text(30)
        theirs = Driver(forward, new_state(source.config))
        expected = theirs.step([(theirs.add(tokens), len(tokens))])
        driver = RunnerDriver(build_runner(source, runner_config()))
        found = driver.runner.logits(
            driver.runner.forward(driver.inputs([(driver.add(tokens), len(tokens))]))
        )
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_rope_rows_of_deepseek_keys_are_unpermuted_behind_the_unrotated_rows() -> None:
    specs = {spec.name: spec for spec in DEEPSEEK.tensors(FAMILIES["deepseek"])}
    for name, unpaired in (("q_b", 32), ("kv_a", 256)):
        how = specs[f"layers.0.attn.{name}.weight"].hf_transform
        assert (how.unpaired, how.paired, how.head_dim) == (unpaired, 16, unpaired + 16)
    assert Stored().transform(FAMILIES["deepseek"], {"1": 1}).paired == 0
