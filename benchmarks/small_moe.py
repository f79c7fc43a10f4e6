"""Writes a small mixture of experts with random weights as GGUF, and compares servers on it.

    python -m benchmarks.small_moe --llama-bin FOLDER_OF_LLAMA_SERVER
    python -m benchmarks.small_moe --experts 64 --per-token 8 --output moe.json

The model has Qwen3-MoE's architecture and the tokenizer of the default model. Speed does not depend
on the weights' values. The comparison is that of `benchmarks.run`: 8 streams at once, and one.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers import peers_cache
from benchmarks.run import main as compare
from benchmarks.run import model_path
from engine.architectures.base import ExpertsConfig, ModelConfig, RopeConfig
from engine.architectures.tensors import TensorSpec
from engine.core.registry.model_registry import architecture
from engine.core.store.catalogue import DEFAULT_MODEL

ARCHITECTURE = "qwen3moe"
MATRICES = gguf.GGMLQuantizationType.Q4_0
THETA = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=4)
    parser.add_argument("--expert-size", type=int, default=512)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-bin", type=Path, help="folder with llama-server; or LLAMA_BIN")
    parser.add_argument("--output", type=Path, help="write every figure to this JSON file")
    options = parser.parse_args()
    path = write_model(options)
    arguments = ["--model", str(path), "--peers", "llama-server", "--rounds", str(options.rounds)]
    arguments += ["--scenarios", "single", "conc", "--concurrency", *map(str, options.concurrency)]
    for name in ("llama_bin", "output"):
        value = getattr(options, name)
        arguments += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    sys.argv = [sys.argv[0], *arguments]
    compare()


def write_model(options: argparse.Namespace) -> Path:
    """The GGUF of this shape, in the cache of the peers. It is written only once."""
    sizes = (options.hidden, options.layers, options.experts, options.per_token)
    name = "-".join(map(str, (*sizes, options.expert_size)))
    path = peers_cache() / "moe" / f"moe-{name}-{MATRICES.name}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"writing {path}", file=sys.stderr)
    tokenizer = gguf.GGUFReader(model_path(DEFAULT_MODEL))
    config = _config(options, len(tokenizer.fields["tokenizer.ggml.tokens"].data))
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    _add_settings(writer, config)
    _add_tokenizer(writer, tokenizer)
    rng = np.random.default_rng(0)
    for spec in architecture(config.family).tensors(config):
        if spec.gguf is not None and not spec.optional:
            _add_tensor(writer, spec, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)
    return path


def _config(options: argparse.Namespace, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=vocab_size,
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.hidden // 64,
        num_kv_heads=max(1, options.hidden // 256),
        head_dim=64,
        intermediate_size=2 * options.hidden,
        max_position=8192,
        norm_eps=1e-6,
        tie_embeddings=False,
        rope=RopeConfig(THETA, 64),
        qk_norm="head",
        experts=ExpertsConfig(
            options.experts, options.per_token, options.expert_size, renormalizes=True
        ),
    )


def _add_settings(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    experts = config.experts
    assert experts is not None
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.per_token)
    writer.add_expert_feed_forward_length(experts.size)


def _add_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader) -> None:
    for key, field in source.fields.items():
        if key.startswith("tokenizer."):
            kind, *elements = field.types
            writer.add_key_value(key, field.contents(), kind, elements[0] if elements else None)


def _add_tensor(writer: gguf.GGUFWriter, spec: TensorSpec, rng: np.random.Generator) -> None:
    values: Any = rng.standard_normal(spec.shape, np.float32) * np.float32(spec.shape[-1] ** -0.5)
    if len(spec.shape) == 1:
        values = np.ones(spec.shape, np.float32)
    kind = gguf.GGMLQuantizationType.F32
    if len(spec.shape) > 1 and "router" not in spec.name:
        kind = MATRICES
        values = gguf.quantize(values, kind)
    writer.add_tensor(spec.gguf, values, raw_dtype=kind)


if __name__ == "__main__":
    main()
