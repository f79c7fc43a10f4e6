"""The precision of matmuls."""

import jax.numpy as jnp
from jax import Array


def precision(dtype: jnp.dtype) -> str:
    """JAX's precision setting for a matmul of this dtype. For float32 it is "highest". With the
    default, GPUs would round float32 inputs to TF32.
    """
    return "highest" if dtype == jnp.float32 else "default"


def einsum(formula: str, a: Array, b: Array) -> Array:
    """As `jnp.einsum`, but accumulates in float32 and returns float32 for inputs of any dtype."""
    exact = precision(a.dtype)
    return jnp.einsum(formula, a, b, precision=exact, preferred_element_type=jnp.float32)
