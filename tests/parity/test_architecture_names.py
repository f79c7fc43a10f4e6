"""Weight names, shapes and values of every family against the libraries that write the files.

Transformers writes Hugging Face files; the `gguf` package has the GGUF name map.
"""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.backends.custom.weights.model import ModelSource, open_model
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import (
    architecture,
    architecture_for_gguf,
    architecture_for_hf,
    architecture_names,
    find_gguf,
    find_hf,
)
from tests.gguf_files import Arrays, stored_as
from tests.parity import tiny_models

# Families that Transformers does not have: their files come with code of their own. They are
# tested as renamed Llamas, in test_convert.py.
REMOTE = {"exaone", "internlm2", "minicpm"}
# Hugging Face's names that the `gguf` package does not list: its converter renames them first.
UNLISTED = ("experts.", "block_sparse_moe.", "shared_mlp.")


@pytest.mark.parametrize(
    ("name", "shard_size"),
    [*((name, "5GB") for name in tiny_models.ALL), ("gpt2", "40KB"), ("qwen3_moe", "40KB")],
)
def test_what_transformers_saves_opens(tmp_path: Path, name: str, shard_size: str) -> None:
    """All tensors of the file, down to the values; its config spelling, its sharding, its index."""
    tiny_models.make(name).save_pretrained(tmp_path, max_shard_size=shard_size)
    theirs: Arrays = {}
    for path in tmp_path.glob("*.safetensors"):
        theirs |= load_file(path)
    ours = _stored(open_model(tmp_path))
    assert ours.keys() == theirs.keys()
    for tensor, values in theirs.items():
        np.testing.assert_allclose(ours[tensor], values, rtol=0, atol=1e-6, err_msg=tensor)


def _stored(source: ModelSource) -> Arrays:
    """The weights as Hugging Face stores them, put together from those that were read."""
    stored: Arrays = {}
    for weight in source.weights.values():
        spec, values = weight.spec, weight.numpy()
        assert values.shape == spec.shape, spec.name
        if not spec.of_experts:
            stored_as(stored, spec.hf, weight.transform, values)
            continue
        experts: list[Arrays] = []
        for index, each in enumerate(values):
            name = spec.hf.replace("{e}", str(index))
            known = {name: stored[name][index]} if name in stored else {}
            stored_as(known, name, weight.transform, each)
            experts.append(known)
        if "{e}" in spec.hf:
            stored |= {name: part for known in experts for name, part in known.items()}
        else:
            stored[spec.hf] = np.stack([known[spec.hf] for known in experts])
    return stored


def test_every_other_architecture_is_refused_by_name() -> None:
    """In one line that says what would run it."""
    for name in gguf.MODEL_ARCH_NAMES.values():
        if find_gguf(name) is None:
            with pytest.raises(ModelFormatError, match=f"'{name}' is not .*--backend transf") as it:
                architecture_for_gguf(name)
            assert "\n" not in str(it.value)
    theirs = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert len(theirs) > 100
    for name in theirs:
        if find_hf([name]) is None:
            with pytest.raises(ModelFormatError, match=f"{name} is .*--backend transformers or"):
                architecture_for_hf([name])
    with pytest.raises(ModelFormatError, match="does not know it either; try --backend vllm"):
        architecture_for_hf(["ParrotForCausalLM"])


def test_every_family_has_a_tiny_model() -> None:
    with torch.device("meta"):
        kinds = {type(model()).__name__ for model in tiny_models.ALL.values()}
    families = {name: architecture(name).hf_names for name in architecture_names()}
    tested = {name for name, theirs in families.items() if kinds & set(theirs)}
    assert tested | REMOTE | {"bert"} == families.keys()


# A GGUF file of this family has experts in every layer.
@pytest.mark.parametrize("name", [n for n in tiny_models.ALL if n != "qwen3_moe-dense"])
def test_gguf_names_are_those_of_the_package(tmp_path: Path, name: str) -> None:
    """The package lists the tensors of each architecture, and maps Hugging Face's names to them."""
    _, path = tiny_models.save(name, tmp_path)
    source = open_model(path)
    family = architecture(source.config.family)
    kind = {theirs: key for key, theirs in gguf.MODEL_ARCH_NAMES.items()}[family.gguf_names[0]]
    num_layers = source.config.num_layers
    names = gguf.get_tensor_name_map(kind, num_layers)
    listed = {
        f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}.{suffix}"
        for tensor in gguf.MODEL_TENSORS[kind]
        for layer in range(num_layers)
        for suffix in ("weight", "bias")
    }
    for spec in family.tensors(source.config):
        assert spec.gguf in listed or spec.optional, spec.name
        fused = spec.hf is None or any(part in spec.hf for part in UNLISTED)
        if not fused and spec.hf.endswith((".weight", ".bias")):
            mapped = names.get_name(spec.hf, try_suffixes=(".weight", ".bias"))
            assert mapped in (spec.gguf, None), spec.name
