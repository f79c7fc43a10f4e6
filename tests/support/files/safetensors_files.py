"""Safetensors files and model directories for tests, valid and hostile."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.core.registry.model_registry import architecture
from tests.support.files.gguf_files import MULTIPLIERS, joined_as, stored_as

Arrays = dict[str, NDArray[np.float32]]
HF_NAMES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}


def assemble(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from its header and data; the stated header length may be wrong on purpose."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def encode(values: NDArray[np.float32], dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "I64": "<i8"}[dtype]).tobytes()


def file_bytes(tensors: Arrays, dtypes: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in tensors.items():
        dtype = (dtypes or {}).get(name, "F32")
        raw = encode(values, dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    return assemble(header, data)


def hf_layout(config: ModelConfig, weights: Arrays) -> Arrays:
    """The weights in Hugging Face's layout and under its names."""
    stored: Arrays = {}
    for spec in architecture(config.family).tensors(config):
        if spec.name not in weights:
            continue
        if spec.of_experts and "{e}" in spec.hf:
            for expert, values in enumerate(weights[spec.name]):
                name = spec.hf.replace("{e}", str(expert))
                stored_as(stored, name, spec.hf_transform, values)
        elif spec.hf_transform.joined:
            joined_as(stored, spec.hf, spec.hf_transform, weights[spec.name])
        else:
            stored_as(stored, spec.hf, spec.hf_transform, weights[spec.name])
    return stored


def hf_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    """A config.json for a tiny model; a change to None removes the key."""
    if config.family == "gpt2":
        sizes: dict[str, Any] = {
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.intermediate_size,
            "n_positions": config.max_position,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu_new",
        }
    else:
        sizes = {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": config.norm_eps,
            "hidden_act": "silu",
            "rope_theta": config.rope.theta if config.rope else None,
        }
    if config.family == "granite":
        sizes |= {name: getattr(config, name) for name in MULTIPLIERS}
    common = {
        "architectures": [HF_NAMES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }
    merged = common | sizes | changes
    return {key: value for key, value in merged.items() if value is not None}


def write_model(directory: Path, config: ModelConfig, stored: Arrays, **changes: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    (directory / "model.safetensors").write_bytes(file_bytes(stored))
