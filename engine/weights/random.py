"""Makes a model with random weights from a config alone. With it, the speed of a model shape can be
measured without a checkpoint, because speed does not depend on the values of the weights.

The weights behave like those of a file, but their bytes are sampled on first use. To load large
models quickly, a framework may instead sample the weights on its own device, from the distribution
`RandomWeight.values`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import Architecture, Reader
from engine.architectures.tensors import TensorSpec
from engine.core.registry.model_registry import architecture_for_hf
from engine.weights.files import FileBytes, read_json
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import CONFIG_NAME, ModelSource
from engine.weights.quants import dequantize
from engine.weights.weight import Weight

STORED = "BF16"
_STORED_BYTES = 2
# By default, the standard deviation of a matrix is such that inputs of unit variance give outputs
# of unit variance. For these matrices, it is multiplied by a factor. The factors make attention
# more peaked and logits more spread out, so that a kernel bug shows in the output.
_GAINS = {"attn.q": 1.3, "attn.k": 1.3, "embed": 1.5, "head": 1.5}


@dataclass(frozen=True, slots=True)
class Normal:
    """The normal distribution and the seed with which the values of a weight are sampled."""

    mean: float
    std: float
    seed: int


@dataclass(frozen=True, slots=True)
class RandomWeight(Weight):
    @property
    def values(self) -> Normal:
        return _values(self.spec)


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A checkpoint without files. Its tensors have the engine's names."""

    tensors: dict[str, LazyTensor]
    format: str = "safetensors"

    @property
    def files(self) -> list[FileBytes]:
        return []

    def close(self) -> None:
        pass


def open_random(folder: Path) -> ModelSource:
    """A random model with the sizes in the folder's config.json. No other file is needed."""
    return random_model(read_json(folder, CONFIG_NAME), folder)


def random_model(metadata: Mapping[str, Any], path: Path) -> ModelSource:
    """A random model with the sizes in `metadata`, which is the content of a config.json. `path` is
    only a name for the model. Nothing is read from it.
    """
    family: Architecture = architecture_for_hf(
        Reader(metadata, CONFIG_NAME).read(list, "architectures")
    )
    config = family.config_from_hf(metadata)
    weights: dict[str, Weight] = {}
    for spec in family.tensors(config):
        if spec.hf is None or spec.optional:
            continue
        tensor = LazyTensor(
            name=spec.name,
            shape=spec.shape,
            dtype=STORED,
            nbytes=_STORED_BYTES * prod(spec.shape),
            _view=partial(_sample, spec),
            _dequantize=partial(dequantize, STORED),
        )
        weights[spec.name] = RandomWeight(spec, (tensor,))
    checkpoint = RandomCheckpoint({name: weight.tensor for name, weight in weights.items()})
    return ModelSource(path, config, checkpoint, weights, metadata)


def _values(spec: TensorSpec) -> Normal:
    """The distribution of a weight's values. Matrices have mean zero, norm weights are all one, and
    biases are all zero.
    """
    seed = crc32(spec.name.encode())
    path, _, kind = spec.name.rpartition(".")
    if len(spec.shape) == 1:
        return Normal(1.0 if kind == "weight" else 0.0, 0.0, seed)
    gain = next((gain for name, gain in _GAINS.items() if path.endswith(name)), 1.0)
    return Normal(0.0, gain / sqrt(spec.shape[-1]), seed)


def _sample(spec: TensorSpec) -> NDArray[np.uint8]:
    """Sample the values of a weight. Returns them as bfloat16 bytes, rounded towards zero."""
    normal = _values(spec)
    samples = np.random.default_rng(normal.seed).standard_normal(prod(spec.shape), np.float32)
    values = samples * np.float32(normal.std) + np.float32(normal.mean)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
