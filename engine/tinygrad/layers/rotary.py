"""RoPE. The host looks up the cosines and sines for a step's positions and copies them to the
device.
"""

from typing import NamedTuple

from tinygrad import Tensor


class Rotation(NamedTuple):
    """The cosines and sines for the positions of a step's tokens. `dim` is how many values of a
    head RoPE rotates.
    """

    cos: Tensor  # (T, dim / 2) float32
    sin: Tensor  # (T, dim / 2) float32


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Applies RoPE: rotates the first `dim` values of each head of x (T, N, H). Value i and value
    i + dim / 2 form a pair that is rotated in its plane.
    """
    cos, sin = (table.cast(x.dtype).unsqueeze(1) for table in rotation)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (first * cos - second * sin).cat(second * cos + first * sin, dim=-1)
    return turned.cat(rest, dim=-1) if rest.shape[-1] else turned
