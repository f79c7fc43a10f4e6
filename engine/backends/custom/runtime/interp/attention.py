"""Attention patterns, computed from queries and keys after their norms and RoPE."""

from collections.abc import Iterable, Sequence

import numpy as np

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.runtime.model_runner import F32
from engine.core.errors import InvalidRequestError


def pattern(
    config: ModelConfig, layer: int, q: F32, k: F32, places: Sequence[int], heads: Iterable[int]
) -> F32:
    """(P, N, H) and (K, M, H) -> (P, heads, K) The weights of positions 0 .. K - 1 for the queries
    at `places`. Weights of later positions are 0.
    """
    if config.attention_sinks or config.latent is not None or config.alibi_bias is not None:
        raise InvalidRequestError(
            "interp.attention: this model's attention has sinks, latents or ALiBi, whose patterns "
            "are not computed.",
            param="interp",
        )
    chosen, positions = list(heads), np.arange(len(k))
    if not all(0 <= head < q.shape[1] for head in chosen):
        raise InvalidRequestError(
            f"interp.attention.heads must be within 0..{q.shape[1] - 1}.", param="interp"
        )
    group = q.shape[1] // k.shape[1]
    weights = np.zeros((len(places), len(chosen), len(k)), np.float32)
    own = np.array(places)[:, None]
    hidden = positions > own
    if (window := config.layer(layer).window) is not None:
        hidden |= positions <= own - window
    for index, head in enumerate(chosen):
        scores = (q[:, head] @ k[:, head // group].T) * np.float32(config.attention_scale)
        if (cap := config.attention_softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        scores = np.where(hidden, -np.inf, scores)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights[:, index] = scores / scores.sum(axis=1, keepdims=True)
    return weights
