"""RoPE. Every scaling rule (linear, YaRN and others) results in one vector of frequencies.

Keys are cached after their rotation, and other sequences may read them. So a rotation must depend
only on the position. Dynamic NTK scaling depends on a length; here this is always the max length
that the runner serves, not the current length of the sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.architectures.base import RopeConfig
from engine.ir.rotary import rope_frequencies


@dataclass(frozen=True, slots=True)
class Rotation:
    """The cosines and sines for the positions of a step's tokens. RoPE rotates the first `dim`
    values of a head. `sin` already has the signs that the two halves of these values need.
    """

    cos: Tensor  # (T, 1, 1, dim / 2)
    sin: Tensor  # (T, 1, 2, dim / 2): -sin for the first half, sin for the second


class Rotary:
    """The RoPE frequencies of a model. This class is no `nn.Module`, because its only tensor is not
    loaded from a checkpoint, but computed.
    """

    def __init__(
        self, rope: RopeConfig, max_seq_len: int, device: torch.device, factors: Tensor | None
    ) -> None:
        given = None if factors is None else factors.numpy()
        inv_freq, self.scale = rope_frequencies(rope, max_seq_len, given)
        self.sections = rope.sections or (len(inv_freq),)
        self.inv_freq = torch.from_numpy(inv_freq).to(device)  # (dim / 2,)

    def table(self, num_positions: int) -> Tensor:
        """A table for all positions, (num_positions, dim) float32. Each line has dim / 2 cosines,
        then dim / 2 sines.
        """
        positions = torch.arange(num_positions, device=self.inv_freq.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scale

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation by the positions (T,), or by three positions of each token (3, T)."""
        angles = positions.to(torch.float32)[..., None] * self.inv_freq  # (..., T, dim / 2)
        if angles.dim() == 3:
            parts = angles.split(self.sections, dim=-1)
            angles = torch.cat([part[index % 3] for index, part in enumerate(parts)], dim=-1)
        return rotation_of(angles.cos() * self.scale, angles.sin() * self.scale, dtype)


def rotation_of(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation with these cosines and sines, (T, dim / 2) each."""
    return Rotation(
        cos.to(dtype)[:, None, None, :], torch.stack((-sin, sin), dim=1).to(dtype)[:, None]
    )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Applies RoPE: rotates the first `dim` values of each head of x (T, N, H). Value i and value
    i + dim / 2 form a pair that is rotated in its plane.
    """
    half = rotation.cos.shape[-1]
    if 2 * half < x.shape[-1]:
        turned = rotate(x[..., : 2 * half], rotation)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)
    halves = x.unflatten(-1, (2, half))  # (T, N, 2, dim / 2)
    turned = torch.addcmul(halves * rotation.cos, halves.flip(2), rotation.sin)
    return turned.flatten(2)
