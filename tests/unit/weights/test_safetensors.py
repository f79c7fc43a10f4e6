"""Safetensors checkpoints and `open_model` on Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.errors import ModelFormatError
from engine.weights.files import FileBytes
from engine.weights.model import open_model
from engine.weights.safetensors import open_safetensors
from tests.support.files.gguf_files import Arrays, random_weights, tiny_config
from tests.support.files.safetensors_files import file_bytes, hf_layout, write_model

INDEX = "model.safetensors.index.json"


def stored_tiny(family: str = "llama", **changes: Any) -> Arrays:
    config = tiny_config(family, **changes)
    return hf_layout(config, random_weights(config))


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_safetensors_values_equal_those_written(tmp_path: Path, dtype: str, use_mmap: bool) -> None:
    values = np.random.default_rng(0).integers(-64, 64, (3, 5)).astype(np.float32)
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"a": values, "b": -values}, {"a": dtype, "b": dtype}))
    checkpoint = open_safetensors(path, use_mmap)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {dtype}
    assert np.array_equal(checkpoint.tensors["a"].numpy(), values)
    assert np.array_equal(checkpoint.tensors["b"].numpy(), -values)


def test_opening_safetensors_reads_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: FileBytes, start: int, num_bytes: int) -> np.ndarray:
        raise AssertionError("a tensor was touched")

    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"a": np.ones((2, 2), np.float32)}))
    monkeypatch.setattr(FileBytes, "view", refused)
    tensor = open_safetensors(path).tensors["a"]
    with pytest.raises(AssertionError, match="touched"):
        tensor.raw()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gpt2", {}),
    ],
)
def test_safetensors_config_and_weights_are_read(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    config = tiny_config(family, **changes)
    weights = random_weights(config)
    write_model(tmp_path, config, hf_layout(config, weights))
    source = open_model(tmp_path)
    assert source.config == config
    assert source.weights.keys() == weights.keys()
    for name, weight in source.weights.items():
        ours = weight.numpy()
        assert ours.flags.c_contiguous
        assert np.array_equal(ours, weights[name]), name
    assert source.metadata["vocab_size"] == 40
    assert source.quantization is None


def test_a_checkpoint_saved_without_the_lm_head_class_is_read(tmp_path: Path) -> None:
    """The first GPT-2 files lack the "transformer." in front, store masks, and no head."""
    config = tiny_config("gpt2", tie_embeddings=True)
    weights = random_weights(config)
    stored = {
        name.removeprefix("transformer."): values
        for name, values in hf_layout(config, weights).items()
    }
    masks = {"h.0.attn.bias": np.tril(np.ones((1, 1, 48, 48), np.float32))}
    write_model(tmp_path, config, stored | masks)
    found = open_model(tmp_path).weights
    for name in ("layers.1.attn.k.weight", "layers.1.attn.v.bias", "layers.1.mlp.up.weight"):
        assert np.array_equal(found[name].numpy(), weights[name]), name


def test_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    config = tiny_config("llama", tie_embeddings=True)
    stored = stored_tiny(tie_embeddings=True)
    write_model(tmp_path, config, stored | {"lm_head.weight": stored["model.embed_tokens.weight"]})
    assert "head.weight" not in open_model(tmp_path).weights


def test_eos_ids_prefer_the_generation_config(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_model(tmp_path, config, stored_tiny(), eos_token_id=2)
    assert open_model(tmp_path).config.eos_ids == (2,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 8, 7, 4000], "temperature": 0.6}))
    assert open_model(tmp_path).config.eos_ids == (7, 8)  # 4000 is beyond the vocabulary
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert open_model(tmp_path).config.eos_ids == (2,)


def test_integer_tensors_are_refused_only_where_a_weight_is_needed(tmp_path: Path) -> None:
    config, stored = tiny_config("llama"), stored_tiny()
    write_model(tmp_path, config, stored)
    path = tmp_path / "model.safetensors"
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    path.write_bytes(file_bytes(stored | buffer, dict.fromkeys(buffer, "I64")))
    open_model(tmp_path)
    path.write_bytes(file_bytes(stored, {"model.norm.weight": "I64"}))
    with pytest.raises(ModelFormatError, match=r"'model\.norm\.weight' has dtype I64"):
        open_model(tmp_path)
    with pytest.raises(ModelFormatError, match=r"'model\.norm\.weight' has dtype I64"):
        open_safetensors(tmp_path).tensors["model.norm.weight"].numpy()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1}, r"llama model of 1 layers.*model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"missing: layers\.2\."),
        ({"attention_bias": True}, r"missing: layers\.0\.attn\.q\.bias"),
        ({"intermediate_size": 128}, r"gate_proj\.weight' has shape \[96, 64\].*\[128, 64\]"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported.*--backend"),
        ({"architectures": [1]}, "'architectures' must be a list of names"),
        ({"architectures": None}, "lacks the required key 'architectures'"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_model(tmp_path, tiny_config("llama"), stored_tiny(), **changes)
    with pytest.raises(ModelFormatError, match=message):
        open_model(tmp_path)


def test_a_safetensors_file_without_its_folder_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_config("llama"), stored_tiny())
    with pytest.raises(ModelFormatError, match="give the directory"):
        open_model(tmp_path / "model.safetensors")


class TestShards:
    """Two shards and their index."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        directory = tmp_path / "model"
        stored = stored_tiny()
        write_model(directory, tiny_config("llama"), stored)
        (directory / "model.safetensors").unlink()
        names = list(stored)
        weight_map = {}
        for shard, part in (("a.safetensors", names[:7]), ("b.safetensors", names[7:])):
            (directory / shard).write_bytes(file_bytes({name: stored[name] for name in part}))
            weight_map |= dict.fromkeys(part, shard)
        self.write_index(directory, weight_map)
        return directory

    @staticmethod
    def write_index(directory: Path, weight_map: dict[str, str]) -> None:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    @staticmethod
    def weight_map(directory: Path) -> dict[str, str]:
        listed: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        return listed

    def test_sharded_safetensors_open_as_one_model(self, directory: Path) -> None:
        weights = random_weights(tiny_config("llama"))
        for name, weight in open_model(directory).weights.items():
            assert np.array_equal(weight.numpy(), weights[name]), name

    def test_a_tensor_missing_from_its_shard_is_refused(self, directory: Path) -> None:
        listed = self.weight_map(directory)
        self.write_index(directory, listed | {"extra.weight": "b.safetensors"})
        with pytest.raises(ModelFormatError, match=r"b\.safetensors lacks the tensor 'extra"):
            open_model(directory)

    def test_a_tensor_missing_from_the_index_is_refused(self, directory: Path) -> None:
        listed = self.weight_map(directory)
        dropped = next(iter(listed))
        del listed[dropped]
        self.write_index(directory, listed)
        with pytest.raises(ModelFormatError, match=f"a.safetensors holds the tensor '{dropped}'"):
            open_model(directory)

    @pytest.mark.parametrize(
        "name", ["../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", "", "a\\b", "a\0b"]
    )
    def test_shard_names_must_be_plain_file_names(self, directory: Path, name: str) -> None:
        self.write_index(directory, {"lm_head.weight": name})
        with pytest.raises(ModelFormatError, match="not a plain file name"):
            open_model(directory)

    def test_links_out_of_the_checkpoint_folder_are_refused(
        self, directory: Path, tmp_path: Path
    ) -> None:
        shard = directory / "a.safetensors"
        shard.rename(tmp_path / "outside.safetensors")
        shard.symlink_to(tmp_path / "outside.safetensors")
        with pytest.raises(ModelFormatError, match="link out of the model directory"):
            open_model(directory)

    def test_links_of_the_hugging_face_cache_are_followed(
        self, directory: Path, tmp_path: Path
    ) -> None:
        blobs = tmp_path / "models--org--name" / "blobs"
        snapshot = tmp_path / "models--org--name" / "snapshots" / "abc123"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for number, path in enumerate(sorted(directory.iterdir())):
            path.rename(blobs / str(number))
            (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
        assert open_model(snapshot).config == tiny_config("llama")
