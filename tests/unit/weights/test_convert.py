"""Conversion between formats: the same tensors, the same configuration, the same tokens."""

import json
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.architectures.base import ExpertsConfig, ModelConfig, RopeConfig
from engine.architectures.export import gguf_metadata, hf_config
from engine.conversion.convert import convert, gguf_parts, open_source, save_trained
from engine.conversion.gguf_writer import gguf_type
from engine.conversion.importance import read_importance, write_importance
from engine.core.errors import ConfigError, EngineError, ModelFormatError
from engine.core.registry.model_registry import architecture
from engine.core.text.tokenizer import Tokenizer
from engine.weights.model import ModelSource, open_model
from engine.weights.safetensors import open_safetensors
from tests.support.files import gguf_files, tokenizer_files
from tests.support.files.checkpoint_folders import write_hf, write_llama2c

FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "granite", "olmo2")
TEXT = "The quick brown fox's 1234 tests:\n  naïve 你好 🙂 camelCase"


def tensors(path: Path) -> dict[str, np.ndarray]:
    with closing(open_safetensors(path)) as checkpoint:
        return {name: tensor.numpy() for name, tensor in checkpoint.tensors.items()}


def weights(model: ModelSource) -> dict[str, np.ndarray]:
    return {name: weight.numpy() for name, weight in model.weights.items()}


