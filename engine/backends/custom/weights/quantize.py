"""Quantizes values to GGUF storage types: the inverse of `quants`.

A quantizer takes (n, block_elems) floats and returns (n, block_bytes) bytes. Float types round to
nearest. Q4_0, Q5_0 and Q8_0 derive the scale of a block from its value of largest magnitude. Their
results are bit-identical to those of the reference implementation in ggml. Q4_K searches for the
scales with the smallest error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.weights.grouped import Bytes, Floats
from engine.backends.custom.weights.quants import traits_of
from engine.core.errors import ModelFormatError

_GROUP = 32
_MAX_LEVEL = 15
_MAX_SCALE = 63  # scales and minimums are 6-bit multiples of the block's two super-scales
# The scale search divides the range of a group into this many quantization steps. It tries each of
# these numbers and keeps the best. The plain choice is 15.
_SPACINGS = np.arange(-1.0, 1.05, 0.1, dtype=np.float32) + np.float32(_MAX_LEVEL)


@dataclass(slots=True)
class _Fit:
    """The best scale and minimum found so far for each of n groups. All arrays are (n,)."""

    scale: Floats
    low: Floats  # the value of level 0; never above zero
    error: Floats

    def take(self, better: NDArray[np.bool_], scale: Floats, low: Floats, error: Floats) -> None:
        self.scale = np.where(better, scale, self.scale)
        self.low = np.where(better, low, self.low)
        self.error = np.where(better, error, self.error)


def encode_q4_k(blocks: Floats) -> Bytes:
    """Quantize to Q4_K blocks. Bytes 0-1: super-scale of the scales. Bytes 2-3: super-scale of the
    minimums. Bytes 4-15: 6-bit scales and minimums. Bytes 16-143: 4-bit values.
    """
    num_blocks = len(blocks)
    groups = blocks.reshape(-1, _GROUP)
    scale, low = _fit_groups(groups)
    scales, scale_factor = _six_bits(scale.reshape(num_blocks, 8))
    mins, min_factor = _six_bits(-low.reshape(num_blocks, 8))
    # Quantize the values again with the stored scales, because these have been rounded.
    stored_scale = (scale_factor.astype(np.float32) * scales).reshape(-1, 1)
    stored_min = (min_factor.astype(np.float32) * mins).reshape(-1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(stored_scale > 0, (groups + stored_min) / stored_scale, 0)
    levels = _to_levels(wanted).astype(np.uint8).reshape(num_blocks, 4, 2, _GROUP)
    out = np.empty((num_blocks, 144), np.uint8)
    out[:, 0:2] = scale_factor.view(np.uint8)
    out[:, 2:4] = min_factor.view(np.uint8)
    out[:, 4:16] = _pack_six_bits(scales, mins)
    out[:, 16:] = (levels[:, :, 0] | (levels[:, :, 1] << 4)).reshape(num_blocks, 128)
    return out


def _fit_groups(x: Floats) -> tuple[Floats, Floats]:
    """The scale and the value of level 0 for each group of x (n, 32)."""
    weights = np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.abs(x)
    sum_w, sum_x = weights.sum(axis=1), (weights * x).sum(axis=1)
    lowest, highest = np.minimum(x.min(axis=1), 0), x.max(axis=1)
    flat = highest <= lowest
    plain = (highest - lowest) / _MAX_LEVEL
    levels = _spaced(x, lowest, highest, np.float32(_MAX_LEVEL))
    best = _Fit(plain, lowest, _error(x, levels, plain, lowest, weights))
    for spacing in _SPACINGS:
        levels = _spaced(x, best.low, highest, spacing)
        weighted = weights * levels
        sum_l, sum_ll = weighted.sum(axis=1), np.einsum("gi,gi->g", weighted, levels)
        sum_xl = np.einsum("gi,gi->g", weighted, x)
        determinant = sum_w * sum_ll - sum_l * sum_l
        solvable = determinant > 0
        divisor = np.where(solvable, determinant, np.float32(1))
        scale = (sum_w * sum_xl - sum_x * sum_l) / divisor
        low = (sum_ll * sum_x - sum_l * sum_xl) / divisor
        # The format can only subtract a minimum. If the best fit of a group has a positive `low`,
        # fit a scale without a minimum.
        only_scale = sum_xl / np.where(sum_ll > 0, sum_ll, np.float32(1))
        scale = np.where(low > 0, only_scale, scale)
        low = np.minimum(low, 0)
        error = _error(x, levels, scale, low, weights)
        best.take(solvable & (error < best.error), scale, low, error)
    return np.where(flat, np.float32(0), best.scale), np.where(flat, lowest, best.low)


def _spaced(x: Floats, low: Floats, high: Floats, spacing: np.float32) -> Floats:
    """Quantize x to integer levels. The range from low to high is divided into `spacing` steps."""
    span = high - low
    per_unit = np.divide(spacing, np.where(span > 0, span, 1), dtype=np.float32)
    return _to_levels((x - low[:, None]) * per_unit[:, None])


def _to_levels(scaled: Floats) -> Floats:
    return np.clip(np.rint(scaled), 0, _MAX_LEVEL)


def _error(x: Floats, levels: Floats, scale: Floats, low: Floats, weights: Floats) -> Floats:
    off = levels * scale[:, None]
    off += low[:, None]
    off -= x
    error: Floats = np.einsum("gi,gi,gi->g", off, off, weights)
    return error


def _six_bits(values: Floats) -> tuple[Bytes, NDArray[np.float16]]:
    """Quantize (n, 8) non-negative floats to 6 bits. Also returns the float16 super-scale of each
    block, (n, 1).
    """
    highest = values.max(axis=1, keepdims=True)
    inverse = _MAX_SCALE / np.where(highest > 0, highest, np.float32(1))
    multiples = np.clip(np.rint(values * inverse), 0, _MAX_SCALE).astype(np.uint8)
    factor = np.maximum(highest, 0) / np.float32(_MAX_SCALE)
    return multiples, factor.astype("<f2")


def _pack_six_bits(scales: Bytes, mins: Bytes) -> Bytes:
    """Pack 6-bit scales and minimums into the 12 bytes that `kquants._six_bit_pairs` unpacks. The
    high 2 bits of the last four scales and minimums are in the top bits of bytes 0-7.
    """
    packed = np.empty((len(scales), 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    packed[:, 4:8] = mins[:, :4] | ((mins[:, 4:] >> 4) << 6)
    packed[:, 8:12] = (scales[:, 4:] & 0x0F) | ((mins[:, 4:] & 0x0F) << 4)
    return packed


# This many values are quantized at a time, so that temporary arrays fit the L2 cache.
_CHUNK_VALUES = 64 * 1024
_HALF_MAX = np.float32(65504)


def quantize(name: str, values: Floats) -> Bytes:
    """Quantize a tensor, or some of its rows, to the type `name`. Returns flat bytes. The length of
    a row must be a multiple of the block size.
    """
    encoder = ENCODERS.get(name)
    if encoder is None:
        raise ModelFormatError(
            f"nothing is written as {name} (types that are: {', '.join(ENCODERS)})"
        )
    traits = traits_of(name)
    if values.shape[-1] % traits.block_elems and traits.quantized:
        raise ModelFormatError(
            f"rows of {values.shape[-1]} values are not whole {name} blocks of {traits.block_elems}"
        )
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, traits.block_elems)
    out = np.empty((len(blocks), traits.block_bytes), np.uint8)
    step = max(1, _CHUNK_VALUES // traits.block_elems)
    for start in range(0, len(blocks), step):
        out[start : start + step] = encoder(blocks[start : start + step])
    return out.reshape(-1)


def fits_rows(name: str, num_columns: int) -> bool:
    return num_columns % traits_of(name).block_elems == 0


def _f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def _f16(blocks: Floats) -> Bytes:
    """Convert to float16. Raises if a value overflows, because an infinite weight would break the
    model.
    """
    if np.abs(blocks).max(initial=0) > _HALF_MAX:
        raise ModelFormatError(
            "the model holds values beyond float16's 65,504; convert it to BF16 or F32 instead"
        )
    return blocks.astype("<f2").view(np.uint8)


def _bf16(blocks: Floats) -> Bytes:
    """Convert to bfloat16, rounding to nearest even."""
    bits = blocks.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").view(np.uint8)


def _halves(scales: Floats) -> Bytes:
    """Convert (n, 1) floats to float16, as (n, 2) bytes."""
    return scales.astype("<f2").view(np.uint8)


def _inverse(scales: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _levels(blocks: Floats, half: int) -> tuple[Floats, Bytes]:
    """Returns the scale of each block, and the values as levels 0 .. 2 * half - 1. Level `half` is
    the value zero.

    The value of largest magnitude always becomes level 0, because the scale has the opposite sign.
    There are `half` levels below zero but only `half` - 1 above it, so this gives a finer scale.
    """
    farthest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scales = np.take_along_axis(blocks, farthest, axis=1) / np.float32(-half)
    levels = blocks * _inverse(scales) + np.float32(half + 0.5)
    return scales, np.clip(levels.astype(np.int32), 0, 2 * half - 1).astype(np.uint8)


def _nibbles(levels: Bytes) -> Bytes:
    """Pack 32 levels into 16 bytes. The first 16 levels are in the low nibbles, the last 16 in the
    high nibbles.
    """
    fours = levels & np.uint8(0x0F)
    return fours[:, :16] | (fours[:, 16:] << np.uint8(4))


def _q4_0(blocks: Floats) -> Bytes:
    scales, levels = _levels(blocks, 8)
    return np.concatenate((_halves(scales), _nibbles(levels)), axis=1)


def _q5_0(blocks: Floats) -> Bytes:
    scales, levels = _levels(blocks, 16)
    fifth = np.packbits(levels >> 4, axis=1, bitorder="little")
    return np.concatenate((_halves(scales), fifth, _nibbles(levels)), axis=1)


def _q8_0(blocks: Floats) -> Bytes:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scales)
    # Values halfway between two integers are rounded away from zero, as in the reference
    # implementation. `np.rint` would round them to even.
    whole = np.floor(np.abs(scaled))
    rounded = np.copysign(whole + (np.abs(scaled) - whole >= 0.5), scaled)
    return np.concatenate((_halves(scales), rounded.astype(np.int8).view(np.uint8)), axis=1)


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q4_K": encode_q4_k,
}
