"""`open_model` on GGUF: weights in our layout, what the tensors decide, what is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.core.errors import ModelError, ModelFormatError
from engine.weights.model import open_model
from tests.support.files.gguf_files import (
    Arrays,
    gguf_layout,
    random_weights,
    tiny_config,
    write_gguf,
)


def stored_tiny(family: str = "llama", **changes: Any) -> Arrays:
    config = tiny_config(family, **changes)
    return gguf_layout(config, random_weights(config))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"qkv_bias": True, "out_bias": True, "mlp_bias": True}),
        ("llama", {"tie_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("gpt2", {}),
        ("gpt2", {"tie_embeddings": True}),
        ("granite", {}),
        ("olmo2", {}),
    ],
)
def test_gguf_config_and_weights_are_read(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Head tying and biases are nowhere in the metadata: the tensors tell."""
    config = tiny_config(family, **changes)
    if config.rope is not None:
        config = replace(config, rope=replace(config.rope, dim=config.head_dim))
    weights = random_weights(config)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, gguf_layout(config, weights))
    source = open_model(path)
    assert source.config.norm_eps == pytest.approx(config.norm_eps)  # stored as float32
    assert replace(source.config, norm_eps=config.norm_eps) == config
    assert source.weights.keys() == weights.keys()
    for name, weight in source.weights.items():
        assert np.array_equal(weight.numpy(), weights[name]), name
    assert source.quantization is None
    assert source.size_bytes == sum(weight.nbytes for weight in source.weights.values())


def test_permuted_rows_are_reordered(tmp_path: Path) -> None:
    """What a kernel that keeps rows quantized will use instead of `numpy`."""
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), stored_tiny())
    weights = open_model(path).weights
    weight = weights["layers.1.attn.k.weight"]
    raw, order, _ = weight.rows()
    assert order is not None
    rows = raw.reshape(weight.spec.shape[0], -1)[order]
    assert np.array_equal(rows.view("<f4"), weight.numpy())
    assert weights["layers.1.attn.v.weight"].rows().order is None


def test_rows_of_a_fused_matrix_are_views_of_the_file(tmp_path: Path) -> None:
    """So they stay quantized, and cost no memory."""
    config = tiny_config("gpt2")
    path = tmp_path / "m.gguf"
    stored = gguf_layout(config, random_weights(config))
    fused = "blk.1.attn_qkv.weight"
    blocks = gguf.quants.quantize(stored[fused], gguf.GGMLQuantizationType.Q8_0)
    write_gguf(path, config, stored | {fused: blocks})
    weight = open_model(path).weights["layers.1.attn.k.weight"]
    raw, order, transposed = weight.rows()
    assert (order, transposed, weight.tensor.dtype) == (None, False, "Q8_0")
    assert np.array_equal(raw, blocks[64:128].reshape(-1)) and weight.nbytes == raw.size
    assert raw.base is not None and not raw.flags.owndata


def test_the_named_quantization_is_the_one_with_most_bytes(tmp_path: Path) -> None:
    config = tiny_config("llama")
    stored: dict[str, Any] = dict(stored_tiny())
    path = tmp_path / "m.gguf"
    writer_input = {
        name: gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        if values.ndim == 2
        else values
        for name, values in stored.items()
    }
    write_gguf(path, config, writer_input)
    source = open_model(path)
    assert source.quantization == "Q8_0"
    decoded = source.weights["layers.0.mlp.up.weight"].numpy()
    assert np.abs(decoded - stored["blk.0.ffn_up.weight"]).max() < 0.05


def test_stored_rope_factors_are_weights_of_the_model(tmp_path: Path) -> None:
    config = tiny_config("llama")
    factors = np.linspace(1, 8, config.head_dim // 2, dtype=np.float32)
    path = tmp_path / "m.gguf"
    write_gguf(path, config, stored_tiny() | {"rope_freqs.weight": factors})
    source = open_model(path)
    assert source.config.rope is not None
    assert source.config.rope.kind == "factors"
    assert np.array_equal(source.weights["rope.factors"].numpy(), factors)

    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    write_gguf(path, config, stored_tiny() | {"rope_freqs.weight": factors}, scaling)
    with pytest.raises(ModelFormatError, match="only one can hold"):
        open_model(path)


def test_a_folder_with_one_gguf_opens(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_gguf(tmp_path / "m.gguf", config, stored_tiny(), split_max_tensors=8)
    assert open_model(tmp_path).config.num_layers == 2
    write_gguf(tmp_path / "other.gguf", config, stored_tiny())
    with pytest.raises(ModelFormatError, match="2 GGUF models"):
        open_model(tmp_path)


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="holds no model"):
        open_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFormatError, match=r"pytorch_model\.bin.*convert"):
        open_model(tmp_path)


