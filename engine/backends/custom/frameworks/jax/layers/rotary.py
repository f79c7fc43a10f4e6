"""RoPE: angles depend only on the position, by the model's scaling rule."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Rotation(NamedTuple):
    """Cosines and sines of a step's tokens."""

    cos: Array  # (T, 1, dim / 2)
    sin: Array  # (T, 1, dim / 2)


def rotation(
    positions: Array, frequencies: tuple[float, ...], scale: float, dtype: jnp.dtype
) -> Rotation:
    """`frequencies` are radians per position, for half of the rotated dimensions."""
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.array(frequencies, jnp.float32)
    return Rotation(*((rotation(angles) * scale).astype(dtype) for rotation in (jnp.cos, jnp.sin)))


def rotate(x: Array, rotation: Rotation) -> Array:
    """Rotates the first `dim` values of each head of x (T, N, H), i together with i + dim / 2."""
    half = rotation.cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (
        first * rotation.cos - second * rotation.sin,
        second * rotation.cos + first * rotation.sin,
    )
    return jnp.concatenate((*turned, rest), axis=-1)
