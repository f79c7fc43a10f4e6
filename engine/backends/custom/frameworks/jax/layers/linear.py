"""Matmul and embedding lookup. A parameter is a dictionary with "weight", (out, in), and an
optional "bias".
"""

import jax.numpy as jnp
from jax import Array

Params = dict  # names to arrays or to nested dictionaries: a pytree


def precision(dtype: jnp.dtype) -> str:
    """Keeps float32 matmuls in float32 on a GPU, whose tensor cores would use TF32."""
    return "highest" if dtype == jnp.float32 else "default"


def einsum(formula: str, a: Array, b: Array) -> Array:
    """Accumulates in float32, whatever the arrays' dtype."""
    exact = precision(a.dtype)
    return jnp.einsum(formula, a, b, precision=exact, preferred_element_type=jnp.float32)


def linear(params: Params, x: Array) -> Array:
    y = jnp.einsum("...i,oi->...o", x, params["weight"], precision=precision(x.dtype))
    return y + params["bias"] if "bias" in params else y


def embedding(params: Params, ids: Array) -> Array:
    """Table lookup: (T,) -> (T, D)"""
    return params["weight"].at[ids].get(mode="clip")
