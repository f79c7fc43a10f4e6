"""The projections and norms of self-attention, and attention without a cache. Serving uses these
projections and norms with the paged attention in `kernels/`.
"""

from tinygrad import Tensor

from engine.architectures.base import (
    LATENT_NORM_EPS,
    LatentConfig,
    ModelConfig,
)
from engine.runners.scoring import Scoring
from engine.tinygrad.kernels.attention import PerHead
from engine.tinygrad.layers.linear import Params, linear
from engine.tinygrad.layers.norm import rms_norm
from engine.tinygrad.layers.rotary import Rotation, rotate


def heads(
    params: Params, config: ModelConfig, x: Tensor, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects x (T, D) to queries (T, N, H), keys (T, K, H) and values (T, K, H). Applies the
    norms of queries and keys, then RoPE, if the model has them.
    """
    if config.latent is not None:
        assert rotation is not None, "latent attention rotates"
        return _latent_heads(params, config.latent, x, rotation)
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


def _latent_heads(
    params: Params, latent: LatentConfig, x: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries (T, N, L + R), the keys (T, 1, L + R) and the latents (T, 1, L), which are the
    values. `k_up` turns queries into vectors that score latents.
    """
    if latent.q_rank is None:
        q = linear(params["q"], x)
    else:
        narrow = linear(params["q_a"], x).contiguous()
        q = linear(params["q_b"], rms_norm(params["q_a_norm"], narrow, LATENT_NORM_EPS))
    q = q.reshape(x.shape[0], -1, latent.nope_dim + latent.rope_dim)
    plain, turned = q[..., : latent.nope_dim], q[..., latent.nope_dim :]
    kv = linear(params["kv_a"], x).unsqueeze(1).contiguous()
    values = rms_norm(params["kv_norm"], kv[..., : latent.kv_rank], LATENT_NORM_EPS)
    key = rotate(kv[..., latent.kv_rank :], rotation)
    scoring = by_head(params["k_up"], plain)
    return scoring.cat(rotate(turned, rotation), dim=-1), values.cat(key, dim=-1), values


def by_head(params: Params, x: Tensor) -> Tensor:
    """Multiplies each head by a matrix of its own: (T, N, in) -> (T, N, out)"""
    return (x.transpose(0, 1) @ params["weight"].transpose(-1, -2)).transpose(0, 1)


def outputs(params: Params, attended: Tensor) -> Tensor:
    """The output projection: what heads put out (T, N, U) -> (T, D). In latent attention, `v_up`
    first turns the sum of latents of each head into a value.
    """
    if "v_up" in params:
        attended = by_head(params["v_up"], attended)
    return linear(params["o"], attended.reshape(attended.shape[0], -1))


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, per_head: PerHead
) -> Tensor:
    """Causal attention of one whole sequence, without a cache. Returns (T, N, U), where U is the
    size of a value.
    """
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
    return (weights @ values).permute(2, 0, 1, 3).reshape(length, q.shape[1], -1)
