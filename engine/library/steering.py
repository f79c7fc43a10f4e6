"""Trains steering vectors from pairs of texts, and converts vector files: GGUF control vectors of
llama.cpp, safetensors, and sparse autoencoders of SAE-lens.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.architectures.sites import site_name
from engine.core.errors import ConfigError
from engine.core.tensor_file import StoredTensor
from engine.library.interp import Trace

F32 = NDArray[np.float32]
Method = Literal["mean", "pca"]
DIRECTION = "direction."  # in a GGUF file: direction.N is added after layer N, from layer 1 on


class Tracer(Protocol):
    """An `LLM` or a `Remote`."""

    def trace(self, prompt: str, max_tokens: int = 1) -> Trace: ...


def train(
    model: Tracer,
    positive: Sequence[str],
    negative: Sequence[str],
    layers: Sequence[int],
    method: Method = "mean",
    on_text: Callable[[int], None] = lambda done: None,
) -> dict[str, F32]:
    """A vector for the residual stream after each layer, from the activations of the last token.

    "mean" is the difference of the means of both lists. "pca" is the first principal component of
    the differences of pairs, with the length of the mean difference and in its direction.
    """
    if not positive or len(positive) != len(negative):
        raise ConfigError(
            f"{len(positive)} positive and {len(negative)} negative texts: give the same number"
        )
    found = []
    for done, text in enumerate([*positive, *negative]):
        with model.trace(text) as t:
            saved = [t.blocks[layer].resid_post.save("last") for layer in layers]
        found.append(np.stack([each.value[0] for each in saved]))
        on_text(done + 1)
    states = np.stack(found)  # (texts, layers, D)
    differences = states[: len(positive)] - states[len(positive) :]
    return {
        site_name(layer, "resid_post"): _direction(differences[:, index], method)
        for index, layer in enumerate(layers)
    }


def _direction(differences: F32, method: Method) -> F32:
    mean: F32 = differences.mean(axis=0)
    if method == "mean":
        return mean
    _, _, components = np.linalg.svd(differences, full_matrices=False)
    first = components[0] * np.sign(components[0] @ mean or 1)
    made: F32 = (first * np.linalg.norm(mean)).astype(np.float32)
    return made


def tensors_of(vectors: dict[str, F32]) -> list[StoredTensor]:
    return [
        StoredTensor(name, "F32", values.shape, np.ascontiguousarray(values, np.float32).tobytes())
        for name, values in vectors.items()
    ]


def read_vectors(path: Path) -> tuple[dict[str, F32], dict[str, str]]:
    """The tensors and the metadata of a file: a GGUF control vector, a safetensors file, or the
    folder of a sparse autoencoder as SAE-lens writes it.
    """
    if path.is_dir():
        return _read_sae(path)
    if path.suffix == ".gguf":
        return _read_gguf(path)
    return _read_safetensors(path), _metadata(path)


def _read_gguf(path: Path) -> tuple[dict[str, F32], dict[str, str]]:
    from engine.weights.gguf import open_gguf

    checkpoint = open_gguf(path)
    try:
        found = {}
        for name, tensor in checkpoint.tensors.items():
            layer = name.removeprefix(DIRECTION)
            if not name.startswith(DIRECTION) or not layer.isdecimal() or layer == "0":
                raise ConfigError(f"{path}: tensor '{name}' is no direction of a control vector")
            found[site_name(int(layer), "resid_post")] = tensor.numpy().reshape(-1)
        hint = str(checkpoint.metadata.get("controlvector.model_hint", ""))
        return found, {"source": "gguf", "model_hint": hint}
    finally:
        checkpoint.close()


def _read_safetensors(path: Path) -> dict[str, F32]:
    from engine.weights.safetensors import open_safetensors

    checkpoint = open_safetensors(path)
    try:
        return {name: tensor.numpy() for name, tensor in checkpoint.tensors.items()}
    finally:
        checkpoint.close()


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        told = json.loads(file.read(size)).get("__metadata__", {})
    return {name: str(value) for name, value in told.items()}


def _read_sae(folder: Path) -> tuple[dict[str, F32], dict[str, str]]:
    """SAE-lens: cfg.json and sae_weights.safetensors (W_enc, b_enc, W_dec, b_dec, threshold)."""
    weights, config = folder / "sae_weights.safetensors", folder / "cfg.json"
    if not weights.is_file() or not config.is_file():
        raise ConfigError(f"{folder} has no cfg.json and sae_weights.safetensors of SAE-lens")
    told = json.loads(config.read_text())
    site = told.get("hook_name") or told.get("metadata", {}).get("hook_name", "")
    kind = told.get("architecture", "standard")
    if kind not in ("standard", "jumprelu"):
        raise ConfigError(f"{config}: an autoencoder of kind '{kind}' is not covered")
    found = {name: values.astype(np.float32) for name, values in _read_safetensors(weights).items()}
    if not told.get("apply_b_dec_to_input", True):
        raise ConfigError(f"{config}: apply_b_dec_to_input false is not covered")
    return found, {"site": site, "source": "sae_lens"}


def write_gguf(path: Path, vectors: dict[str, F32], model: str) -> None:
    """Writes a control vector that llama.cpp reads (`--control-vector`)."""
    from engine.conversion.gguf_writer import gguf_bytes
    from engine.conversion.stored import TargetTensor as Written

    tensors = []
    for name, values in vectors.items():
        layer = name.removeprefix("blocks.").removesuffix(".hook_resid_post")
        if not layer.isdecimal() or layer == "0":
            raise ConfigError(
                f"llama.cpp's control vectors are for the residual stream after layers 1 and up; "
                f"'{name}' is not"
            )
        data = np.ascontiguousarray(values, np.float32).view(np.uint8)
        pieces = partial(iter, [data])
        tensors.append(Written(f"{DIRECTION}{layer}", values.shape, "F32", pieces))
    metadata = {
        "general.architecture": "controlvector",
        "controlvector.model_hint": model,
        "controlvector.layer_count": len(tensors),
    }
    with path.open("wb") as file:
        for piece in gguf_bytes(metadata, tensors):
            file.write(piece.tobytes())
