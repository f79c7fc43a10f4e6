"""Models whose weights are arrays in memory, for any `ModelConfig`, also for nobody's families."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.architectures.tensors import TensorSpec
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import ModelSource
from engine.weights.quants import dequantize
from engine.weights.random import RandomCheckpoint
from engine.weights.weight import Weight

F32 = NDArray[np.float32]
_STACKED = ("experts.gate", "experts.up", "experts.down", "attn.k_up", "attn.v_up")


def memory_source(
    config: ModelConfig, weights: Mapping[str, F32], matrix_type: str = "F32"
) -> ModelSource:
    """A model with these weights. Matrices are stored as `matrix_type`, everything else as F32."""
    found = {name: _weight(name, value, matrix_type) for name, value in weights.items()}
    checkpoint = RandomCheckpoint({name: weight.tensor for name, weight in found.items()})
    return ModelSource(Path(config.family), config, checkpoint, found, {})


def _weight(name: str, values: F32, matrix_type: str) -> Weight:
    of_experts = any(part in name for part in _STACKED)
    is_matrix = name.endswith(".weight") and values.ndim - of_experts == 2
    dtype = matrix_type if is_matrix and "router" not in name else "F32"
    kind = gguf.GGMLQuantizationType[dtype]
    raw = np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8).reshape(-1)
    tensor = LazyTensor(
        name,
        values.shape,
        dtype,
        raw.size,
        _view=lambda: raw,
        _dequantize=lambda stored, shape: dequantize(dtype, stored, shape),
    )
    spec = TensorSpec(name, values.shape, name, name, of_experts=of_experts)
    return Weight(spec, (tensor,))