def float32_eps(config: ModelConfig) -> ModelConfig:
    """GGUF holds it as a float32."""
    return replace(config, norm_eps=float(np.float32(config.norm_eps)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_converted_to_gguf_and_back_is_identical(family: str, tmp_path: Path) -> None:
    config = write_hf(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "model.gguf", dtype="F32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values, after[name]), name
    with closing(open_model(tmp_path / "model.gguf")) as gguf:
        assert float32_eps(gguf.config) == float32_eps(config)
    with closing(open_model(tmp_path / "back")) as back:
        assert back.config == config
    texts = [Tokenizer.from_directory(tmp_path / name) for name in ("hf", "back")]
    assert texts[0].encode_prompt(TEXT) == texts[1].encode_prompt(TEXT)
    assert texts[0].chat_template == texts[1].chat_template == tokenizer_files.TEMPLATE
    assert texts[0].eos_ids == texts[1].eos_ids
    assert texts[0].specials == texts[1].specials


def test_metadata_of_a_model_survives_conversion(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    model = open_source(tmp_path / "model.gguf")
    stated = {"general.name": "Tiny", "general.license": "mit", "general.languages": ["en", "de"]}
    named = replace(model, metadata={**model.metadata, **stated})
    save_trained(named, {}, tmp_path / "named")
    convert(tmp_path / "named", tmp_path / "again.gguf")
    found = open_source(tmp_path / "again.gguf").metadata
    assert {key: found[key] for key in stated} == stated


def test_the_gguf_package_reads_our_gguf_files(tmp_path: Path) -> None:
    """A reader that is not ours: alignment, types, metadata."""
    import gguf

    write_hf(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "model.gguf", dtype="Q8_0")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert reader.fields["general.file_type"].contents() == 7
    found = tokenizer_files.read_gguf(tmp_path / "model.gguf")
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.tokens"][-1].startswith("[PAD")
    assert found["tokenizer.ggml.add_bos_token"] is True
    with closing(open_model(tmp_path / "hf")) as source:
        expected = source.weights["layers.1.mlp.down.weight"].numpy()
    stored = next(t for t in reader.tensors if t.name == "blk.1.ffn_down.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(expected.shape)
    assert np.abs(values - expected).max() < np.abs(expected).max() / 100


def test_quantization_types_depend_on_the_row_length(tmp_path: Path) -> None:
    """Blocks must fill rows: 256 values of Q4_K, 32 of others; logits keep eight bits."""
    write_hf(tmp_path / "hf", "llama", intermediate_size=256, tie_embeddings=True)
    convert(tmp_path / "hf", tmp_path / "q4_k.gguf", dtype="Q4_K")
    with closing(open_model(tmp_path / "q4_k.gguf")) as model:
        types = {name: weight.tensor.dtype for name, weight in model.weights.items()}
    assert types["layers.0.mlp.down.weight"] == "Q4_K"
    assert types["layers.0.mlp.up.weight"] == "Q5_0"  # rows of 64
    assert types["embed.weight"] == "Q8_0"
    assert types["norm.weight"] == "F32"
    write_hf(tmp_path / "odd", "llama", intermediate_size=80)
    convert(tmp_path / "odd", tmp_path / "q4_0.gguf", dtype="Q4_0")
    with closing(open_model(tmp_path / "q4_0.gguf")) as model:
        types = {name: weight.tensor.dtype for name, weight in model.weights.items()}
    assert types["layers.0.mlp.down.weight"] == "F16"
    assert (types["embed.weight"], types["head.weight"]) == ("Q4_0", "Q8_0")


def test_quantization_mixes_use_llama_cpps_types(tmp_path: Path) -> None:
    """Of nine layers, 0, 7 and 8 are the first and last eighth; 3 and 6 are every third between."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_layers": 9, "head_dim": 32}
    write_hf(tmp_path / "hf", "llama", **sizes, num_heads=8, num_kv_heads=2)
    with closing(open_model(tmp_path / "hf")) as model:
        types = {
            (mix, bool(columns)): {
                each.name: each.dtype for each in gguf_parts(model, mix, columns)[1]
            }
            for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")
            for columns in ({}, {"blk.0.ffn_up.weight": np.ones((1, 256), np.float32)})
        }
        assert gguf_parts(model, "Q4_K_M")[0]["general.file_type"] == 15
        eight = replace(model.config, experts=ExpertsConfig(count=8, per_token=2, size=256))
        for part, expected in (("k", "Q8_0"), ("v", "Q8_0"), ("o", "Q5_K"), ("q", "Q4_K")):
            weight = model.weights[f"layers.1.attn.{part}.weight"]
            assert gguf_type(weight, "Q4_K_M", eight, is_weighted=False) == expected
    for mix, usual in (("Q4_K_M", "Q4_K"), ("Q5_K_M", "Q5_K"), ("Q6_K", "Q6_K")):
        for place in ("attn_v", "ffn_down"):
            found = [types[mix, False][f"blk.{layer}.{place}.weight"] for layer in range(9)]
            more = [layer in (0, 3, 6, 7, 8) for layer in range(9)]
            assert found == ["Q6_K" if each else usual for each in more]
        assert types[mix, False]["blk.3.attn_q.weight"] == usual
        assert types[mix, False]["token_embd.weight"] == usual
        assert types[mix, False]["output.weight"] == "Q6_K"
    plain, weighted = types["IQ4_XS", False], types["IQ4_XS", True]
    assert plain["blk.4.attn_v.weight"] == "Q5_K"  # four query heads share its rows
    assert (plain["blk.0.ffn_down.weight"], weighted["blk.0.ffn_down.weight"]) == ("Q5_K", "IQ4_XS")
    assert plain["blk.1.ffn_down.weight"] == "IQ4_XS"


def test_importance_matrices_are_validated(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "llama", intermediate_size=256)
    name, sums = "blk.0.ffn_down.weight", np.ones(256, np.float32)
    for case, found, message in (
        ("wide", {name: (np.ones(512, np.float32), 3)}, "it belongs to another model"),
        ("infinite", {name: (sums * np.inf, 3)}, "negative or infinite"),
        ("negative", {name: (-sums, 3)}, "negative or infinite"),
    ):
        write_importance(tmp_path / f"{case}.gguf", found, "text", 1, 512)
        with pytest.raises(ModelFormatError, match=message):
            convert(
                tmp_path / "hf",
                tmp_path / "out.gguf",
                dtype="Q4_K_M",
                importance=tmp_path / f"{case}.gguf",
            )
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    with pytest.raises(ModelFormatError, match=r"model\.gguf is no importance matrix"):
        read_importance(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="give --type"):
        convert(tmp_path / "hf", tmp_path / "out.gguf", importance=tmp_path / "wide.gguf")
    with pytest.raises(ConfigError, match="is there already"):
        write_importance(tmp_path / "wide.gguf", {}, "text", 1, 512)


def test_without_a_type_the_stored_bits_are_copied(tmp_path: Path) -> None:
    """Also where rows change places, as a llama's do on their way into a GGUF file."""
    write_hf(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "bf16", dtype="BF16")
    convert(tmp_path / "bf16", tmp_path / "bf16.gguf")
    convert(tmp_path / "bf16.gguf", tmp_path / "again")
    first, again = (open_safetensors(tmp_path / name) for name in ("bf16", "again"))
    for name, tensor in first.tensors.items():
        if len(tensor.shape) == 2:
            assert again.tensors[name].dtype == "BF16"
            assert np.array_equal(again.tensors[name].raw(), tensor.raw()), name
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()).keys() == (
        json.loads((tmp_path / "hf" / "config.json").read_text()).keys()
    )
    convert(tmp_path / "hf", tmp_path / "q8.gguf", dtype="Q8_0")
    convert(tmp_path / "q8.gguf", tmp_path / "copy.gguf")
    assert (tmp_path / "q8.gguf").read_bytes() == (tmp_path / "copy.gguf").read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_models_convert_to_every_format_and_back(tied: bool, tmp_path: Path) -> None:
    config = write_llama2c(tmp_path / "c", tied)
    start = tmp_path / "c" / "model.bin"
    convert(start, tmp_path / "model.gguf")
    convert(start, tmp_path / "hf")
    expected = gguf_files.random_weights(config)
    for name in ("model.gguf", "hf"):
        with closing(open_model(tmp_path / name)) as model:
            assert float32_eps(model.config) == float32_eps(config)
            found = weights(model)
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[key], expected[key]) for key in expected)
    gguf = Tokenizer.from_gguf(tokenizer_files.read_gguf(tmp_path / "model.gguf"))
    reference = Tokenizer.from_gguf(tokenizer_files.sentencepiece_metadata())
    hf = Tokenizer.from_directory(tmp_path / "hf")
    for text in (TEXT, "fox", " fox", "", "a  b\n"):
        ids = reference.encode_prompt(text)
        assert gguf.encode_prompt(text) == hf.encode_prompt(text) == ids
        assert gguf.decode(ids) == hf.decode(ids) == text
    for source in ("model.gguf", "hf"):
        folder = tmp_path / f"back-{source}"
        folder.mkdir()
        convert(tmp_path / source, folder / "model.bin")
        with closing(open_source(folder / "model.bin")) as back:
            assert back.config == config
            again = weights(back)
            assert all(np.array_equal(again[key], expected[key]) for key in expected)
        ours = Tokenizer.from_gguf(open_source(folder / "model.bin").metadata)
        assert ours.encode_prompt(TEXT) == reference.encode_prompt(TEXT)


def test_both_spellings_of_byte_tokens_are_read(tmp_path: Path) -> None:
    write_llama2c(tmp_path / "new", tied=True)
    write_llama2c(tmp_path / "old", tied=True, bytes_as_themselves=True)
    found = [
        open_source(tmp_path / name / "model.bin").metadata["tokenizer.ggml.tokens"]
        for name in ("new", "old")
    ]
    assert found[0] == found[1]


ROPES = [
    RopeConfig(10_000.0, 16, "linear", factor=4.0),
    RopeConfig(10_000.0, 16, "yarn", 4.0, 64, beta_fast=32.0, beta_slow=1.0),
    RopeConfig(5e5, 16, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_rope_settings_survive_conversion(rope: RopeConfig, tmp_path: Path) -> None:
    config = write_hf(tmp_path / "hf", "llama", rope=RopeConfig(rope.theta, 16))
    config = replace(config, rope=rope, max_position=256)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf_config(config, "float32")))
    convert(tmp_path / "hf", tmp_path / "model.gguf")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    with closing(open_model(tmp_path / "back")) as back:
        assert back.config == config


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_written_and_read_back_are_equal(family: str) -> None:
    config = gguf_files.tiny_config(family)
    module = architecture(family)
    assert module.config_from_hf(hf_config(config, "float32")) == config
    unsettled = {"tie_embeddings": False, "qkv_bias": family in ("gpt2", "qwen2")}
    read = module.config_from_gguf(gguf_metadata(config))
    assert read == replace(config, bos_id=None, eos_ids=(), **unsettled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": RopeConfig(500.0, 16, "dynamic", 2.0, 48)}, "no 'dynamic' rotary scaling"),
        ({"rope": RopeConfig(500.0, 8)}, "partial rotation"),
        ({"activation": "gelu"}, "cannot say that activation is gelu"),
    ],
)
def test_settings_that_gguf_cannot_express_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        gguf_metadata(gguf_files.tiny_config("llama", **changes))


def test_failed_conversions_are_reported_and_leave_no_files(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", "gpt2")
    write_llama2c(tmp_path / "c", tied=True)
    (tmp_path / "c2").mkdir()
    (tmp_path / "c2" / "model.bin").write_bytes((tmp_path / "c" / "model.bin").read_bytes())
    (tmp_path / "later.bin").write_bytes(struct.pack("<7i", 0x616B3432, 1, 1, 1, 1, 1, 1))
    (tmp_path / "short.bin").write_bytes((tmp_path / "c" / "model.bin").read_bytes()[:-4])
    there = sorted(tmp_path.iterdir())
    cases: list[tuple[str, str, dict[str, Any], str]] = [
        ("hf", "hf", {}, "there already"),
        ("hf", "nowhere/x.gguf", {}, "no folder"),
        ("hf", "x.onnx", {}, "--to gguf"),
        ("hf", "x", {"dtype": "Q4_0"}, "safetensors holds F32, F16, BF16"),
        ("hf", "x.bin", {}, "SentencePiece vocabularies"),
        ("c2/model.bin", "x.gguf", {}, "needs its tokenizer.bin"),
        ("later.bin", "x.gguf", {}, "--version 0"),
        ("short.bin", "x.gguf", {}, "not all of one"),
        ("hf", "x.gguf", {"tokenizer": tmp_path / "t"}, "--tokenizer belongs to"),
    ]
    for source, target, options, message in cases:
        with pytest.raises(EngineError, match=message):
            convert(tmp_path / source, tmp_path / target, **options)
    assert sorted(tmp_path.iterdir()) == there


def test_the_converted_file_appears_only_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf(tmp_path / "hf", "llama")

    def stop(done: int, total: int) -> None:
        assert not (tmp_path / "x.gguf").exists()
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "hf", tmp_path / "x.gguf", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_too_little_disk_space_is_noticed_before_converting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf(tmp_path / "hf", "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(EngineError, match="make room"):
        convert(tmp_path / "hf", tmp_path / "x.gguf")


def test_pytorch_bin_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ModelFormatError, match="of .bin files, only those are read"):
        convert(tmp_path / "pytorch_model.bin", tmp_path / "x.gguf")
    with pytest.raises(ConfigError):
        convert(tmp_path / "pytorch_model.bin", tmp_path / "x.gguf", dtype="Q2_K")
