"""The projections and norms of self-attention, and attention without a cache. Serving uses these
projections and norms with the paged attention in `kernels/`.
"""

from tinygrad import Tensor

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.scoring import Scoring
from engine.backends.custom.frameworks.tinygrad.kernels.attention import PerHead
from engine.backends.custom.frameworks.tinygrad.layers.linear import Params, linear
from engine.backends.custom.frameworks.tinygrad.layers.norm import rms_norm
from engine.backends.custom.frameworks.tinygrad.layers.rotary import Rotation, rotate


def heads(
    params: Params, config: ModelConfig, x: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects x (T, D) to queries (T, N, H), keys (T, K, H) and values (T, K, H). Applies the
    norms of queries and keys, then RoPE, if the model has them.
    """
    q, k, v = (linear(params[name], x) for name in ("q", "k", "v"))
    if config.qk_norm == "whole":
        q = rms_norm(params["q_norm"], q.contiguous(), config.norm_eps)
        k = rms_norm(params["k_norm"], k.contiguous(), config.norm_eps)
    q, k, v = (part.reshape(x.shape[0], -1, config.head_dim) for part in (q, k, v))
    if config.qk_norm == "head":
        q = rms_norm(params["q_norm"], q, config.norm_eps)
        k = rms_norm(params["k_norm"], k, config.norm_eps)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k, v


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, per_head: PerHead
) -> Tensor:
    """Causal attention of one whole sequence, without a cache. Returns (T, N, H)."""
    length, num_kv_heads = q.shape[0], k.shape[1]
    grouped = q.reshape(length, num_kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)  # (K, G, T, H)
    keys, values = (x.permute(1, 0, 2).unsqueeze(1) for x in (k, v))  # (K, 1, T, H)
    slopes, sinks = (
        None if each is None else each.float().reshape(num_kv_heads, -1, 1, 1) for each in per_head
    )
    scores = (grouped @ keys.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    distance = Tensor.arange(length).unsqueeze(1) - Tensor.arange(length)
    if slopes is not None:
        scores = scores - slopes * distance
    visible = distance >= 0
    if scoring.window is not None:
        visible = visible & (distance < scoring.window)
    scores = visible.where(scores, -float("inf"))
    if sinks is not None:  # the sink is the score of one more key, whose value is zero
        scores = scores.cat(sinks.expand(*scores.shape[:-1], 1), dim=-1)
    weights = scores.softmax(axis=-1)[..., :length].cast(v.dtype)
    return (weights @ values).permute(2, 0, 1, 3).reshape(q.shape)