# Metadata that the tensors contradict, with the reason that is given.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"llama.block_count": 1}, r"llama model of 1 layers.*blk\.1\."),
    ({"llama.block_count": 3}, r"missing: layers\.2\.attn\.q\.weight.* and 6 more"),
    ({"llama.embedding_length": 32}, r"'token_embd\.weight' has shape \[40, 64\].*\[40, 32\]"),
    ({"llama.vocab_size": 41}, r"tokenizer\.ggml\.tokens has 40 entries for .* 41"),
    ({"llama.attention.head_count": 0}, "num_heads >= 1"),
    ({"llama.attention.head_count_kv": 3}, "num_kv_heads divides num_heads"),
    ({"llama.attention.head_count_kv": 0}, "num_kv_heads >= 1"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "norm_eps"),
    ({"llama.rope.freq_base": 0.0}, "rotary theta must be above 0"),
    ({"llama.rope.freq_base": float("nan")}, "freq_base.* finite"),
    ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count"),
    ({"llama.rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type.*needs the tensors"),
    ({"llama.rope.scaling.type": "xpos"}, r"llama\.rope\.scaling\.type.*xpos"),
    ({"llama.expert_count": 8}, "experts per token <= experts"),
    ({"llama.context_length": None}, r"lacks the required key 'llama\.context_length'"),
    ({"llama.block_count": "two"}, r"'llama\.block_count' must be int, found str"),
]


@pytest.mark.parametrize(("extra", "message"), CONTRADICTIONS)
def test_gguf_metadata_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), stored_tiny(), extra)
    with pytest.raises(ModelFormatError, match=message):
        open_model(path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path, family: str) -> None:
    """Turned around, a row short, a column short, or flat: each of the second layer's tensors."""
    config = tiny_config(family)
    stored = stored_tiny(family)
    path = tmp_path / "m.gguf"
    for name, values in stored.items():
        if not name.startswith(("blk.1.", "token_embd", "output")):
            continue
        wrong = [values[:-1]]
        if values.ndim == 2:
            wrong += [values[:, :-32], values.reshape(-1)]
            wrong += [values.T] if values.shape[0] != values.shape[1] else []
        for other in wrong:
            write_gguf(path, config, stored | {name: np.ascontiguousarray(other)})
            with pytest.raises(ModelFormatError, match=rf"'{re.escape(name)}' has shape"):
                open_model(path)


def test_heads_must_divide_the_hidden_size(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    extra = {"llama.attention.key_length": None, "llama.attention.head_count": 5}
    write_gguf(path, tiny_config("llama"), stored_tiny(), extra)
    with pytest.raises(ModelFormatError, match=r"heads \(5\) must divide the hidden size \(64\)"):
        open_model(path)


def test_a_vocabulary_size_that_differs_from_the_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), stored_tiny(), num_tokens=39)
    with pytest.raises(ModelFormatError, match=r"tokens has 39 entries for a vocabulary of 40"):
        open_model(path)


def test_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}
    write_gguf(path, tiny_config("llama"), stored_tiny() | extra)
    with pytest.raises(ModelFormatError, match=r"no place for .*blk\.0\.ffn_gate_inp\.weight"):
        open_model(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_values_are_refused(tmp_path: Path, bad: float) -> None:
    stored = stored_tiny()
    stored["blk.1.ffn_up.weight"][0, 0] = bad
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), stored)
    with pytest.raises(ModelFormatError, match=r"'blk\.1\.ffn_up\.weight' holds NaN or infinite"):
        open_model(path)


def test_nonfinite_block_scales_are_refused(tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(stored_tiny())
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(stored["blk.1.ffn_up.weight"], kind)
    blocks[-1, -34:-32] = np.array([np.inf], "<f2").view(np.uint8)
    path = tmp_path / "m.gguf"
    write_gguf(path, tiny_config("llama"), stored | {"blk.1.ffn_up.weight": blocks})
    with pytest.raises(ModelFormatError, match=r"'blk\.1\.ffn_up\.weight' holds NaN or infinite"):
        open_model(path)


def test_an_unsupported_architecture_suggests_another_backend(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, replace(tiny_config("llama"), family="mamba"), {})
    with pytest.raises(ModelFormatError, match="'mamba' is not supported.*--backend vllm"):
        open_model(path)
