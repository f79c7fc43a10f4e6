"""Dequantizes the 256-value "K" block types and the two IQ4 types, which have a fixed codebook.

A K block has one or two float16 super-scales, the quantized values, and a small integer scale for
each group of 16 or 32 values. In some types, each group also has a minimum. The low and the high
bits of the values may be stored separately. The docstring of each function gives the byte layout of
a block.
"""

import numpy as np
from numpy.typing import NDArray

from engine.weights.grouped import Bytes, Floats, half, plane

# The codebook of the IQ4 types. Its levels are closer to each other around zero.
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minimums from the 12 bytes of Q4_K and Q5_K.

    The first four scales are the low 6 bits of bytes 0-3. The first four minimums are the low 6
    bits of bytes 4-7. Of the last four scales, the low 4 bits are the low nibbles of bytes 8-11,
    and the high 2 bits are the top bits of bytes 0-3. Of the last four minimums, the low 4 bits are
    the high nibbles of bytes 8-11, and the high 2 bits are the top bits of bytes 4-7.
    """
    first_scales, first_mins, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.empty((len(packed), 8), np.float32)
    mins = np.empty((len(packed), 8), np.float32)
    scales[:, :4] = first_scales & 0x3F
    scales[:, 4:] = (rest & 0x0F) | ((first_scales >> 6) << 4)
    mins[:, :4] = first_mins & 0x3F
    mins[:, 4:] = (rest >> 4) | ((first_mins >> 6) << 4)
    return scales, mins


def _scaled(values: NDArray[np.generic], scales: Floats, out: Floats) -> Floats:
    """Multiply each group of values by its scale and write the result to `out`. Returns a view of
    `out`, reshaped to groups.
    """
    groups = out.reshape(len(out), scales.shape[1], -1)
    np.multiply(values.reshape(groups.shape), scales[:, :, None], out=groups)
    return groups


def decode_q2_k(blocks: Bytes, out: Floats) -> None:
    """Dequantize Q2_K blocks. Bytes 0-15: one byte per 16 values, with the scale in the low and the
    minimum in the high nibble. Bytes 16-79: 2-bit values. Bytes 80-81: super-scale of the scales.
    Bytes 82-83: super-scale of the minimums.
    """
    packed = blocks[:, 0:16]
    groups = _scaled(plane(blocks[:, 16:80], 32, 2), half(blocks, 80) * (packed & 0x0F), out)
    groups -= (half(blocks, 82) * (packed >> 4))[:, :, None]


def decode_q3_k(blocks: Bytes, out: Floats) -> None:
    """Dequantize Q3_K blocks. Bytes 0-31: the third bit of each value. Bytes 32-95: the low two
    bits of each value. Bytes 96-107: sixteen 6-bit scales. Bytes 108-109: super-scale.

    4 is subtracted from each 3-bit value. Bytes 96-103 have the low 4 bits of the scales, and bytes
    104-107 have their high 2 bits.
    """
    low = plane(blocks[:, 96:104], 8, 4).reshape(-1, 16)
    high = plane(blocks[:, 104:108], 4, 2).reshape(-1, 16)
    scales = half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    values = plane(blocks[:, 32:96], 32, 2).reshape(-1, 256).astype(np.int8)
    values += (plane(blocks[:, 0:32], 32, 1).reshape(-1, 256) << 2).astype(np.int8)
    values -= 4
    _scaled(values, scales, out)


def decode_q4_k(blocks: Bytes, out: Floats) -> None:
    """Dequantize Q4_K blocks. Bytes 0-1: super-scale of the scales. Bytes 2-3: super-scale of the
    minimums. Bytes 4-15: 6-bit scales and minimums. Bytes 16-143: 4-bit values.
    """
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    groups = _scaled(plane(blocks[:, 16:144], 32, 4), half(blocks, 0) * scales, out)
    groups -= (half(blocks, 2) * mins)[:, :, None]


def decode_q5_k(blocks: Bytes, out: Floats) -> None:
    """Dequantize Q5_K blocks. Bytes 0-15 are as in Q4_K. Bytes 16-47: the fifth bit of each value.
    Bytes 48-175: the low four bits of each value.
    """
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    values = plane(blocks[:, 48:176], 32, 4).reshape(-1, 256)
    values |= plane(blocks[:, 16:48], 32, 1).reshape(-1, 256) << 4
    groups = _scaled(values, half(blocks, 0) * scales, out)
    groups -= (half(blocks, 2) * mins)[:, :, None]


def decode_q6_k(blocks: Bytes, out: Floats) -> None:
    """Dequantize Q6_K blocks. Bytes 0-127: the low four bits of each value. Bytes 128-191: the high
    two bits. Bytes 192-207: an int8 scale for each 16 values. Bytes 208-209: super-scale.
    """
    values = plane(blocks[:, 0:128], 64, 4).reshape(-1, 256)
    values |= plane(blocks[:, 128:192], 32, 2).reshape(-1, 256) << 4
    scales = half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scaled(values.astype(np.int8) - np.int8(32), scales, out)


def decode_iq4_nl(blocks: Bytes, out: Floats) -> None:
    """Dequantize IQ4_NL blocks. Bytes 0-1: scale. Bytes 2-17: 4-bit codebook indices. The low
    nibbles belong to values 0-15, the high nibbles to values 16-31.
    """
    levels = IQ4_LEVELS[plane(blocks[:, 2:18], 16, 4)]
    np.multiply(levels.reshape(out.shape), half(blocks, 0), out=out)


def decode_iq4_xs(blocks: Bytes, out: Floats) -> None:
    """Dequantize IQ4_XS blocks. Bytes 0-1: super-scale. Bytes 2-3: the high 2 bits of eight scales.
    Bytes 4-7: the low 4 bits of these scales. Bytes 8-135: 4-bit codebook indices.
    """
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 0x0F
    pairs = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    high = (pairs & 3).astype(np.uint8)
    scales = half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    _scaled(IQ4_LEVELS[plane(blocks[:, 8:136], 16, 4)], scales, out)
