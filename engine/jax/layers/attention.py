"""The projections and norms of self-attention, and attention without a cache. Serving uses these
projections and norms with the paged attention in `kernels/`.
"""

import jax
import jax.numpy as jnp
from jax import Array

from engine.architectures.base import (
    LATENT_NORM_EPS,
    LatentConfig,
    ModelConfig,
)
from engine.jax.kernels.matmul import einsum
from engine.jax.kernels.work import PerHead, scores
from engine.jax.layers.linear import Params, linear
from engine.jax.layers.norm import rms_norm
from engine.jax.layers.rotary import Rotation, rotate
from engine.runners.scoring import Scoring


def heads(
    params: Params, config: ModelConfig, x: Array, rotation: Rotation | None
) -> tuple[Array, Array, Array]:
    """Projects x (T, D) to queries (T, N, H), keys (T, K, H) and values (T, K, H). Applies the
    norms of queries and keys, then RoPE, if the model has them.
    """
    return rotated(params, config, projected(params, config, x), rotation)


def projected(params: Params, config: ModelConfig, x: Array) -> tuple[Array, ...]:
    """Queries, keys and values before norms and RoPE. In latent attention: the input x alone."""
    if config.latent is not None:
        return (x,)
    return tuple(linear(params[name], x) for name in ("q", "k", "v"))


def rotated(
    params: Params, config: ModelConfig, parts: tuple[Array, ...], rotation: Rotation | None
) -> tuple[Array, Array, Array]:
    """The heads of what `projected` returns, after norms and RoPE."""
    if config.latent is not None:
        assert rotation is not None, "latent attention rotates"
        return _latent_heads(params, config.latent, parts[0], rotation)
    q, k, v = parts
    if config.qk_norm == "whole":
        q = rms_norm(params["q_norm"], q, config.norm_eps)
        k = rms_norm(params["k_norm"], k, config.norm_eps)
    q, k, v = (part.reshape(len(part), -1, config.head_dim) for part in (q, k, v))
    if config.qk_norm == "head":
        q = rms_norm(params["q_norm"], q, config.norm_eps)
        k = rms_norm(params["k_norm"], k, config.norm_eps)
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    return q, k, v


def _latent_heads(
    params: Params, latent: LatentConfig, x: Array, rotation: Rotation
) -> tuple[Array, Array, Array]:
    """The queries (T, N, L + R), the keys (T, 1, L + R) and the latents (T, 1, L), which are the
    values. `k_up` turns queries into vectors that score latents.
    """
    if latent.q_rank is None:
        q = linear(params["q"], x)
    else:
        narrow = rms_norm(params["q_a_norm"], linear(params["q_a"], x), LATENT_NORM_EPS)
        q = linear(params["q_b"], narrow)
    q = q.reshape(len(x), -1, latent.nope_dim + latent.rope_dim)
    plain, turned = jnp.split(q, (latent.nope_dim,), axis=-1)
    kv, key = jnp.split(linear(params["kv_a"], x)[:, None], (latent.kv_rank,), axis=-1)
    values = rms_norm(params["kv_norm"], kv, LATENT_NORM_EPS)
    scoring = einsum("tni,nli->tnl", plain, params["k_up"]["weight"]).astype(x.dtype)
    return (
        jnp.concatenate((scoring, rotate(turned, rotation)), axis=-1),
        jnp.concatenate((values, rotate(key, rotation)), axis=-1),
        values,
    )


def outputs(params: Params, attended: Array) -> Array:
    """The output projection: what heads put out (T, N, U) -> (T, D). In latent attention, `v_up`
    first turns the sum of latents of each head into a value.
    """
    if "v_up" in params:
        values = einsum("tnl,nul->tnu", attended, params["v_up"]["weight"])
        attended = values.astype(attended.dtype)
    return linear(params["o"], attended.reshape(len(attended), -1))


def causal_attention(q: Array, k: Array, v: Array, scoring: Scoring, per_head: PerHead) -> Array:
    """Causal attention of one whole sequence, without a cache. Returns (T, N, U), where U is the
    size of a value. The function is differentiable.
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
    mixed = einsum("kgts,skh->tkgh", weights, v).astype(v.dtype)
    return mixed.reshape(length, q.shape[1], -1)
