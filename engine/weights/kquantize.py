"""Quantizers for the 256-value types K and IQ4: the inverse of `kquants`.

They search for the scales with the smallest weighted squared error. The weight of a value grows
with its magnitude. With an importance matrix, it also grows with the importance of its column,
which is the mean square of the activations that the column is multiplied with.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.weights.grouped import Bytes, Floats, halves
from engine.weights.kquants import IQ4_LEVELS

_GROUP = 32
_MAX_SCALE = 63  # scales and minimums are 6-bit multiples of the block's two super-scales


@dataclass(frozen=True, slots=True)
class _Search:
    """How the scale of a group with a minimum is found. The search divides the range of the group
    into a number of quantization steps. It tries all `spacings` and keeps the best. The plain
    choice is `max_level`.
    """

    max_level: int
    spacings: Floats


_FOUR_BITS = _Search(15, np.arange(-1.0, 1.05, 0.1, dtype=np.float32) + np.float32(15))
_FIVE_BITS = _Search(31, np.arange(-0.5, 1.05, 0.1, dtype=np.float32) + np.float32(31))


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


def encode_q4_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """Byte 0: super-scale; 2: super-scale of minimums; 4-15: scales and minimums; 16-143: 4-bit
    values.
    """
    head, levels = _with_minimums(blocks, importance, _FOUR_BITS)
    return np.concatenate((head, _nibble_pairs(levels)), axis=1)


def encode_q5_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """Bytes 0-15 as in Q4_K; 16-47: the fifth bits; 48-175: the low four bits."""
    head, levels = _with_minimums(blocks, importance, _FIVE_BITS)
    fifth = np.zeros((len(blocks), _GROUP), np.uint8)
    for group in range(8):
        fifth |= (levels[:, group] >> np.uint8(4)) << np.uint8(group)
    return np.concatenate((head, fifth, _nibble_pairs(levels & np.uint8(15))), axis=1)


def _nibble_pairs(levels: Bytes) -> Bytes:
    """(n, 8, 32) 4-bit levels -> (n, 128) bytes. Two neighbouring groups share 32 bytes."""
    pairs = levels.reshape(-1, 4, 2, _GROUP)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(-1, 128)


def _with_minimums(
    blocks: Floats, importance: Floats | None, search: _Search
) -> tuple[Bytes, Bytes]:
    """The first 16 bytes of blocks, and the levels of their values (n, 8, 32)."""
    num_blocks = len(blocks)
    groups = blocks.reshape(-1, _GROUP)
    if importance is None:
        weights = np.sqrt(np.mean(groups * groups, axis=1, keepdims=True)) + np.abs(groups)
    else:
        weights = _important(blocks, importance).reshape(-1, _GROUP)
    scale, low = _fit_groups(groups, weights, search)
    scales, scale_factor = _six_bits(scale.reshape(num_blocks, 8))
    mins, min_factor = _six_bits(-low.reshape(num_blocks, 8))
    # Quantize the values again with the stored scales, because these have been rounded.
    stored_scale = (scale_factor.astype(np.float32) * scales).reshape(-1, 1)
    stored_min = (min_factor.astype(np.float32) * mins).reshape(-1, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(stored_scale > 0, (groups + stored_min) / stored_scale, 0)
    levels = _to_levels(wanted, search.max_level).astype(np.uint8).reshape(num_blocks, 8, _GROUP)
    packed = _pack_six_bits(scales, mins)
    head = np.concatenate((scale_factor.view(np.uint8), min_factor.view(np.uint8), packed), axis=1)
    return head, levels


def _important(blocks: Floats, importance: Floats) -> Floats:
    """Weights of values whose columns have an importance, (n, 256)."""
    spread = 2 * np.mean(blocks * blocks, axis=1, keepdims=True)
    weights: Floats = importance * np.sqrt(spread + blocks * blocks)
    return weights


def _fit_groups(x: Floats, weights: Floats, search: _Search) -> tuple[Floats, Floats]:
    """The scale and the value of level 0 for each group of x (n, 32)."""
    sum_w, sum_x = weights.sum(axis=1), (weights * x).sum(axis=1)
    lowest, highest = np.minimum(x.min(axis=1), 0), x.max(axis=1)
    flat = highest <= lowest
    plain = (highest - lowest) / np.float32(search.max_level)
    levels = _spaced(x, lowest, highest, np.float32(search.max_level), search.max_level)
    best = _Fit(plain, lowest, _error(x, levels, plain, lowest, weights))
    for spacing in search.spacings:
        levels = _spaced(x, best.low, highest, spacing, search.max_level)
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


def _spaced(x: Floats, low: Floats, high: Floats, spacing: np.float32, max_level: int) -> Floats:
    """Quantize x to integer levels. The range from low to high is divided into `spacing` steps."""
    span = high - low
    per_unit = np.divide(spacing, np.where(span > 0, span, 1), dtype=np.float32)
    return _to_levels((x - low[:, None]) * per_unit[:, None], max_level)


def _to_levels(scaled: Floats, max_level: int) -> Floats:
    return np.clip(np.rint(scaled), 0, max_level)


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


def encode_q6_k(blocks: Floats, importance: Floats | None) -> Bytes:
    """Bytes 0-127: low four bits; 128-191: high two bits; 192-207: int8 scale per 16 values; 208:
    super-scale.
    """
    x = blocks.reshape(-1, 16)
    weights = x * x if importance is None else importance.reshape(-1, 16)
    steps = -(32 + np.arange(-9, 10, dtype=np.float32) * np.float32(0.1))
    scales = _best_scales(x, weights, steps, _whole_levels).reshape(-1, 16)
    multiples, factor = _signed_multiples(scales, 128)
    stored = (factor.astype(np.float32) * multiples).reshape(-1, 1)
    levels = (_whole_levels(x * _inverse(stored)) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = levels & np.uint8(15), levels >> np.uint8(4)
    nibbles = low[:, :, :2] | (low[:, :, 2:] << np.uint8(4))
    twos = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        (
            nibbles.reshape(-1, 128),
            twos.reshape(-1, 64),
            multiples.astype(np.int8).view(np.uint8),
            factor.view(np.uint8),
        ),
        axis=1,
    )


def encode_iq4_xs(blocks: Floats, importance: Floats | None) -> Bytes:
    """Byte 0: super-scale; 2-3: high 2 bits and 4-7: low 4 bits of eight scales; 8-135: level
    indices.
    """
    scales = _codebook_scales(blocks, importance).reshape(-1, 8)
    multiples, factor = _signed_multiples(scales, 32)
    stored = (factor.astype(np.float32) * multiples).reshape(-1, 1)
    indices = _nearest(blocks.reshape(-1, _GROUP) * _inverse(stored)).astype(np.uint8)
    codes = (multiples + 32).astype(np.uint16)
    high = np.bitwise_or.reduce((codes >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    low = (codes & 15).astype(np.uint8)
    return np.concatenate(
        (
            factor.view(np.uint8),
            high.astype("<u2")[:, None].view(np.uint8),
            low[:, ::2] | (low[:, 1::2] << np.uint8(4)),
            (indices[:, :16] | (indices[:, 16:] << np.uint8(4))).reshape(-1, 128),
        ),
        axis=1,
    )


def encode_iq4_nl(blocks: Floats, importance: Floats | None) -> Bytes:
    """Byte 0: scale; 2-17: level indices."""
    scales = _codebook_scales(blocks, importance).astype("<f2")
    indices = _nearest(blocks * _inverse(scales.astype(np.float32))).astype(np.uint8)
    packed = indices[:, :16] | (indices[:, 16:] << np.uint8(4))
    return np.concatenate((halves(scales), packed), axis=1)


def _codebook_scales(blocks: Floats, importance: Floats | None) -> Floats:
    """The scale of each group of 32, (m, 1)."""
    x = blocks.reshape(-1, _GROUP)
    weights = x * x if importance is None else _important(blocks, importance).reshape(-1, _GROUP)
    steps = IQ4_LEVELS[0] + np.arange(-7, 8, dtype=np.float32)
    return _best_scales(x, weights, steps, lambda scaled: IQ4_LEVELS[_nearest(scaled)])


def _nearest(scaled: Floats) -> NDArray[np.intp]:
    """The index of the nearest level of the codebook."""
    return np.searchsorted((IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2, scaled)


def _whole_levels(scaled: Floats) -> Floats:
    """The nearest of the 64 levels of Q6_K."""
    return np.clip(np.rint(scaled), -32, 31)


def _best_scales(
    x: Floats, weights: Floats, steps: Floats, to_levels: Callable[[Floats], Floats]
) -> Floats:
    """The scale of each group of x (n, values) with the smallest weighted squared error, (n, 1).
    Each of `steps` is tried as the level of the value of largest magnitude.
    """
    farthest = np.abs(x).argmax(axis=1, keepdims=True)
    largest = np.take_along_axis(x, farthest, axis=1)
    best, scale = np.zeros_like(largest), np.zeros_like(largest)
    for step in steps:
        levels = to_levels(x * (step * _inverse(largest)))
        products = (weights * x * levels).sum(axis=1, keepdims=True)
        squares = (weights * levels * levels).sum(axis=1, keepdims=True)
        divisor = np.where(squares > 0, squares, np.float32(1))
        gain = products * products / divisor
        better = gain > best
        best, scale = np.where(better, gain, best), np.where(better, products / divisor, scale)
    return scale


def _signed_multiples(scales: Floats, half: int) -> tuple[Floats, NDArray[np.float16]]:
    """Quantize (n, groups) scales to integers from -half to half - 1, with a float16 super-scale,
    (n, 1). The scale of largest magnitude becomes -half.
    """
    farthest = np.abs(scales).argmax(axis=1, keepdims=True)
    factor = (np.take_along_axis(scales, farthest, axis=1) / np.float32(-half)).astype("<f2")
    multiples = np.rint(scales * _inverse(factor.astype(np.float32)))
    return np.clip(multiples, -half, half - 1), factor


def _inverse(scales: Floats) -> Floats:
    """1 / scale, or 0 for a scale of 0."""
    safe = np.where(scales == 0, np.float32(1), scales)
    inverse: Floats = np.where(scales == 0, np.float32(0), np.float32(1) / safe)
    return inverse
