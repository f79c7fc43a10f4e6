"""Writes LoRA adapters as GGUF files, as llama.cpp and other programs read them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.adapters.matrices import EMBED, F32, LoraPair
from engine.adapters.reading import open_adapter
from engine.architectures.export import gguf_metadata
from engine.architectures.tensors import TensorSpec
from engine.conversion.gguf_writer import gguf_bytes, gguf_size
from engine.conversion.stored import TargetTensor, stored_array
from engine.conversion.writing import new_place, write_pieces
from engine.core.errors import ModelFormatError
from engine.core.registry.model_registry import architecture
from engine.weights.model import open_model
from engine.weights.weight import stored_places

_ARCHITECTURE = "general.architecture"
Part = tuple[TensorSpec, LoraPair]


def export_gguf(adapter: Path, base: Path, target: Path) -> None:
    """Write the adapter of the model `base` to the new file `target`."""
    with closing(open_model(base, reads_weights=False)) as model:
        config = model.config
        opened = open_adapter(adapter, config)
        if opened.whole:
            raise ModelFormatError(
                f"{adapter.name}: GGUF adapters have no place for whole matrices"
            )
        pairs = opened.pairs
        specs = architecture(config.family).tensors(replace(config, tie_embeddings=False))
        tensors = list(_tensors(adapter.name, specs, pairs))
        own = model.metadata if model.checkpoint.format == "gguf" else gguf_metadata(config)
    # The adapter's scale is part of its matrices, so there is no alpha.
    stated = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    metadata = {_ARCHITECTURE: own[_ARCHITECTURE], "general.name": target.stem, **stated}
    size = gguf_size(tensors)
    with new_place(target, size) as path:
        write_pieces(path, gguf_bytes(metadata, tensors), size, lambda done, total: None)


def _tensors(
    where: str, specs: Sequence[TensorSpec], pairs: Mapping[str, LoraPair]
) -> Iterator[TargetTensor]:
    """Two tensors for each stored matrix that the adapter changes."""
    parts: dict[str, list[Part]] = {}
    for spec in specs:
        if spec.name in pairs:
            if spec.gguf is None:
                raise ModelFormatError(f"{where}: GGUF has no name for '{spec.name}'")
            parts.setdefault(spec.gguf, []).append((spec, pairs[spec.name]))
    for name, together in parts.items():
        a, b = _stored(together)
        yield stored_array(a, f"{name}.lora_a")
        yield stored_array(b, f"{name}.lora_b")


def _stored(parts: Sequence[Part]) -> tuple[F32, F32]:
    """The matrices of one stored tensor, which may have the rows of several weights. Each of these
    has ranks of its own, unless it shares the first matrix with another one.
    """
    spec, first = parts[0]
    if spec.name == EMBED:  # a row per token
        return np.ascontiguousarray(first.a.T), first.b
    firsts: list[F32] = []
    for _, pair in parts:
        if not any(np.array_equal(pair.a, each) for each in firsts):
            firsts.append(pair.a)
    transform = spec.gguf_transform
    num_rows = spec.shape[0] + transform.groups * (transform.before + transform.after)
    b = np.zeros((num_rows, sum(map(len, firsts))), np.float32)
    for own, pair in parts:
        index = next(at for at, each in enumerate(firsts) if np.array_equal(pair.a, each))
        start = sum(map(len, firsts[:index]))
        rows = stored_places(own.gguf_transform, own.shape[0])
        b[rows, start : start + pair.rank] = pair.b
    return np.concatenate(firsts), b
