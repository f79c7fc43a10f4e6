"""Weight names, shapes and values of every family against the libraries that write the files.

Transformers writes Hugging Face files; the `gguf` package has the GGUF name map.
"""

import itertools
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.numpy import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.architectures.export import gguf_metadata
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import (
    architecture,
    architecture_for_gguf,
    architecture_for_hf,
    architecture_names,
    find_gguf,
    find_hf,
)
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.support.files.gguf_files import Arrays, joined_as, stored_as

# Families that Transformers does not have, because their files come with code of their own: the
# name that each part of Llama's names has there, and how other keys are called.
REMOTE: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "exaone": (
        "ExaoneForCausalLM",
        {
            "model.embed_tokens.": "transformer.wte.",
            "model.norm.": "transformer.ln_f.",
            "model.layers.": "transformer.h.",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn.": "attn.attention.",
            "gate_proj": "c_fc_0",
            "up_proj": "c_fc_1",
            "down_proj": "c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
        {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"},
    ),
    "internlm2": (
        "InternLM2ForCausalLM",
        {
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "self_attn.wqkv": "attention.wqkv",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        {},
    ),
    "minicpm": ("MiniCPMForCausalLM", {}, {}),
}
TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
# Hugging Face's names that the `gguf` package does not list: its converter renames them first.
UNLISTED = ("experts.", "block_sparse_moe.", "shared_mlp.", "in_proj_qkvz.")


@pytest.mark.parametrize(
    ("name", "shard_size"),
    [*((name, "5GB") for name in tiny_models.ALL), ("gpt2", "40KB"), ("qwen3_moe", "40KB")],
)
def test_checkpoints_saved_by_transformers_open_with_equal_weights(
    tmp_path: Path, name: str, shard_size: str
) -> None:
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
        if weight.transform.joined:
            joined_as(stored, spec.hf, weight.transform, values)
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


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_the_text_model_of_a_vision_language_checkpoint_is_loaded(
    kind: str, tmp_path: Path
) -> None:
    """It is the text model, with other names."""
    name = {"Gemma3": "gemma3", "Mistral3": "mistral-window"}[kind]
    text = tiny_models.make(name)
    config = getattr(hf, f"{kind}Config")(
        text_config=text.config.to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 8},
        **dict.fromkeys(("image_token_index", "boi_token_index", "eoi_token_index"), 90),
        eos_token_id=2,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "both")
    text.save_pretrained(tmp_path / "text")
    both, alone = open_model(tmp_path / "both"), open_model(tmp_path / "text")
    assert (both.config.vision is not None) == (kind == "Gemma3")
    assert replace(both.config, vision=None) == replace(alone.config, bos_id=both.config.bos_id)
    assert both.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        assert np.array_equal(both.weights[name].numpy(), weight.numpy()), name


def test_unsupported_transformers_architectures_are_refused_by_name() -> None:
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
    encoders = {"bert", "roberta", "nomic_bert", "modernbert"}  # test_encoders.py
    assert tested | REMOTE.keys() | encoders == families.keys()


def _with_wqkv(stored: Arrays, config: hf.LlamaConfig) -> Arrays:
    """InternLM 2 has one matrix: for each KV head, its query heads, its key and its value."""
    heads, size = config.num_key_value_heads, config.hidden_size
    rest = {name: values for name, values in stored.items() if ".self_attn.o" in name}
    rest |= {name: values for name, values in stored.items() if ".self_attn." not in name}
    for layer in range(config.num_hidden_layers):
        place = f"model.layers.{layer}.self_attn"
        parts = [stored[f"{place}.{part}_proj.weight"].reshape(heads, -1, size) for part in "qkv"]
        rest[f"{place}.wqkv.weight"] = np.concatenate(parts, axis=1).reshape(-1, size)
    return rest


@pytest.mark.parametrize("family", REMOTE)
def test_families_with_remote_code_load_as_llama_weights(family: str, tmp_path: Path) -> None:
    """They are Llamas under other names, so the same weights must come out."""
    theirs, path = tiny_models.save("llama", tmp_path)
    stored = load_file(path / "model.safetensors")
    architecture_name, names, keys = REMOTE[family]
    if family == "internlm2":
        stored = _with_wqkv(stored, theirs.config)
    renamed = {}
    for name, values in stored.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = values
    config = json.loads((path / "config.json").read_text())
    config = {keys.get(key, key): value for key, value in config.items()}
    config |= {"architectures": [architecture_name], "model_type": family}
    config |= {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}  # MiniCPM
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    save_file(renamed, other / "model.safetensors")
    ours, llama = open_model(other), open_model(path)
    assert ours.weights.keys() == llama.weights.keys()
    for name, weight in llama.weights.items():
        assert np.array_equal(ours.weights[name].numpy(), weight.numpy()), name
    expected = llama.config
    if family == "minicpm":
        scales = {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 3**0.5}
        expected = replace(expected, **scales, logits_scaling=48 / 16)
    assert ours.config == replace(expected, family=family)
    metadata = gguf_metadata(ours.config)
    assert architecture(family).config_from_gguf(metadata | TOKENS) == replace(
        ours.config, bos_id=1, eos_ids=(2,)
    )


# GGUF files of these families have experts in every layer.
@pytest.mark.parametrize(
    "name", [n for n in tiny_models.ALL if n not in ("qwen3_moe-dense", "qwen3_next-dense")]
)
def test_gguf_tensor_names_equal_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    """The package lists the tensors of each architecture, and maps Hugging Face's names to them."""
    _, path = tiny_models.save(name, tmp_path)
    source = open_model(path)
    family = architecture(source.config.family)
    kind = {theirs: key for key, theirs in gguf.MODEL_ARCH_NAMES.items()}[family.gguf_names[0]]
    num_layers = source.config.num_layers
    names = gguf.get_tensor_name_map(kind, num_layers)
    listed = {
        f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}{suffix}"
        for tensor in gguf.MODEL_TENSORS[kind]
        for layer in range(num_layers)
        for suffix in (".weight", ".bias", "")
    }
    for spec in family.tensors(source.config):
        assert spec.gguf in listed or spec.optional, spec.name
        fused = spec.hf is None or any(part in spec.hf for part in UNLISTED)
        if not fused and spec.hf.endswith((".weight", ".bias")):
            mapped = names.get_name(spec.hf, try_suffixes=(".weight", ".bias"))
            assert mapped in (spec.gguf, spec.older_gguf, None), spec.name


HOSTILE = [None, True, -1, 0, 3, 2**40, 1e308, "x", [{}], {"a": {}}]


@pytest.mark.parametrize("name", [name for name in tiny_models.ALL if "-" not in name])
def test_hostile_config_values_are_read_or_refused(name: str) -> None:
    """One key at a time, in both formats: never another error, and never much memory or time."""
    with torch.device("meta"):
        model = tiny_models.ALL[name]()
    stated = json.loads(model.config.to_json_string(use_diff=False))
    family = find_hf([type(model).__name__])
    config = family.config_from_hf(stated)
    for key, value in itertools.product(stated, HOSTILE):
        with suppress(ModelFormatError):
            family.config_from_hf(stated | {key: value})
    with suppress(ModelFormatError):  # some cannot be GGUF files
        metadata = gguf_metadata(config)
        for key, value in itertools.product(metadata, HOSTILE):
            if key != "general.architecture":
                with suppress(ModelFormatError):
                    family.config_from_gguf(metadata | {key: value})
