"""Loads a model with its weights from a checkpoint, one tensor at a time."""

from collections.abc import Mapping
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType

from engine.architectures.base import ModelConfig
from engine.ir.rotary import rotary_tables
from engine.runners.parameters import (
    Weight,
    check_decoder,
    parameter_tree,
    rope_factors,
)
from engine.runners.scoring import alibi_slopes
from engine.tinygrad.models.base import Model


def load_model(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    max_seq_len: int,
    dtype: DType,
    device: str,
) -> Model:
    check_decoder(config, "tinygrad")
    factors = rope_factors(weights)
    rotary = {rope: rotary_tables(rope, max_seq_len, factors) for rope in config.ropes}
    slopes = alibi_slopes(config)
    on_device = None if slopes is None else Tensor(slopes, device=device).realize()

    def place(name: str, values: Any) -> Tensor:
        return Tensor(values, device=device).cast(dtype).contiguous().realize()

    params = parameter_tree(weights, lambda weight: weight.numpy(), place)
    return Model(config, params, rotary, on_device)
