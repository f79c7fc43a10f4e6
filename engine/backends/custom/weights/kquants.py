"""Dequantizes the 256-value "K" block types and the two IQ4 types, which have a fixed codebook.

A K block has one or two float16 super-scales, a small integer scale for each group of 16 or 32
values (in some types also a minimum), and the quantized values. The low and the high bits of a
value may be stored in separate planes. The docstrings give the byte ranges of a block.
"""

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# The codebook of the IQ4 types. Its levels are denser around zero.
IQ4_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _half(blocks: Bytes, offset: int) -> Floats:
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def _plane(packed: Bytes, width: int, bits: int) -> Bytes:
    """Unpack runs of `width` bytes, each holding 8 / bits values per byte, lowest bits first.

    (n, runs * width) bytes -> (n, runs, 8 / bits, width) values. Within a run, the lowest bits of
    all bytes come first, then the next higher ones.
    """
    runs = packed.reshape(len(packed), -1, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return (runs >> shifts) & np.uint8((1 << bits) - 1)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minimums from the 12 bytes of Q4_K and Q5_K.

    The low 6 bits of bytes 0-3 are the first four scales, those of bytes 4-7 the first four
    minimums. The last four scales and minimums have their low 4 bits in bytes 8-11. Their high 2
    bits are the top bits of bytes 0-3 (scales) and 4-7 (minimums).
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
    """Bytes 0-15: one per 16 values, with the scale in the low and the minimum in the high nibble;
    16-79: 2-bit values; 80: super-scale of the scales; 82: super-scale of the minimums.
    """
    packed = blocks[:, 0:16]
    groups = _scaled(_plane(blocks[:, 16:80], 32, 2), _half(blocks, 80) * (packed & 0x0F), out)
    groups -= (_half(blocks, 82) * (packed >> 4))[:, :, None]


def decode_q3_k(blocks: Bytes, out: Floats) -> None:
    """Bytes 0-31: the third bit of each value; 32-95: the low two bits; 96-107: sixteen 6-bit
    scales; 108: super-scale.

    If the third bit is 0, 4 is subtracted from the value. The low 4 bits of the scales are in the
    first 8 of their bytes, the high 2 bits in the last 4.
    """
    low = _plane(blocks[:, 96:104], 8, 4).reshape(-1, 16)
    high = _plane(blocks[:, 104:108], 4, 2).reshape(-1, 16)
    scales = _half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    values = _plane(blocks[:, 32:96], 32, 2).reshape(-1, 256).astype(np.int8)
    values += (_plane(blocks[:, 0:32], 32, 1).reshape(-1, 256) << 2).astype(np.int8)
    values -= 4
    _scaled(values, scales, out)


def decode_q4_k(blocks: Bytes, out: Floats) -> None:
    """Byte 0: super-scale of the scales; 2: super-scale of the minimums; 4-15: 6-bit scales and
    minimums; 16-143: 4-bit values.
    """
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    groups = _scaled(_plane(blocks[:, 16:144], 32, 4), _half(blocks, 0) * scales, out)
    groups -= (_half(blocks, 2) * mins)[:, :, None]


def decode_q5_k(blocks: Bytes, out: Floats) -> None:
    """Bytes 0-15 are as in Q4_K. Bytes 16-47: the fifth bits; 48-175: the low four bits."""
    scales, mins = _six_bit_pairs(blocks[:, 4:16])
    values = _plane(blocks[:, 48:176], 32, 4).reshape(-1, 256)
    values |= _plane(blocks[:, 16:48], 32, 1).reshape(-1, 256) << 4
    groups = _scaled(values, _half(blocks, 0) * scales, out)
    groups -= (_half(blocks, 2) * mins)[:, :, None]


def decode_q6_k(blocks: Bytes, out: Floats) -> None:
    """Bytes 0-127: low four bits; 128-191: high two bits; 192-207: int8 scale per 16 values; 208:
    super-scale.
    """
    values = _plane(blocks[:, 0:128], 64, 4).reshape(-1, 256)
    values |= _plane(blocks[:, 128:192], 32, 2).reshape(-1, 256) << 4
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scaled(values.astype(np.int8) - np.int8(32), scales, out)


def decode_iq4_nl(blocks: Bytes, out: Floats) -> None:
    """Byte 0: scale; 2-17: 4-bit codebook indices. The low nibbles are values 0-15, the high
    nibbles 16-31.
    """
    levels = IQ4_LEVELS[_plane(blocks[:, 2:18], 16, 4)]
    np.multiply(levels.reshape(out.shape), _half(blocks, 0), out=out)


def decode_iq4_xs(blocks: Bytes, out: Floats) -> None:
    """Byte 0: super-scale; 2-3: high 2 bits and 4-7: low 4 bits of eight scales; 8-135: codebook
    indices.
    """
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 0x0F
    pairs = blocks[:, 2:4].view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    high = (pairs & 3).astype(np.uint8)
    scales = _half(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    _scaled(IQ4_LEVELS[_plane(blocks[:, 8:136], 16, 4)], scales, out)
