"""Reads facts about a checkpoint without loading its weights: sizes, tokenizer, chat template.

Weights are safetensors or GGUF files, which can't contain code. `auto_map` in a checkpoint, which
refers to Python code of the checkpoint, is ignored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError, ModelFormatError
from engine.core.text.tokenizer import Tokenizer
from engine.frontend.recommended import of_folder, of_gguf
from engine.frontend.text_model import TextModel, text_model
from engine.weights.files import read_json, refuse_code_formats
from engine.weights.gguf import open_gguf, part_names
from engine.weights.lazy_tensor import Checkpoint
from engine.weights.model import (
    CONFIG_NAME,
    only_gguf,
    stored_quantization,
)
from engine.weights.safetensors import INDEX_NAME, SINGLE_NAME, open_safetensors

# Names of the max sequence length in different families' configurations.
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
# Max sequence length of a model that does not state one. Such models have no position embeddings,
# or a recurrent state.
UNSTATED_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class HfShape:
    """Facts about a model. A frontend reports them and needs them to check requests."""

    vocab_size: int
    hidden_size: int
    max_position: int
    num_params: int
    eos_ids: tuple[int, ...] = ()  # always empty: the tokenizer has the end-of-text ids
    encoder: None = None
    vision: None = None


@dataclass(frozen=True, slots=True)
class HfCheckpoint:
    """A checkpoint on disk. `folder` contains config.json and safetensors, or the GGUF file named
    `gguf`. `metadata` is the content of config.json, or the metadata of the GGUF file.
    """

    folder: Path
    gguf: str | None
    metadata: Mapping[str, Any]
    shape: HfShape
    quantization: str | None
    size_bytes: int

    def tokenizer(self) -> Tokenizer:
        if self.gguf is None:
            return Tokenizer.from_directory(self.folder)
        return Tokenizer.from_gguf(self.metadata)


def read_text(path: Path) -> TextModel:
    """Read what a frontend needs of the model at `path`: tokenizer and chat template."""
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    made = text_model(checkpoint.shape, tokenizer, checkpoint.quantization, checkpoint.size_bytes)
    is_folder = checkpoint.gguf is None
    recommended = of_folder(checkpoint.folder) if is_folder else of_gguf(checkpoint.metadata)
    return replace(made, recommended=recommended)


def validate_checkpoint(path: Path, passed: Callable[[], None]) -> None:
    """Parse everything that a server parses of a checkpoint. Raises if something is invalid."""
    read_text(path)


def open_checkpoint(path: Path) -> HfCheckpoint:
    """Open a checkpoint without reading weights. Raises an `EngineError` that says what is
    wrong.
    """
    if not path.exists():
        raise ModelError(f"there is no model at {path}")
    if path.is_dir() and any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
        return _open_folder(path)
    file = only_gguf(path) if path.is_dir() else path
    refuse_code_formats(file, b"")
    if file.suffix == ".safetensors":
        raise ModelFormatError(
            f"{file.name} lacks a config; give the folder that holds it and its {CONFIG_NAME}"
        )
    if len(part_names(file.name)) > 1:
        raise ModelFormatError(
            f"{file.name} is one of several parts, which Transformers cannot read; "
            "merge them, or use another backend"
        )
    return _open_gguf(file)


def _open_folder(folder: Path) -> HfCheckpoint:
    metadata = read_json(folder, CONFIG_NAME)
    nested = metadata.get("text_config")
    stated = {**metadata, **nested} if isinstance(nested, dict) else metadata
    checkpoint = open_safetensors(folder)
    try:
        method = metadata.get("quantization_config")
        return HfCheckpoint(
            folder,
            None,
            metadata,
            HfShape(
                vocab_size=_count(stated, ("vocab_size",), CONFIG_NAME),
                hidden_size=_count(stated, ("hidden_size", "n_embd", "d_model"), CONFIG_NAME),
                max_position=_count(stated, _CONTEXT_KEYS, CONFIG_NAME, UNSTATED_CONTEXT),
                num_params=_num_values(checkpoint),
            ),
            str(method.get("quant_method")) if isinstance(method, dict) else None,
            _num_bytes(checkpoint),
        )
    finally:
        checkpoint.close()


def _open_gguf(file: Path) -> HfCheckpoint:
    checkpoint = open_gguf(file)
    try:
        metadata = checkpoint.metadata
        name = metadata.get("general.architecture")
        embedding = checkpoint.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelFormatError(f"{file.name} has no token embeddings: it is no language model")
        return HfCheckpoint(
            file.parent,
            file.name,
            metadata,
            HfShape(
                vocab_size=embedding.shape[0],
                hidden_size=_count(metadata, (f"{name}.embedding_length",), file.name),
                max_position=_count(
                    metadata, (f"{name}.context_length",), file.name, UNSTATED_CONTEXT
                ),
                num_params=_num_values(checkpoint),
            ),
            stored_quantization(checkpoint),
            _num_bytes(checkpoint),
        )
    finally:
        checkpoint.close()


def _num_values(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def _num_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


def _count(
    source: Mapping[str, Any], keys: tuple[str, ...], where: str, default: int | None = None
) -> int:
    """The value of the first key that is present."""
    for key in keys:
        value = source.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or not 1 <= value <= 2**31 - 1:
            raise ModelFormatError(
                f"{where}: key '{key}' must be a positive number, found {value!r}"
            )
        return int(value)
    if default is None:
        raise ModelFormatError(f"{where} lacks the required key '{keys[0]}'")
    return default
