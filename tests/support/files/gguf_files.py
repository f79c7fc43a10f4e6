"""GGUF files for tests: valid ones written with the `gguf` package, hostile ones byte by byte."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig, RopeConfig
from engine.architectures.tensors import Transform
from engine.core.registry.model_registry import architecture

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8

Arrays = dict[str, NDArray[np.float32]]
# Granite's; exact in float32.
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.375,
    "attention_multiplier": 0.1875,
    "logits_scaling": 4.0,
}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def entry(key: str | bytes, type_id: int, payload: bytes) -> bytes:
    return text(key) + u32(type_id) + payload


def array(element_type: int, count: int, payload: bytes = b"") -> bytes:
    return u32(element_type) + u64(count) + payload


def tensor(name: str | bytes, dims: Sequence[int], type_id: int = F32, offset: int = 0) -> bytes:
    shape = b"".join(u64(dim) for dim in dims)
    return text(name) + u32(len(dims)) + shape + u32(type_id) + u64(offset)


def assemble(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file from its parts; the counts may be wrong on purpose."""
    head = magic + u32(version)
    head += u64(len(tensors) if num_tensors is None else num_tensors)
    head += u64(len(entries) if num_entries is None else num_entries)
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def tiny_config(family: str, **changes: Any) -> ModelConfig:
    """A two-layer model whose sizes all differ, so that a mixed-up shape is noticed."""
    layer_norm = family == "gpt2"
    settings: dict[str, Any] = {
        "family": family,
        "vocab_size": 40,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4 if layer_norm else 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position": 48,
        "norm_eps": 1e-5,
        "tie_embeddings": False,
        "rope": None if layer_norm else RopeConfig(theta=500.0, dim=16),
        "norm": "layer" if layer_norm else "rms",
        "norm_bias": layer_norm,
        "activation": "gelu_tanh" if layer_norm else "silu",
        "qkv_bias": family in ("gpt2", "qwen2"),
        "out_bias": layer_norm,
        "mlp_bias": layer_norm,
        "qk_norm": {"qwen3": "head", "olmo2": "whole"}.get(family),
        "norm_placement": "output" if family == "olmo2" else "input",
        "gated_mlp": not layer_norm,
        "bos_id": 1,
        "eos_ids": (2, 5),
    }
    if family == "granite":
        settings |= MULTIPLIERS
    return ModelConfig(**(settings | changes))


def random_weights(config: ModelConfig, seed: int = 0) -> Arrays:
    """Values for every weight, under our names and in our layout."""
    rng = np.random.default_rng(seed)
    return {
        spec.name: rng.standard_normal(spec.shape, np.float32)
        for spec in architecture(config.family).tensors(config)
        if not spec.optional
    }


def gguf_layout(config: ModelConfig, weights: Arrays) -> Arrays:
    """The weights in GGUF's layout and under its names, as a converter would store them."""
    stored: Arrays = {}
    for spec in architecture(config.family).tensors(config):
        if spec.name in weights:
            stored_as(stored, spec.gguf, spec.gguf_transform, weights[spec.name])
    return stored


def stored_as(stored: Arrays, name: str, how: Transform, values: NDArray[np.float32]) -> None:
    """Put a weight into the tensor that a converter would store it in."""
    if how.turned:
        values, how = values.T, replace(how, turned=False)
    rows = len(values) // how.groups
    if how.paired:
        heads = values.reshape(-1, how.head_dim, *values.shape[1:])
        before, pairs, after = np.split(heads, (how.unpaired, how.unpaired + how.paired), axis=1)
        halves = pairs.reshape(len(heads), 2, -1, *values.shape[1:])
        turned = halves.swapaxes(1, 2).reshape(len(heads), how.paired, *values.shape[1:])
        values = np.concatenate((before, turned, after), axis=1).reshape(values.shape)
    values = np.log(-values) if how.is_log else values - np.float32(how.added)
    if how.reshaped:
        values = values.reshape(how.reshaped)
    if how.before or how.after:
        shape = replace(how, transposed=False).stored_shape(values.shape)
        whole = stored.get(name, np.zeros(how.stored_shape(values.shape), np.float32))
        whole = whole.T if how.transposed else whole
        groups = whole.reshape(how.groups, -1, *shape[1:])
        groups[:, how.before : how.before + rows] = values.reshape(how.groups, rows, *shape[1:])
        values = groups.reshape(shape)
    stored[name] = np.ascontiguousarray(values.T) if how.transposed else values


def joined_as(stored: Arrays, name: str, how: Transform, values: NDArray[np.float32]) -> None:
    """Put a weight with a matrix per head into the tensor that has them one below the other."""
    known = np.split(stored[name], len(values)) if name in stored else [None] * len(values)
    made = []
    for part, matrix in zip(known, values, strict=True):
        one = {} if part is None else {name: part}
        stored_as(one, name, how, matrix)
        made.append(one[name])
    stored[name] = np.concatenate(made)


def _keys(prefix: str, config: ModelConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {
        f"{prefix}.block_count": config.num_layers,
        f"{prefix}.context_length": config.max_position,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads,
        f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.layer_norm_epsilon": config.norm_eps,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{prefix}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }
    if config.rope is not None:
        keys[f"{prefix}.rope.freq_base"] = config.rope.theta
    if prefix == "granite":
        keys |= {
            "granite.embedding_scale": config.embedding_multiplier,
            "granite.residual_scale": config.residual_multiplier,
            "granite.attention.scale": config.attention_multiplier,
            "granite.logit_scale": config.logits_scaling,
        }
    return keys


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def write_gguf(
    path: Path,
    config: ModelConfig,
    stored: Arrays,
    extra: Mapping[str, Any] | None = None,
    num_tokens: int | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    **writer_options: Any,
) -> None:
    """Write with the `gguf` package.

    `extra` adds or replaces unsigned, float, string or list keys, including a whole vocabulary.
    Bytes are blocks of the tensor's type in `types`, by default Q8_0.
    """
    others = {"qwen3_moe": "qwen3moe", "nomic_bert": "nomic-bert", "deepseek": "deepseek2"}
    prefix = others.get(config.family, config.family)
    writer = gguf.GGUFWriter(path, prefix, **writer_options)
    for key, value in (_keys(prefix, config) | dict(extra or {})).items():
        _add_value(writer, key, value)
    if "tokenizer.ggml.tokens" not in (extra or {}):
        count = config.vocab_size if num_tokens is None else num_tokens
        writer.add_token_list([f"token{index}" for index in range(count)])
        writer.add_token_types([1] * count)
    for name, values in stored.items():
        kind = None
        if values.dtype == np.uint8:
            kind = (types or {}).get(name, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, values, raw_dtype=kind)  # the writer derives the shape
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
