"""Computes RoPE tables: the cosines and sines for every position. The frequencies follow the
model's scaling rule.
"""

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import RopeConfig
from engine.architectures.rope import YARN_BETA_FAST, YARN_BETA_SLOW
from engine.core.errors import ModelFormatError
from engine.ir.reference import F32

Number = TypeVar("Number", int, float)


def rotary_tables(
    rope: RopeConfig, max_seq_len: int, factors: F32 | None = None
) -> tuple[F32, F32]:
    """The cosines and the sines of all positions, (max_seq_len, dim / 2) each.

    `factors` is the weight "rope.factors", if the model has this weight.
    """
    frequencies, scale = rope_frequencies(rope, max_seq_len, factors)
    angles = np.arange(max_seq_len, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)


def rope_frequencies(
    rope: RopeConfig, max_seq_len: int, factors: F32 | None = None
) -> tuple[F32, float]:
    """The RoPE frequencies, (dim / 2,) in radians per position, and the factor by which cosines and
    sines are multiplied.
    """
    frequencies = inverse_frequencies(rope, max_seq_len)
    if rope.kind == "factors":
        if factors is None or factors.shape != frequencies.shape:
            raise ModelFormatError(
                f"the model needs a 'rope.factors' weight of {frequencies.size} values"
            )
        frequencies = frequencies / factors
    return frequencies, attention_factor(rope)


def attention_factor(rope: RopeConfig) -> float:
    """The factor by which cosines and sines are multiplied. YaRN and LongRoPE use it to preserve
    the entropy of attention. For other scaling rules, the factor is 1.
    """
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def inverse_frequencies(rope: RopeConfig, max_seq_len: int) -> F32:
    """The RoPE frequencies according to the scaling rule, (dim / 2,) in radians per position. For
    the rule "factors", the caller still has to divide the frequencies by the factors.
    """
    match rope.kind:
        case "linear":
            return _plain(rope.theta, rope.dim) / np.float32(rope.factor)
        case "dynamic":
            return _dynamic(rope, max_seq_len)
        case "llama3":
            return _llama3(rope)
        case "yarn":
            return _yarn(rope)
        case "longrope":
            original = _required(rope.original_max_position, "original_max_position", rope)
            factors = rope.long_factors if max_seq_len > original else rope.short_factors
            divisors: F32 = np.array(factors, np.float32)
            return _plain(rope.theta, rope.dim) / divisors
        case "default" | "factors":
            return _plain(rope.theta, rope.dim)


def _plain(theta: float, dim: int) -> F32:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.float32(theta) ** exponents


def _dynamic(rope: RopeConfig, max_seq_len: int) -> F32:
    original = _required(rope.original_max_position, "original_max_position", rope)
    length = max(max_seq_len, original)
    stretch = rope.factor * length / original - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeConfig) -> F32:
    """Llama 3's rule. It keeps frequencies of short wavelengths and divides frequencies of long
    wavelengths by the factor. In between, it interpolates.
    """
    original = _required(rope.original_max_position, "original_max_position", rope)
    low = _required(rope.low_freq_factor, "low_freq_factor", rope)
    high = _required(rope.high_freq_factor, "high_freq_factor", rope)
    frequencies = _plain(rope.theta, rope.dim)
    rotations = original * frequencies / (2 * math.pi)  # within the original context length
    keep = np.clip((rotations - low) / (high - low), 0, 1)
    return _blend(frequencies, keep, rope.factor)


def _yarn(rope: RopeConfig) -> F32:
    """YaRN's rule. It keeps frequencies with many rotations within the original context length, and
    divides frequencies with few rotations by the factor. In between, it interpolates.
    """
    original = _required(rope.original_max_position, "original_max_position", rope)
    beta_fast = YARN_BETA_FAST if rope.beta_fast is None else rope.beta_fast
    beta_slow = YARN_BETA_SLOW if rope.beta_slow is None else rope.beta_slow

    def dimension_rotating(rotations: float) -> float:
        return (
            rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension_rotating(beta_fast), dimension_rotating(beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.arange(rope.dim // 2, dtype=np.float32) - low
    stretched = np.clip(ramp / max(high - low, 0.001), 0, 1)
    return _blend(_plain(rope.theta, rope.dim), 1 - stretched, rope.factor)


def _blend(frequencies: F32, keep: NDArray[Any], factor: float) -> F32:
    blended: NDArray[Any] = keep * frequencies + (1 - keep) * frequencies / factor
    return blended.astype(np.float32)


def _required(value: Number | None, name: str, rope: RopeConfig) -> Number:
    if value is None:
        raise ModelFormatError(f"rope scaling '{rope.kind}' needs {name}")
    return value
