"""Repacks the quantized blocks of checkpoints into the groups that our kernels read, without
dequantizing.

A file's tensors are copied to the GPU as stored and repacked there, by bit operations. Types
with more than 4 bits, or with levels that are not evenly spaced, become 8-bit values. All other
types become 4-bit values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.torch.kernels.quantized import GroupedWeight
from engine.weights.grouped import FP4_LEVELS
from engine.weights.kquants import IQ4_LEVELS
from engine.weights.quants import traits_of


@dataclass(frozen=True, slots=True)
class Groups:
    """Unpacked GGUF blocks. For n blocks: values (n, block_elems) uint8, one value per byte; scales
    and minima (n, groups per block) float16. `bits` is the size of a value after repacking.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    bits: int = 4


def repack(dtype: str, raw: Tensor, shape: tuple[int, int]) -> GroupedWeight:
    """Repacks the stored bytes of a matrix (F, D). `dtype` is a type in REPACKED."""
    traits = traits_of(dtype)
    blocks = raw.view(-1, traits.block_bytes)
    groups = REPACKED[dtype](blocks)
    group = traits.block_elems // groups.scales.shape[1]
    values = groups.values.reshape(-1, group)
    if groups.bits == 4:
        values = values[:, : group // 2] | values[:, group // 2 :] << 4
    outputs = shape[0]
    return GroupedWeight(
        values.reshape(outputs, -1),
        groups.scales.reshape(outputs, -1).contiguous(),
        None if groups.minima is None else groups.minima.reshape(outputs, -1).contiguous(),
        groups.bits,
        group,
    )


def layout_of(dtype: str) -> tuple[int, int, bool]:
    """The layout that a stored type has after repacking, as `GroupedWeight.layout`."""
    traits = traits_of(dtype)
    raw = torch.zeros(traits.block_bytes, dtype=torch.uint8)
    return repack(dtype, raw, (1, traits.block_elems)).layout


def packed_bits(dtype: str) -> float:
    """Bits per value that a stored type takes after repacking. This counts scales and minima."""
    bits, group, has_minima = layout_of(dtype)
    return bits + 16 * (1 + has_minima) / group


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 number at byte `offset` of each block, as a float32 column."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _plane(packed: Tensor, width: int, bits: int) -> Tensor:
    """Unpacks bytes into fields of `bits` bits. The bytes are cut into runs of `width` bytes. The
    fields of a run are ordered: first the lowest field of each byte, then the next higher field of
    each byte, and so on.
    """
    runs = packed.reshape(len(packed), -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((runs >> shifts[:, None]) & ((1 << bits) - 1)).flatten(1)


def _signed(scales: Tensor) -> Tensor:
    return scales.view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_plane(blocks[:, 2:], 16, 4), _half(blocks, 0).half())


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_plane(blocks[:, 4:], 16, 4), _half(blocks, 0).half(), _half(blocks, 2).half())


def _fifth_bits(packed: Tensor) -> Tensor:
    """The fifth bits of a block's 32 values, in the order of the values. Each bit is shifted to bit
    4, so that OR combines it with the low 4 bits of the value.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Groups:
    values = _plane(blocks[:, 6:], 16, 4) | _fifth_bits(blocks[:, 2:6])
    return Groups(values + (128 - 16), _half(blocks, 0).half(), bits=8)


def _q5_1(blocks: Tensor) -> Groups:
    values = _plane(blocks[:, 8:], 16, 4) | _fifth_bits(blocks[:, 4:8])
    return Groups(values, _half(blocks, 0).half(), _half(blocks, 2).half(), bits=8)


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, 2:] ^ 128, _half(blocks, 0).half(), bits=8)


def _q2_k(blocks: Tensor) -> Groups:
    packed = blocks[:, :16]
    scales = _half(blocks, 80) * (packed & 15)
    minima = -_half(blocks, 82) * (packed >> 4)
    return Groups(_plane(blocks[:, 16:80], 32, 2), scales.half(), minima.half())


def _q3_k(blocks: Tensor) -> Groups:
    """A 3-bit value v of Q3_K means v - 4. A 4-bit value v of our groups means v - 8. So 4 is added
    to each value.
    """
    low, high = _plane(blocks[:, 96:104], 8, 4), _plane(blocks[:, 104:108], 4, 2)
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    values = _plane(blocks[:, 32:96], 32, 2) | _plane(blocks[:, :32], 32, 1) << 2
    return Groups(values + 4, scales.half())


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks eight 6-bit scales and eight 6-bit minima from 12 bytes, as in Q4_K and Q5_K."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6) << 4), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | (second >> 6) << 4), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: Tensor) -> Groups:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    values = _plane(blocks[:, 16:144], 32, 4)
    return Groups(values, (_half(blocks, 0) * scales).half(), (-_half(blocks, 2) * minima).half())


def _q5_k(blocks: Tensor) -> Groups:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    values = _plane(blocks[:, 48:176], 32, 4) | _plane(blocks[:, 16:48], 32, 1) << 4
    return Groups(
        values, (_half(blocks, 0) * scales).half(), (-_half(blocks, 2) * minima).half(), bits=8
    )


def _q6_k(blocks: Tensor) -> Groups:
    values = _plane(blocks[:, :128], 64, 4) | _plane(blocks[:, 128:192], 32, 2) << 4
    scales = _half(blocks, 208) * _signed(blocks[:, 192:208].contiguous())
    return Groups(values + (128 - 32), scales.half(), bits=8)


def _levels(indices: Tensor) -> Tensor:
    levels = torch.from_numpy(IQ4_LEVELS + 128).to(indices.device, torch.uint8)
    return levels[indices.long()]


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_levels(_plane(blocks[:, 2:18], 16, 4)), _half(blocks, 0).half(), bits=8)


def _iq4_xs(blocks: Tensor) -> Groups:
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    low = (blocks[:, 4:8, None] >> shifts).flatten(1) & 15
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> pairs).flatten(1) & 3
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return Groups(_levels(_plane(blocks[:, 8:136], 16, 4)), scales.half(), bits=8)


def _mxfp4(blocks: Tensor) -> Groups:
    levels = torch.from_numpy(FP4_LEVELS).to(blocks.device)
    values = levels[_plane(blocks[:, 1:], 16, 4).long()].view(torch.uint8) ^ 128
    return Groups(values, torch.exp2(blocks[:, :1].float() - 128).half(), bits=8)


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """The two float16 numbers at byte `offset` of each block."""
    return blocks[:, offset : offset + 4].contiguous().view(torch.float16)


def _q4_g16(blocks: Tensor) -> Groups:
    return Groups(_plane(blocks[:, 8:], 16, 4), _halves(blocks, 0), _halves(blocks, 4))


def _q8_g16(blocks: Tensor) -> Groups:
    return Groups(blocks[:, 4:] ^ 128, _halves(blocks, 0), bits=8)


REPACKED: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q4_G16": _q4_g16,
    "Q8_G16": _q8_g16,
}
