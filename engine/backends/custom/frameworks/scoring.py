"""The attention scores of a layer as data, and the slopes of ALiBi."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import LayerConfig, ModelConfig

HIDDEN = -1e30  # score of a masked key; finite, because inf - inf is NaN


@dataclass(frozen=True, slots=True)
class Scoring:
    """How attention turns the dot product of a query and a key into a score."""

    scale: float  # multiplies the dot products
    window: int | None = None  # a query attends to this many positions, its own included
    softcap: float | None = None  # bounds scores: cap * tanh(score / cap)


def scoring_of(config: ModelConfig, layer: LayerConfig) -> Scoring:
    return Scoring(config.attention_scale, layer.window, config.attention_softcap)


def alibi_slopes(config: ModelConfig) -> NDArray[np.float32] | None:
    """The slope of each head, (N,): a key at distance d scores slope * d less. None: no ALiBi."""
    if config.alibi_bias is None:
        return None
    count = 2 ** math.ceil(math.log2(config.num_heads))
    exponents = np.arange(1, count + 1) * (config.alibi_bias / count)
    if count != config.num_heads:  # every second exponent first, then those between them
        exponents = np.concatenate((exponents[1::2], exponents[::2]))[: config.num_heads]
    return (2.0**-exponents).astype(np.float32)
