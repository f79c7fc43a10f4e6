"""Small models for tests of weight packing, and their packing plans."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.ir.plan import PackedMatrix
from engine.weights.model import ModelSource, open_model
from tests.native.conftest import load_native
from tests.support.files.gguf_files import gguf_layout, random_weights, tiny_config, write_gguf
from tests.support.files.safetensors_files import hf_layout, write_model

sys.modules.setdefault("engine.native._native", load_native())

from engine.native.weights.cache import PackedCache  # noqa: E402
from engine.native.weights.loading import (  # noqa: E402
    PackedWeights,
    load_weights,
)


def make_model(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a model whose MLP sizes are multiples of neither the panel nor the group size."""
    biases = {} if family == "gpt2" else {"qkv_bias": True, "mlp_bias": True}
    config = tiny_config(family, intermediate_size=88, **(biases | changes))
    weights = random_weights(config, seed)
    if family == "gpt2":
        write_model(path, config, hf_layout(config, weights))
    else:
        write_gguf(path, config, gguf_layout(config, weights))
    return path


def plan_of(source: ModelSource) -> tuple[list[PackedMatrix], list[str]]:
    """Fuse the matrices as a planner would: query, key and value together, gate and up
    interleaved.
    """
    groups = [("embed", False), ("head", False)]
    for layer in range(source.config.num_layers):
        place = f"layers.{layer}"
        parts = (f"{place}.attn.{part}" for part in "qkv")
        groups.append((" ".join(parts), False))
        if f"{place}.mlp.gate.weight" in source.weights:
            groups.append((f"{place}.mlp.gate {place}.mlp.up", True))
        else:
            groups.append((f"{place}.mlp.up", False))
        groups += [(f"{place}.attn.o", False), (f"{place}.mlp.down", False)]
    matrices = []
    for names, interleaved in groups:
        parts = tuple(f"{name}.weight" for name in names.split())
        biases = tuple(f"{name}.bias" for name in names.split())
        shapes = [source.weights[part].spec.shape for part in parts]
        if biases[0] not in source.weights:
            biases = ()
        rows = sum(shape[0] for shape in shapes)
        layout = source.weights[parts[0]].tensor.dtype
        matrices.append(PackedMatrix(names, parts, biases, interleaved, rows, shapes[0][1], layout))
    used = {part for matrix in matrices for part in (*matrix.parts, *matrix.biases)}
    return matrices, [name for name in source.weights if name not in used]


def load(model: Path, where: PackedCache | None, **options: Any) -> PackedWeights:
    """Load the weights and wait until the packed file is written."""
    source = open_model(model)
    weights = load_weights(source, *plan_of(source), threads=2, cache=where, **options)
    source.close()
    if weights.writer is not None:
        weights.writer.join()
    return weights


def content(weights: PackedWeights) -> list[bytes]:
    panels = [matrix.data.tobytes() for matrix in weights.matrices.values()]
    return panels + [v.tobytes() for v in (*weights.biases.values(), *weights.vectors.values())]


def in_rows(parts: list[NDArray[np.float32]], interleaved: bool) -> NDArray[np.float32]:
    """The parts' matrix rows in packed order, zero-padded to whole panels."""
    if not interleaved:
        whole = np.concatenate(parts)
        return np.concatenate((whole, np.zeros((-len(whole) % 16, *whole.shape[1:]), np.float32)))
    padded = [in_rows([part], False).reshape(-1, 16, *part.shape[1:]) for part in parts]
    return np.stack(padded, axis=1).reshape(-1, *parts[0].shape[1:])
