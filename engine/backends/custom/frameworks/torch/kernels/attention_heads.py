"""What attention computes, apart from its keys and values: `AttentionHeads` has the settings, and
`attend_by_definition` is the arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.ir.reference import alibi_slopes


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a model and how they score keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...] = (None,)  # the different windows of all layers; None: no limit
    softcap: float | None = None  # bounds scores: softcap * tanh(score / softcap)
    has_sinks: bool = False
    alibi_bias: float | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> "AttentionHeads":
        windows = (config.layer(index).window for index in range(config.num_layers))
        return cls(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            tuple(dict.fromkeys(windows)),
            config.attention_softcap,
            config.attention_sinks,
            config.alibi_bias,
        )

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled and masked, as most fused kernels can do it."""
        return self.softcap is None and not self.has_sinks and self.alibi_bias is None

    def slopes(self, device: torch.device) -> Tensor | None:
        """The slope of each head for ALiBi, (N,) float32. A score decreases by the slope for each
        position between query and key. None: the model has no ALiBi.
        """
        if self.alibi_bias is None:
            return None
        return torch.from_numpy(alibi_slopes(self.num_heads, self.alibi_bias)).to(device)


def additive_mask(distance: Tensor, window: int | None, slopes: Tensor | None = None) -> Tensor:
    """A float32 mask that is added to scores: -inf for keys that a query does not attend to, else
    the ALiBi term, or 0. `distance` is the position of the query minus that of the key. `slopes`
    broadcasts with it.
    """
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if slopes is None:
        mask = torch.zeros(distance.shape, device=distance.device)
    else:
        mask = -slopes * distance
    return mask.masked_fill(hidden, float("-inf"))


def two_way(distance: Tensor, keys: Tensor, visible_end: Tensor) -> Tensor:
    """The distances (T, L) for `additive_mask`, if queries also attend to later positions: to those
    before `visible_end` (T,). `keys` (L,) are the positions of the keys.
    """
    is_later = (distance < 0) & (keys < visible_end[:, None])
    return distance.masked_fill(is_later, 0)


def attend_by_definition(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q (..., Q, H), keys and values (..., L, H) -> (..., Q, H), in float32. `mask` (..., Q, L) is
    added to the scores; None: all keys are visible. `sinks` (..., Q, 1) are logits that only add to
    the sum of the softmax.
    """
    scores = q.float() @ keys.float().mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ values.float()).to(q.dtype)
