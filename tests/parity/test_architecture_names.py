"""Weight names, shapes and values of every family against the libraries that write the files.

Transformers writes Hugging Face files; the `gguf` package has the GGUF name map.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.backends.custom.weights.model import open_model
from engine.core.registry.model_registry import architecture
from tests.gguf_files import Arrays, stored_as, tiny_config
from tests.safetensors_files import hf_config

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"model_type": "mistral", "sliding_window": 16}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("olmo2", {}),
]


def transformers_model(stated: dict[str, Any]) -> Any:
    settings = {key: value for key, value in stated.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(stated["model_type"], **settings))


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_weights_are_exactly_those_of_the_transformers_model(
    family: str, changes: dict[str, Any]
) -> None:
    stated = hf_config(tiny_config(family), **changes)
    module = architecture(family)
    config = module.config_from_hf(stated)
    with torch.device("meta"):
        model = transformers_model(stated)
    theirs = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    specs = [spec for spec in module.tensors(config) if spec.hf is not None]
    assert {spec.hf: spec.hf_transform.stored_shape(spec.shape) for spec in specs} == theirs


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
def test_what_transformers_saves_opens(
    tmp_path: Path, family: str, changes: dict[str, Any], shard_size: str
) -> None:
    """Its current config spelling, its sharding and its index, down to the values."""
    stated = hf_config(tiny_config(family), **changes)
    model = transformers_model(stated)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    source = open_model(tmp_path)
    assert source.config == architecture(family).config_from_hf(stated)
    ours: Arrays = {}
    for weight in source.weights.values():
        stored_as(ours, weight.spec.hf, weight.transform, weight.numpy())
    for name, values in model.state_dict().items():
        assert np.array_equal(ours[name], values.numpy()), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "granite", "olmo2"])
def test_gguf_names_are_those_of_the_package(family: str) -> None:
    kind = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    config = tiny_config(family)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    for spec in architecture(family).tensors(config):
        if spec.hf is not None:
            assert names.get_name(spec.hf, try_suffixes=(".weight", ".bias")) == spec.gguf
