"""Merges a LoRA adapter into the weights of its base model, one weight at a time."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.adapters.matrices import F32, Adapter, LoraPair
from engine.core.errors import ModelFormatError
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource
from engine.weights.quantize import quantize
from engine.weights.quants import dequantize
from engine.weights.weight import Weight

MERGED_TYPE = "F16"  # how merged weights are stored if the user names no type


def merged(model: ModelSource, adapter: Adapter) -> ModelSource:
    """The model with the adapter's changes added. Each sum is computed when it is read."""
    weights = dict(model.weights)
    changes: list[tuple[str, LoraPair | F32]] = [*adapter.whole.items(), *adapter.pairs.items()]
    for name, change in changes:
        if name not in weights:
            raise ModelFormatError(
                f"the adapter changes '{name}', which shares its matrix with another weight; "
                "it can be served, but not merged"
            )
        weights[name] = _changed(name, weights[name], change)
    return replace(model, weights=weights)


def _changed(name: str, weight: Weight, change: LoraPair | F32) -> Weight:
    spec = weight.spec
    tensor = LazyTensor(
        name=name,
        shape=spec.shape,
        dtype="F32",
        nbytes=4 * math.prod(spec.shape),
        _view=partial(_sum, weight, change),
        _dequantize=partial(dequantize, "F32"),
    )
    return Weight(spec, (tensor,))


def _sum(weight: Weight, change: LoraPair | F32) -> NDArray[np.uint8]:
    if not isinstance(change, LoraPair):
        return quantize("F32", change)  # it replaces the weight
    change = change.b @ change.a
    base = weight.numpy()
    return quantize("F32", base + (change if change.shape == base.shape else change.T))
