"""Opens a model on disk: validates the files, reads the config, and finds the weights.

A size that a file states is checked against the file's tensors before memory of that size is
allocated. Settings that refer to code in the model directory, such as `auto_map`, are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.architectures.base import (
    Architecture,
    ModelConfig,
    Reader,
)
from engine.architectures.foreign import has_images
from engine.architectures.rope import (
    LONG_FACTORS,
    with_factors,
    with_long_factors,
)
from engine.architectures.vision.files import vision_from_hf
from engine.core.errors import ModelError, ModelFormatError
from engine.core.registry.model_registry import (
    architecture_for_gguf,
    architecture_for_hf,
    find_gguf,
    find_hf,
)
from engine.core.store.checkpoint_files import is_mmproj
from engine.weights.files import (
    CODE_SUFFIXES,
    member,
    read_json,
    refuse_code_formats,
)
from engine.weights.gguf import GgufCheckpoint, open_gguf, part_names
from engine.weights.lazy_tensor import Checkpoint
from engine.weights.pooling import (
    DecoderTask,
    InputPrompts,
    decoder_task,
    read_prompts,
    with_pooling,
)
from engine.weights.quants import TRAITS
from engine.weights.resolve import (
    NAMED_IN_ERRORS,
    check_values,
    resolve_vision,
    resolve_weights,
)
from engine.weights.safetensors import (
    INDEX_NAME,
    SINGLE_NAME,
    SafetensorsCheckpoint,
    open_safetensors,
)
from engine.weights.vision import parted, processor_config, read_mmproj
from engine.weights.weight import Weight

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model. `metadata` is the GGUF metadata or the content of config.json."""

    path: Path
    config: ModelConfig
    checkpoint: Checkpoint
    weights: Mapping[str, Weight]
    metadata: Mapping[str, Any]
    vision_weights: Mapping[str, Weight] = field(default_factory=dict)  # of the image encoder

    @property
    def quantization(self) -> str | None:
        return stored_quantization(self.checkpoint)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.checkpoint.tensors.values())

    @property
    def prompts(self) -> InputPrompts:
        """The texts to put before embedding inputs. GGUF files have none."""
        return read_prompts(self.path) if self.path.is_dir() else InputPrompts()

    @property
    def task(self) -> DecoderTask | None:
        """What a decoder was trained for, if not for generating text. GGUF files do not say it."""
        is_decoder = self.config.encoder is None and self.path.is_dir()
        return decoder_task(self.path, self.config) if is_decoder else None

    def close(self) -> None:
        self.checkpoint.close()


def open_model(path: Path, *, use_mmap: bool = True, reads_weights: bool = True) -> ModelSource:
    """Open a .gguf file, a directory with config.json and safetensors files, or a directory with a
    GGUF model.

    With `reads_weights=False`, the values of the weights are not read, so they are not checked.
    """
    if path.is_dir():
        if any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
            return _open_hf(path, use_mmap, reads_weights)
        return _open_gguf(only_gguf(path), use_mmap, reads_weights)
    if not path.exists():
        raise ModelError(f"there is no model at {path}")
    refuse_code_formats(path, b"")
    if path.suffix == ".safetensors":
        raise ModelFormatError(
            f"{path.name} lacks a config; give the directory that holds it and its {CONFIG_NAME}"
        )
    return _open_gguf(path, use_mmap, reads_weights)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model. `unsupported` is the name of its architecture if the engine has no
    family for it, else None.
    """

    path: Path
    checkpoint: Checkpoint
    metadata: Mapping[str, Any]
    unsupported: str | None

    def close(self) -> None:
        self.checkpoint.close()


def open_files(path: Path) -> ModelFiles:
    """Open the files of a model without interpreting them."""
    if path.is_dir() and any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME)):
        metadata: Mapping[str, Any] = read_json(path, CONFIG_NAME)
        names = _hf_architectures(metadata)
        unsupported = None if find_hf(names) else ", ".join(names)
        return ModelFiles(path, open_safetensors(path), metadata, unsupported)
    checkpoint = open_gguf(only_gguf(path) if path.is_dir() else path)
    name = Reader(checkpoint.metadata, path.name).read(str, "general.architecture")
    return ModelFiles(path, checkpoint, checkpoint.metadata, None if find_gguf(name) else name)


def _hf_architectures(metadata: Mapping[str, Any]) -> list[str]:
    names: list[str] = Reader(metadata, CONFIG_NAME).read(list, "architectures")
    if not all(isinstance(name, str) for name in names):
        raise ModelFormatError(f"{CONFIG_NAME}: key 'architectures' must be a list of names")
    return names


def stored_quantization(checkpoint: Checkpoint) -> str | None:
    """The storage type that most bytes of the checkpoint have, or None if this is a float type."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return most if most in TRAITS and TRAITS[most].quantized else None


def only_gguf(directory: Path) -> Path:
    """The first file of the GGUF model in a directory. Raises if there is not exactly one model."""
    names = sorted(
        entry.name
        for entry in directory.iterdir()
        if entry.suffix == ".gguf" and not is_mmproj(entry.name)
    )
    sets = {part_names(name) for name in names}
    if len(sets) == 1:
        return member(directory, names[0])
    if sets:
        shown = ", ".join(sorted(parts[0] for parts in sets)[:NAMED_IN_ERRORS])
        raise ModelFormatError(
            f"{directory.name} holds {len(sets)} GGUF models ({shown}, ...); name the file to load"
        )
    coded = sorted(e.name for e in directory.iterdir() if e.suffix.lower() in CODE_SUFFIXES)
    if coded:
        raise ModelFormatError(
            f"{directory.name} holds weights only as {coded[0]}, a format that can carry code and "
            "is never loaded; convert the model to safetensors or GGUF"
        )
    raise ModelError(f"{directory} holds no model: neither {SINGLE_NAME} nor a .gguf file")


