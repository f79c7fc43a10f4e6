"""Matmul and embedding lookup. The parameters of a layer are a dictionary with "weight", (out, in),
and an optional "bias".
"""

import jax.numpy as jnp
from jax import Array

Params = dict  # a pytree: names to arrays or to nested dictionaries


def precision(dtype: jnp.dtype) -> str:
    """JAX's precision setting for a matmul of this dtype. For float32 it is "highest". With the
    default, GPUs would round float32 inputs to TF32.
    """
    return "highest" if dtype == jnp.float32 else "default"


def einsum(formula: str, a: Array, b: Array) -> Array:
    """As `jnp.einsum`, but accumulates in float32 and returns float32 for inputs of any dtype."""
    exact = precision(a.dtype)
    return jnp.einsum(formula, a, b, precision=exact, preferred_element_type=jnp.float32)


def linear(params: Params, x: Array) -> Array:
    y = jnp.einsum("...i,oi->...o", x, params["weight"], precision=precision(x.dtype))
    return y + params["bias"] if "bias" in params else y


def embedding(params: Params, ids: Array) -> Array:
    """Looks up the embeddings of token ids or positions: (T,) -> (T, D)"""
    return params["weight"].at[ids].get(mode="clip")
