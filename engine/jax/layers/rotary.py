"""RoPE. The rotation of a query or key depends only on its position and the model's frequencies."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Rotation(NamedTuple):
    """The cosines and sines for the positions of a step's tokens. `dim` is how many values of a
    head RoPE rotates.
    """

    cos: Array  # (T, 1, dim / 2)
    sin: Array  # (T, 1, dim / 2)


def rotation(
    positions: Array, frequencies: tuple[float, ...], scale: float, dtype: jnp.dtype
) -> Rotation:
    """The cosines and sines for `positions`, multiplied by `scale`. `frequencies` are dim / 2
    numbers, in radians per position. `dim` is how many values of a head RoPE rotates.
    """
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.array(frequencies, jnp.float32)
    return Rotation(*((rotation(angles) * scale).astype(dtype) for rotation in (jnp.cos, jnp.sin)))


def rotate(x: Array, rotation: Rotation) -> Array:
    """Applies RoPE: rotates the first `dim` values of each head of x (T, N, H). Value i and value
    i + dim / 2 form a pair that is rotated in its plane.
    """
    half = rotation.cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (
        first * rotation.cos - second * rotation.sin,
        second * rotation.cos + first * rotation.sin,
    )
    return jnp.concatenate((*turned, rest), axis=-1)
