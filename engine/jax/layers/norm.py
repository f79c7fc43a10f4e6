"""Norms over the last dimension. Mean and variance are computed in float32 for all dtypes."""

import jax.numpy as jnp
from jax import Array, lax

from engine.jax.layers.linear import Params


def rms_norm(params: Params, x: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * params["weight"]


def layer_norm(params: Params, x: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    scaled = normed.astype(x.dtype) * params["weight"]
    return scaled + params["bias"] if "bias" in params else scaled
