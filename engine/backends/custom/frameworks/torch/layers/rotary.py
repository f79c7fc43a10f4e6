"""Rotary position embedding with every scaling rule, reduced to one vector of inverse frequencies.

A key in the cache keeps the rotation it was written with, and other sequences may read it, so a
rotation must depend on the position alone. Dynamic NTK scaling, which wants the current length,
therefore takes the longest length that the runner may hold.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.backends.custom.architectures.base import RopeConfig
from engine.core.errors import ModelFormatError

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of a step's tokens, ready to multiply: `sin` carries the sign of either half."""

    cos: Tensor  # (T, 1, 1, dim / 2)
    sin: Tensor  # (T, 1, 2, dim / 2): -sin for the first half, sin for the second


class Rotary:
    """Not a module: its one tensor is computed, never loaded."""

    def __init__(
        self, rope: RopeConfig, max_seq_len: int, device: torch.device, factors: Tensor | None
    ) -> None:
        inv_freq = inverse_frequencies(rope, max_seq_len)
        if rope.kind == "factors":
            if factors is None or factors.shape != inv_freq.shape:
                raise ModelFormatError(
                    f"the model needs a 'rope.factors' weight of {inv_freq.numel()} values"
                )
            inv_freq = inv_freq / factors
        self.scale = attention_factor(rope)
        self.inv_freq = inv_freq.to(device)  # (dim / 2,)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        angles = positions.to(torch.float32)[:, None] * self.inv_freq  # (T, dim / 2)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return Rotation(
            cos.to(dtype)[:, None, None, :], torch.stack((-sin, sin), dim=1).to(dtype)[:, None]
        )


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first `dim` values of each head of x (T, N, H); value i pairs with i + dim / 2."""
    half = rotation.cos.shape[-1]
    if 2 * half < x.shape[-1]:
        turned = rotate(x[..., : 2 * half], rotation)
        return torch.cat((turned, x[..., 2 * half :]), dim=-1)
    halves = x.unflatten(-1, (2, half))  # (T, N, 2, dim / 2)
    turned = torch.addcmul(halves * rotation.cos, halves.flip(2), rotation.sin)
    return turned.flatten(2)


def attention_factor(rope: RopeConfig) -> float:
    """Yarn scales cos and sin to keep attention's entropy; the other rules do not."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, max_seq_len: int) -> Tensor:
    """(dim / 2,) radians per position by the model's rule ("factors" divides them later)."""
    if rope.kind == "linear":
        return _plain(rope.theta, rope.dim) / rope.factor
    if rope.kind == "dynamic":
        return _dynamic(rope, max_seq_len)
    if rope.kind == "llama3":
        return _llama3(rope)
    if rope.kind == "yarn":
        return _yarn(rope)
    return _plain(rope.theta, rope.dim)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim)


def _dynamic(rope: RopeConfig, max_seq_len: int) -> Tensor:
    original = _required(rope.original_max_position, "original_max_position", rope)
    length = max(max_seq_len, original)
    stretch = rope.factor * length / original - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between."""
    original = _required(rope.original_max_position, "original_max_position", rope)
    low = _required(rope.low_freq_factor, "low_freq_factor", rope)
    high = _required(rope.high_freq_factor, "high_freq_factor", rope)
    inv_freq = _plain(rope.theta, rope.dim)
    turns = original * inv_freq / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def _yarn(rope: RopeConfig) -> Tensor:
    """Keep dimensions that turn often within the original context, stretch those that hardly do."""
    original = _required(rope.original_max_position, "original_max_position", rope)
    beta_fast = 32.0 if rope.beta_fast is None else rope.beta_fast
    beta_slow = 1.0 if rope.beta_slow is None else rope.beta_slow

    def dimension_turning(turns: float) -> float:
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_turning(beta_fast)), 0)
    high = min(math.ceil(dimension_turning(beta_slow)), rope.dim - 1)
    ramp = torch.arange(rope.dim // 2, dtype=torch.float32) - low
    interpolate = (ramp / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = _plain(rope.theta, rope.dim)
    return (1 - interpolate) * inv_freq + interpolate * inv_freq / rope.factor


def _required(value: Number | None, name: str, rope: RopeConfig) -> Number:
    if value is None:
        raise ModelFormatError(f"rope scaling '{rope.kind}' needs {name}")
    return value
