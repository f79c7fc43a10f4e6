"""Storage types whose values are small integers times the scale of their group.

Unpackers return a block's integers and scales. From these, `quants` computes the weights,
or types without kernels of their own are written as types that have kernels. This file unpacks
the ternary, one-bit and FP4 types. `iquants` unpacks the IQ types.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# FP4 (E2M1) numbers, doubled so that they are integers. The scales are halved in return.
FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_GROUP = 32  # values that share a scale, or a pair of scales, in the types that kernels read
_PLANES = {bits: np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1) for bits in (1, 2, 4)}


@dataclass(frozen=True, slots=True)
class QuantizedGroups:
    """n unpacked blocks. A weight is value * scale."""

    values: NDArray[np.int8]  # (n, groups, values per group)
    scales: Floats  # (n, groups)


@dataclass(frozen=True, slots=True)
class Recoding:
    """Writes blocks of a type without kernels as blocks of the type `to`. Scales and minimums are
    rounded to float16.
    """

    to: str
    convert: Callable[[Bytes], Bytes]


def as_8_bit(unpack: Callable[[Bytes], QuantizedGroups], blocks: Bytes) -> Bytes:
    """Blocks of 32 int8 values after one or two scales. The values are exact."""
    groups = unpack(blocks)
    values = groups.values.reshape(-1, _GROUP)
    return np.concatenate((halves(_scales_of(values, groups)), values.view(np.uint8)), axis=1)


def as_4_bit(
    unpack: Callable[[Bytes], QuantizedGroups], lowest: int, step: int, blocks: Bytes
) -> Bytes:
    """Blocks of 32 4-bit values after their scales and minimums. All values of the type must be
    `lowest` plus 0 to 15 times `step`.
    """
    groups = unpack(blocks)
    values = groups.values.reshape(-1, _GROUP)
    scales = _scales_of(values, groups)
    levels = ((values - np.int8(lowest)) // np.int8(step)).view(np.uint8)
    packed = levels[:, :16] | (levels[:, 16:] << np.uint8(4))
    parts = (halves(scales * np.float32(step)), halves(scales * np.float32(lowest)), packed)
    return np.concatenate(parts, axis=1)


def _scales_of(values: NDArray[np.int8], groups: QuantizedGroups) -> Floats:
    """The scales of each block of 32 values: (m, 1), or (m, 2) for groups of 16."""
    scales = groups.scales
    if groups.values.shape[2] > _GROUP:
        scales = np.repeat(scales, groups.values.shape[2] // _GROUP, axis=1)
    return scales.reshape(len(values), -1)


def decode_groups(unpack: Callable[[Bytes], QuantizedGroups], blocks: Bytes, out: Floats) -> None:
    groups = unpack(blocks)
    np.multiply(groups.values, groups.scales[:, :, None], out=out.reshape(groups.values.shape))


def half(blocks: Bytes, offset: int) -> Floats:
    """The float16 number at byte `offset` of every block, converted to float32, (n, 1)."""
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def halves(scales: Floats) -> Bytes:
    """(n, s) floats as the bytes of float16 numbers, (n, 2 s)."""
    return np.ascontiguousarray(scales.astype("<f2")).view(np.uint8)


def plane(packed: Bytes, width: int, bits: int) -> Bytes:
    """Unpack runs of `width` bytes, each holding 8 / bits values per byte, lowest bits first.

    (n, runs * width) bytes -> (n, runs, 8 / bits, width) values. Within a run, the lowest bits of
    all bytes come first, then the next higher ones.
    """
    runs = packed.reshape(len(packed), -1, 1, width)
    return (runs >> _PLANES[bits]) & np.uint8((1 << bits) - 1)


def unpack_tq1_0(blocks: Bytes) -> QuantizedGroups:
    """Bytes 0-47: five ternary digits per byte; 48-51: four digits per byte; 52: scale.

    A byte is its digits as a fraction of 256, so multiplying by 3 moves the next digit above bit 7.
    """
    parts = []
    for start, width, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        powers = 3 ** np.arange(digits, dtype=np.uint8).reshape(-1, 1)
        shifted = blocks[:, start : start + width].reshape(-1, 1, width) * powers
        parts.append(((shifted.astype(np.uint16) * 3) >> 8).reshape(len(blocks), -1))
    values = np.concatenate(parts, axis=1).astype(np.int8) - np.int8(1)
    return QuantizedGroups(values[:, None], half(blocks, 52))


def unpack_tq2_0(blocks: Bytes) -> QuantizedGroups:
    """Bytes 0-63: 2-bit values with an offset of 1; 64: scale."""
    values = plane(blocks[:, :64], 32, 2).view(np.int8) - np.int8(1)
    return QuantizedGroups(values.reshape(len(blocks), 1, -1), half(blocks, 64))


def unpack_q1_0(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: scale; 2-17: one bit per value, which is 1 if the value is positive."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, 2:]), axis=1, bitorder="little")
    values = (bits << np.uint8(1)).view(np.int8) - np.int8(1)
    return QuantizedGroups(values[:, None], half(blocks, 0))


def unpack_mxfp4(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: exponent of the scale, with an offset of 127; 1-16: FP4 values, the low nibbles
    first.
    """
    values = FP4_LEVELS[plane(blocks[:, 1:], 16, 4)].reshape(len(blocks), 1, -1)
    return QuantizedGroups(values, np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128))


def unpack_nvfp4(blocks: Bytes) -> QuantizedGroups:
    """Bytes 0-3: a scale of 8 bits per 16 values, with 4 bits of exponent and 3 of mantissa; 4-35:
    FP4 values. In each run of 8 bytes, the low nibbles come first.
    """
    values = FP4_LEVELS[plane(blocks[:, 4:], 8, 4)].reshape(len(blocks), 4, 16)
    return QuantizedGroups(values, _NVFP4_SCALES[blocks[:, :4]])


def _nvfp4_scales() -> Floats:
    """The value of each byte, halved. The sign bit is ignored. 127, which is NaN, counts as 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    numbers = np.where(
        exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10)
    )
    numbers[127] = 0
    return (numbers / 2).astype(np.float32)


_NVFP4_SCALES = _nvfp4_scales()
