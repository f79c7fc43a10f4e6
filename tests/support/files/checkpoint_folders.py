"""Writes tiny models with their tokenizers, as complete model folders."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.architectures.base import ModelConfig, RopeConfig
from engine.core.text.tokenizer import Tokenizer
from tests.support.files import gguf_files, safetensors_files, tokenizer_files


def write_hf(folder: Path, family: str, *, spread: float = 1.0, **changes: Any) -> ModelConfig:
    """Write a Hugging Face model folder. `spread` is the standard deviation of matrices."""
    tokenizer_files.write_directory(folder)
    pieces = Tokenizer.from_directory(folder).vocab_size
    # A few extra rows pad the embedding table.
    sizes = {"vocab_size": pieces + 5, "bos_id": 0, "eos_ids": (2, 0)}
    config = replace(gguf_files.tiny_config(family, **changes), **sizes)
    weights = {
        name: values * np.float32(spread if values.ndim == 2 else 1)
        for name, values in gguf_files.random_weights(config).items()
    }
    safetensors_files.write_model(folder, config, safetensors_files.hf_layout(config, weights))
    return config


def write_llama2c(folder: Path, tied: bool, bytes_as_themselves: bool = False) -> ModelConfig:
    """Write a model as llama2.c's own scripts do, independently of the code under test."""
    metadata = tokenizer_files.sentencepiece_metadata()
    pieces, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    config = gguf_files.tiny_config(
        "llama",
        vocab_size=len(pieces),
        tie_embeddings=tied,
        rope=RopeConfig(10_000.0, 16),
        eos_ids=(2,),
    )
    stored = gguf_files.gguf_layout(config, gguf_files.random_weights(config))
    sizes = (config.hidden_size, config.intermediate_size, config.num_layers)
    vocab = config.vocab_size if tied else -config.vocab_size
    numbers = (*sizes, config.num_heads, config.num_kv_heads, vocab, config.max_position)
    order = [
        "token_embd",
        *(f"blk.{{}}.{each}" for each in ("attn_norm", "attn_q", "attn_k", "attn_v")),
        *(f"blk.{{}}.{each}" for each in ("attn_output", "ffn_norm", "ffn_gate", "ffn_down")),
        "blk.{}.ffn_up",
        "output_norm",
    ]
    data = b""
    for name in order:
        for layer in range(config.num_layers if "{}" in name else 1):
            data += stored[f"{name.format(layer)}.weight"].tobytes()
    data += bytes(4 * config.max_position * config.head_dim)
    data += b"" if tied else stored["output.weight"].tobytes()
    folder.mkdir()
    (folder / "model.bin").write_bytes(struct.pack("<7i", *numbers) + data)
    records = b""
    for index, (piece, score) in enumerate(zip(pieces, scores, strict=True)):
        raw = piece.replace("▁", " ").encode()
        if bytes_as_themselves and 3 <= index < 259:
            raw = bytes([index - 3])
        records += struct.pack("<fi", score, len(raw)) + raw
    (folder / "tokenizer.bin").write_bytes(struct.pack("<i", 40) + records)
    return config