def _open_hf(directory: Path, use_mmap: bool, reads_weights: bool) -> ModelSource:
    metadata = read_json(directory, CONFIG_NAME)
    family: Architecture = architecture_for_hf(_hf_architectures(metadata))
    # If there is a generation config, its stop tokens replace those of config.json, because they
    # are more reliable.
    stated = dict(metadata)
    if (directory / GENERATION_CONFIG_NAME).exists():
        eos = read_json(directory, GENERATION_CONFIG_NAME).get("eos_token_id")
        stated["eos_token_id"] = metadata.get("eos_token_id") if eos is None else eos
    config = family.config_from_hf(stated)
    if config.encoder is not None:
        config = with_pooling(config, directory)
    checkpoint = open_safetensors(directory, use_mmap, metadata.get("quantization_config"))
    vision_weights: dict[str, Weight] = {}
    if has_images(metadata):
        text, image = parted(checkpoint)
        vision = vision_from_hf(
            metadata, processor_config(directory), config.hidden_size, config.vocab_size
        )
        if not image:  # some published files have only the text model
            vision = None
        # Such files state in several places, or not at all, whether the head is tied.
        config = replace(config, tie_embeddings="lm_head.weight" not in text, vision=vision)
        if vision is not None and image:
            encoder = SafetensorsCheckpoint(checkpoint.files, image)
            vision_weights = resolve_vision(directory.name, vision, encoder)
        checkpoint = SafetensorsCheckpoint(checkpoint.files, text)
    weights = resolve_weights(directory.name, family, config, checkpoint)
    if reads_weights:
        check_values(directory.name, {**weights, **vision_weights})
    return ModelSource(directory, config, checkpoint, weights, metadata, vision_weights)


def _open_gguf(path: Path, use_mmap: bool, reads_weights: bool) -> ModelSource:
    checkpoint = open_gguf(path, use_mmap)
    metadata = checkpoint.metadata
    name = Reader(metadata, path.name).read(str, "general.architecture")
    family: Architecture = architecture_for_gguf(name)
    config = _settle(family.config_from_gguf(metadata), family, checkpoint)
    _check_vocabulary(path.name, config, metadata)
    weights = resolve_weights(path.name, family, config, checkpoint)
    vision, encoder = read_mmproj(path, config, metadata, use_mmap)
    vision_weights: dict[str, Weight] = {}
    if vision is not None and encoder is not None:
        config = replace(config, vision=vision)
        vision_weights = resolve_vision(path.name, vision, encoder)
    if reads_weights:
        check_values(path.name, {**weights, **vision_weights})
    return ModelSource(path, config, checkpoint, weights, metadata, vision_weights)


def _settle(config: ModelConfig, family: Architecture, checkpoint: GgufCheckpoint) -> ModelConfig:
    """Complete the config with what GGUF metadata does not state but the tensors show: whether the
    LM head is tied, which biases exist, and whether there are RoPE frequency factors.
    """
    widest = replace(config, tie_embeddings=False, qkv_bias=True, out_bias=True, mlp_bias=True)
    if config.qk_norm is None:
        widest = replace(widest, qk_norm="head")
    if config.state is not None:
        widest = replace(widest, state=replace(config.state, conv_bias=True, proj_bias=True))
    found = {spec.name for spec in family.tensors(widest) if spec.gguf in checkpoint.tensors}
    attn = f"layers.{config.attention_layers[0]}.attn"
    settled = replace(
        config,
        tie_embeddings="head.weight" not in found,
        qkv_bias=config.qkv_bias or f"{attn}.q.bias" in found,
        out_bias=config.out_bias or f"{attn}.o.bias" in found,
        mlp_bias=config.mlp_bias or "layers.0.mlp.up.bias" in found,
        qk_norm=widest.qk_norm if f"{attn}.q_norm.weight" in found else config.qk_norm,
    )
    if config.state is not None:
        mixer = f"layers.{config.state_layers[0]}.mixer"
        conv, proj = (f"{mixer}.{name}.bias" in found for name in ("conv", "o"))
        settled = replace(settled, state=replace(config.state, conv_bias=conv, proj_bias=proj))
    if all(name in checkpoint.tensors for name in LONG_FACTORS):
        short, long = (checkpoint.tensors[name].numpy() for name in LONG_FACTORS)
        factors = tuple(short.tolist()), tuple(long.tolist())
        settled = with_long_factors(settled, checkpoint.metadata, *factors)
    elif checkpoint.metadata.get(key := _scaling_key(checkpoint)) == "longrope":
        raise ModelFormatError(
            f"GGUF metadata: key '{key}': longrope needs the tensors {' and '.join(LONG_FACTORS)}"
        )
    return with_factors(settled) if "rope.factors" in found else settled


def _scaling_key(checkpoint: GgufCheckpoint) -> str:
    return f"{checkpoint.metadata.get('general.architecture')}.rope.scaling.type"


def _check_vocabulary(where: str, config: ModelConfig, metadata: Mapping[str, Any]) -> None:
    """Check that each tokenizer table has one entry per token of the vocabulary."""
    for key in ("tokens", "scores", "token_type"):
        column = metadata.get(f"tokenizer.ggml.{key}")
        if column is None:
            continue
        if not isinstance(column, list | np.ndarray) or len(column) != config.vocab_size:
            count = len(column) if isinstance(column, list | np.ndarray) else "no"
            raise ModelFormatError(
                f"{where}: tokenizer.ggml.{key} has {count} entries for a vocabulary of "
                f"{config.vocab_size}"
            )
