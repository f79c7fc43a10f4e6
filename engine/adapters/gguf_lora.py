"""Reads LoRA adapters in GGUF, as llama.cpp's `convert_lora_to_gguf.py` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.adapters.matrices import StoredAdapter, StoredPair
from engine.architectures.base import Reader
from engine.core.errors import ModelFormatError
from engine.weights.gguf import open_gguf
from engine.weights.lazy_tensor import LazyTensor

_A, _B = ".lora_a", ".lora_b"
_TABLE = "token_embd.weight"


def read_gguf_lora(path: Path) -> StoredAdapter:
    """The matrices of a GGUF adapter, under the names of the base model's tensors."""
    checkpoint = open_gguf(path)
    try:
        made_for, alpha = _facts(path.name, checkpoint.metadata)
        names = dict.fromkeys(_base_name(path.name, name) for name in checkpoint.tensors)
        pairs = tuple(_pair(path.name, name, checkpoint.tensors, alpha) for name in names)
        return StoredAdapter(path.name, "gguf", pairs, made_for)
    finally:
        checkpoint.close()


def _facts(where: str, metadata: Mapping[str, Any]) -> tuple[str, float]:
    """The architecture of the base model, and alpha."""
    reader = Reader(metadata, where)
    if metadata.get("general.type") != "adapter":
        raise ModelFormatError(f"{where} is a model, not an adapter")
    if (kind := metadata.get("adapter.type")) != "lora":
        raise ModelFormatError(f"{where}: adapter.type is {kind}; only lora is served")
    if "adapter.alora.invocation_tokens" in metadata:
        raise ModelFormatError(f"{where}: activated LoRA (aLoRA) is not supported")
    alpha: float = reader.read(float, "adapter.lora.alpha", default=0.0)
    return reader.read(str, "general.architecture"), alpha


def _base_name(where: str, name: str) -> str:
    if not name.endswith((_A, _B)):
        raise ModelFormatError(f"{where}: tensor '{name}' is not part of a LoRA adapter")
    return name[: -len(_A)]


def _pair(where: str, name: str, tensors: Mapping[str, LazyTensor], alpha: float) -> StoredPair:
    a, b = tensors.get(name + _A), tensors.get(name + _B)
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
        raise ModelFormatError(f"{where}: '{name}' needs two matrices, {_A[1:]} and {_B[1:]}")
    values = a.numpy()
    # llama.cpp multiplies by alpha / rank, or by 1 if the file states no alpha. It stores the first
    # matrix of an embedding table with a row per token.
    scale = alpha / max(b.shape[1], 1) if alpha else 1.0
    return StoredPair(name, values.T if name == _TABLE else values, b.numpy(), scale)
