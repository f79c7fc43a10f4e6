"""A family's model with its weights from a checkpoint, one tensor at a time."""

from collections.abc import Mapping
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.parameters import (
    Weight,
    family_of,
    parameter_tree,
    rope_factors,
)
from engine.backends.custom.frameworks.tinygrad.models import gpt2, llama, qwen2, qwen3
from engine.backends.custom.frameworks.tinygrad.models.base import Family, Model
from engine.backends.custom.ir.rotary import rotary_tables

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    max_seq_len: int,
    dtype: DType,
    device: str,
) -> Model:
    family = family_of(FAMILIES, config, "tinygrad")
    rotary = None
    if config.rope is not None:
        rotary = rotary_tables(config.rope, max_seq_len, rope_factors(weights))

    def place(name: str, values: Any) -> Tensor:
        return Tensor(values, device=device).cast(dtype).contiguous().realize()

    params = parameter_tree(weights, lambda weight: weight.numpy(), place)
    return Model(config, family, params, rotary)
