"""The projections and norms of self-attention, and attention without a cache. Serving uses these
projections and norms with the paged attention in `kernels/`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.jax.kernels.work import PerHead, scores
from engine.backends.custom.frameworks.jax.layers.linear import Params, einsum, linear
from engine.backends.custom.frameworks.jax.layers.norm import rms_norm
from engine.backends.custom.frameworks.jax.layers.rotary import Rotation, rotate
from engine.backends.custom.frameworks.scoring import Scoring


def heads(
    params: Params, config: ModelConfig, x: Array, rotation: Rotation | None
) -> tuple[Array, Array, Array]:
    """Projects x (T, D) to queries (T, N, H), keys (T, K, H) and values (T, K, H). Applies the
    norms of queries and keys, then RoPE, if the model has them.
    """
    q, k, v = (linear(params[name], x) for name in ("q", "k", "v"))
    if config.qk_norm == "whole":
        q = rms_norm(params["q_norm"], q, config.norm_eps)
        k = rms_norm(params["k_norm"], k, config.norm_eps)
    q, k, v = (part.reshape(len(x), -1, config.head_dim) for part in (q, k, v))
    if config.qk_norm == "head":
        q = rms_norm(params["q_norm"], q, config.norm_eps)
        k = rms_norm(params["k_norm"], k, config.norm_eps)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k, v


def causal_attention(q: Array, k: Array, v: Array, scoring: Scoring, per_head: PerHead) -> Array:
    """Causal attention of one whole sequence, without a cache. Returns (T, N, H). The function is
    differentiable.
    """
    length, num_kv_heads = len(q), k.shape[1]
    grouped = q.reshape(length, num_kv_heads, -1, q.shape[-1])  # (T, K, N / K, H)
    slopes, sinks = (
        None if each is None else each.reshape(num_kv_heads, -1, 1, 1) for each in per_head
    )
    scaled = einsum("tkgh,skh->kgts", grouped, k) * scoring.scale
    distance = jnp.arange(length)[:, None] - jnp.arange(length)
    scored = scores(scaled, distance, scoring, slopes)
    if sinks is not None:  # the sink is the score of one more key, whose value is zero
        sink = jnp.broadcast_to(sinks, (*scored.shape[:-1], 1))
        scored = jnp.concatenate((scored, sink), axis=-1)
    weights = jax.nn.softmax(scored, axis=-1)[..., :length].astype(v.dtype)
    return einsum("kgts,skh->tkgh", weights, v).astype(v.dtype).reshape(q.shape)
