"""The attention scores of a layer as data, and the slopes of ALiBi."""

from dataclasses import dataclass

from engine.architectures.base import LayerConfig, ModelConfig
from engine.ir import reference

HIDDEN = -1e30  # score of a masked key; finite, because inf - inf is NaN


@dataclass(frozen=True, slots=True)
class Scoring:
    """How attention turns the dot product of a query and a key into a score."""

    scale: float  # multiplies the dot products
    window: int | None = None  # a query attends to this many positions, its own included
    softcap: float | None = None  # bounds scores: cap * tanh(score / cap)


def scoring_of(config: ModelConfig, layer: LayerConfig) -> Scoring:
    return Scoring(config.attention_scale, layer.window, config.attention_softcap)


def alibi_slopes(config: ModelConfig) -> reference.F32 | None:
    """The slope of each head, (N,): a key at distance d scores slope * d less. None: no ALiBi."""
    if config.alibi_bias is None:
        return None
    return reference.alibi_slopes(config.num_heads, config.alibi_bias)
