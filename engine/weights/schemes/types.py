"""Storage types of quantized safetensors checkpoints.

Such checkpoints store values, scales and zero points as separate tensors. `gather` gathers them
into blocks of 32 values of one row. Each block starts with a float32 scale. So row ranges work as
in GGUF, and dequantizing is exact.
"""

import numpy as np
from numpy.typing import NDArray

from engine.weights.grouped import (
    FP4_LEVELS,
    Bytes,
    Floats,
    QuantizedGroups,
    halves,
    plane,
)

BLOCK = 32
# The levels of bitsandbytes' 4-bit types, as parts of the largest magnitude of a block.
NF4_LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_BNB_FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
BNB_FP4_LEVELS: Floats = np.concatenate((_BNB_FP4, -_BNB_FP4))
_LARGEST = 127
# With this multiple, all levels of bitsandbytes' FP4 but the smallest are integers.
_BNB_FP4_STEPS = 120


def _float_at(blocks: Bytes, offset: int = 0) -> Floats:
    """The float32 number at byte `offset` of every block, (n, 1)."""
    return np.ascontiguousarray(blocks[:, offset : offset + 4]).view("<f4")


def _fp8_numbers(exponent_bits: int, is_finite: bool) -> Floats:
    """The value of each 8-bit code. `is_finite` types use the highest exponent for numbers, and
    only the code with all bits set for NaN.
    """
    mantissa_bits = 7 - exponent_bits
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = np.where(exponent == 0, 0, 1 << mantissa_bits) + mantissa
    numbers = np.ldexp(
        fraction.astype(np.float32), np.maximum(exponent, 1) - bias - mantissa_bits
    ).astype(np.float32)
    if is_finite:
        numbers[127] = np.nan
    else:
        highest = exponent == (1 << exponent_bits) - 1
        numbers[highest] = np.where(mantissa[highest] == 0, np.inf, np.nan)
    return np.concatenate((numbers, -numbers))


E4M3_NUMBERS = _fp8_numbers(4, is_finite=True)
_E5M2_NUMBERS = _fp8_numbers(5, is_finite=False)


def decode_e4m3(blocks: Bytes, out: Floats) -> None:
    """Byte 0: scale; 4-35: FP8 values with 4 bits of exponent."""
    np.multiply(E4M3_NUMBERS[blocks[:, 4:]], _float_at(blocks), out=out)


def decode_e5m2(blocks: Bytes, out: Floats) -> None:
    """Byte 0: scale; 4-35: FP8 values with 5 bits of exponent."""
    np.multiply(_E5M2_NUMBERS[blocks[:, 4:]], _float_at(blocks), out=out)


def decode_floats(blocks: Bytes, out: Floats) -> None:
    """32 float32 values, whose columns have scales of their own."""
    out[:] = np.ascontiguousarray(blocks).view("<f4")


def _rounded_to_q8_0(values: Floats) -> Bytes:
    """Q8_0 blocks. The values are divided by the scale as stored, which is rounded to float16."""
    scales = (np.abs(values).max(axis=1, keepdims=True) / np.float32(_LARGEST)).astype("<f2")
    divisor = np.where(scales == 0, np.float32(1), scales.astype(np.float32))
    levels = np.clip(np.rint(values / divisor), -_LARGEST, _LARGEST).astype(np.int8)
    return np.concatenate((scales.view(np.uint8), levels.view(np.uint8)), axis=1)


def e4m3_as_q8_0(blocks: Bytes) -> Bytes:
    return _rounded_to_q8_0(E4M3_NUMBERS[blocks[:, 4:]] * _float_at(blocks))


def e5m2_as_q8_0(blocks: Bytes) -> Bytes:
    return _rounded_to_q8_0(_E5M2_NUMBERS[blocks[:, 4:]] * _float_at(blocks))


def floats_as_q8_0(blocks: Bytes) -> Bytes:
    return _rounded_to_q8_0(np.ascontiguousarray(blocks).view("<f4"))


def unpack_int8(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: scale; 4-35: int8 values."""
    return QuantizedGroups(blocks[:, 4:].view(np.int8)[:, None], _float_at(blocks))


def unpack_int4(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: scale; 4: zero point; 5-20: 4-bit values, the low nibbles first."""
    values = plane(blocks[:, 5:], 16, 4).reshape(len(blocks), BLOCK).view(np.int8)
    return QuantizedGroups((values - blocks[:, 4:5].view(np.int8))[:, None], _float_at(blocks))


def int4_as_q4_1(blocks: Bytes) -> Bytes:
    """The minimum is minus the zero point times the scale."""
    scales = _float_at(blocks)
    minima = -scales * blocks[:, 4:5]
    return np.concatenate((halves(scales), halves(minima), blocks[:, 5:]), axis=1)


def unpack_fp4_g16(blocks: Bytes) -> QuantizedGroups:
    """Bytes 0-7: two scales; 8-23: FP4 values, the low nibbles first."""
    values = FP4_LEVELS[plane(blocks[:, 8:], 16, 4)].reshape(len(blocks), 2, 16)
    scales = np.concatenate((_float_at(blocks), _float_at(blocks, 4)), axis=1)
    return QuantizedGroups(values, scales / np.float32(2))


def decode_nf4(blocks: Bytes, out: Floats) -> None:
    """Byte 0: the largest magnitude; 4-19: indices of levels, the low nibbles first."""
    _decode_levels(NF4_LEVELS, blocks, out)


def decode_bnb_fp4(blocks: Bytes, out: Floats) -> None:
    """As NF4, with other levels."""
    _decode_levels(BNB_FP4_LEVELS, blocks, out)


def _decode_levels(levels: Floats, blocks: Bytes, out: Floats) -> None:
    indices = plane(blocks[:, 4:], 16, 4).reshape(out.shape)
    np.multiply(levels[indices], _float_at(blocks), out=out)


def unpack_rounded_nf4(blocks: Bytes) -> QuantizedGroups:
    return _rounded_levels(NF4_LEVELS, _LARGEST, blocks)


def unpack_rounded_bnb_fp4(blocks: Bytes) -> QuantizedGroups:
    return _rounded_levels(BNB_FP4_LEVELS, _BNB_FP4_STEPS, blocks)


def _rounded_levels(levels: Floats, steps: int, blocks: Bytes) -> QuantizedGroups:
    """The levels, rounded to multiples of 1 / steps."""
    whole: NDArray[np.int8] = np.rint(levels * steps).astype(np.int8)
    values = whole[plane(blocks[:, 4:], 16, 4)].reshape(len(blocks), 1, BLOCK)
    return QuantizedGroups(values, _float_at(blocks) / np.float32(steps))
