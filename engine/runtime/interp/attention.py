"""Attention patterns, computed from queries and keys after their norms and RoPE."""

from collections.abc import Iterable, Iterator

import numpy as np

from engine.architectures.base import ModelConfig
from engine.core.errors import InvalidRequestError
from engine.runtime.model_runner import F32

SCORES_PER_TURN = 2**20  # of one head


class Pattern:
    """(P, N, H) and (K, M, H) -> (P, heads, K) The weights of positions 0 .. K - 1 for the queries
    at `places`. Weights of later positions are 0. `run` computes them, a few queries at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        q: F32,
        k: F32,
        places: list[int],
        heads: Iterable[int],
    ) -> None:
        if config.attention_sinks or config.latent is not None or config.alibi_bias is not None:
            raise InvalidRequestError(
                "interp.attention: this model's attention has sinks, latents or ALiBi, whose "
                "patterns are not computed.",
                param="interp",
            )
        self._heads = list(heads)
        if not all(0 <= head < q.shape[1] for head in self._heads):
            raise InvalidRequestError(
                f"interp.attention.heads must be within 0..{q.shape[1] - 1}.", param="interp"
            )
        self._config, self._q, self._k, self.places = config, q, k, places
        self._window = config.layer(layer).window
        self.weights: F32 = np.zeros((len(places), len(self._heads), len(k)), np.float32)

    def run(self) -> Iterator[None]:
        rows = max(1, SCORES_PER_TURN // max(1, len(self._k)))
        for start in range(0, len(self.places), rows):
            self._compute(slice(start, start + rows))
            yield

    def _compute(self, rows: slice) -> None:
        config, q, k = self._config, self._q[rows], self._k
        positions, own = np.arange(len(k)), np.array(self.places[rows])[:, None]
        hidden = positions > own
        if self._window is not None:
            hidden |= positions <= own - self._window
        group = q.shape[1] // k.shape[1]
        for index, head in enumerate(self._heads):
            scores = (q[:, head] @ k[:, head // group].T) * np.float32(config.attention_scale)
            if (cap := config.attention_softcap) is not None:
                scores = cap * np.tanh(scores / cap)
            scores = np.where(hidden, -np.inf, scores)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            self.weights[rows, index] = scores / scores.sum(axis=1, keepdims=True)
