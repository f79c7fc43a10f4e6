"""Matrix products and lookups. A parameter is a dictionary with "weight", (out, in), and perhaps
"bias".
"""

import jax.numpy as jnp
from jax import Array

Params = dict  # names to arrays or to further ones: the pytree of a part of the model


def precision(dtype: jnp.dtype) -> str:
    """Float32 stays float32 on a GPU, too, where tensor cores would shorten it."""
    return "highest" if dtype == jnp.float32 else "default"


def einsum(formula: str, a: Array, b: Array) -> Array:
    """Summed up in float32 whatever the arrays' type."""
    exact = precision(a.dtype)
    return jnp.einsum(formula, a, b, precision=exact, preferred_element_type=jnp.float32)


def linear(params: Params, x: Array) -> Array:
    y = jnp.einsum("...i,oi->...o", x, params["weight"], precision=precision(x.dtype))
    return y + params["bias"] if "bias" in params else y


def embedding(params: Params, ids: Array) -> Array:
    """Rows of a table: (T,) -> (T, D)"""
    return params["weight"].at[ids].get(mode="clip")
