"""GGUF storage types: values per block, bytes per block, and how to dequantize them.

The table `TRAITS` is the only place that lists the types. A dequantizer converts (n, block_bytes)
bytes to (n, block_elems) floats. `dequantize` calls it on chunks that fit the L2 cache. Results are
bit-identical to the reference formulas, evaluated in float32 in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from engine.core.errors import ModelFormatError
from engine.weights import grouped, iquants, kquants
from engine.weights.grouped import (
    Bytes,
    Floats,
    QuantizedGroups,
    Recoding,
    decode_groups,
    half,
)
from engine.weights.schemes import types as schemes

# This many values are dequantized at a time. Their float32 output takes half a megabyte, which fits
# the L2 cache.
_CHUNK_VALUES = 128 * 1024


@dataclass(frozen=True, slots=True)
class QuantTraits:
    """One storage type: its number in GGUF files (`type_id`), the size of a block, and the function
    that dequantizes blocks. `type_id` is None if GGUF files cannot have the type.

    Kernels cannot read a type with a `recoding`. Its blocks are first written as another type.
    """

    name: str
    type_id: int | None
    block_elems: int
    block_bytes: int
    decode: Callable[[Bytes, Floats], None]
    recoding: Recoding | None = None

    @property
    def quantized(self) -> bool:
        return self.block_elems > 1

    def num_bytes(self, num_values: int) -> int:
        return num_values // self.block_elems * self.block_bytes


def traits_of(name: str) -> QuantTraits:
    try:
        return TRAITS[name]
    except KeyError:
        raise ModelFormatError(
            f"storage type '{name}' is not supported (supported: {', '.join(TRAITS)})"
        ) from None


def kernel_type(name: str) -> str:
    """The storage type that kernels read instead of `name`. It is `name` itself for most types."""
    recoding = traits_of(name).recoding
    return name if recoding is None else recoding.to


def for_kernels(name: str, raw: Bytes) -> Bytes:
    """The bytes of a tensor, or of some of its rows, as the type `kernel_type(name)`."""
    traits = traits_of(name)
    if traits.recoding is None:
        return raw
    blocks = raw.reshape(-1, traits.block_bytes)
    target = traits_of(traits.recoding.to)
    ratio = traits.block_elems // target.block_elems
    out = np.empty((len(blocks) * ratio, target.block_bytes), np.uint8)
    step = max(1, _CHUNK_VALUES // traits.block_elems)
    with np.errstate(invalid="ignore", over="ignore"):  # kernels refuse infinite scales
        for start in range(0, len(blocks), step):
            part = traits.recoding.convert(blocks[start : start + step])
            out[start * ratio : start * ratio + len(part)] = part
    return out.reshape(-1)


def dequantize(name: str, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """Dequantize the flat bytes of a whole tensor into a new, writable array of `shape`."""
    traits = traits_of(name)
    num_values = prod(shape)
    if num_values % traits.block_elems or raw.size != traits.num_bytes(num_values):
        raise ModelFormatError(
            f"{raw.size} bytes of {name} cannot be a tensor of shape {list(shape)}"
        )
    out = np.empty((num_values // traits.block_elems, traits.block_elems), np.float32)
    blocks = raw.reshape(len(out), traits.block_bytes)
    step = max(1, _CHUNK_VALUES // traits.block_elems)
    # A malicious file may have infinite scales. They are found when the model is opened, which
    # checks some results. So numpy's warnings are switched off.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(out), step):
            traits.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def _nibbles(packed: Bytes, out: Floats) -> None:
    """Unpack the nibbles of each block: the low nibbles of all bytes, then the high nibbles."""
    half = packed.shape[1]
    out[:, :half] = packed & 0x0F
    out[:, half:] = packed >> 4


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    """Convert bfloat16 to float32. The bits of a bfloat16 are the upper half of a float32."""
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack 32 bits per block, one for each value. Each bit is shifted to bit 4, where it extends
    the value's nibble.
    """
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    bits <<= 4
    return bits


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), half(blocks, 0), out=out)


def _q4_g16(blocks: Bytes, out: Floats) -> None:
    """Byte 0: two scales; 4: two minimums; 8-23: nibbles as in Q4_0."""
    _nibbles(blocks[:, 8:], out)
    groups = out.reshape(len(out), 2, 16)
    groups *= _pair(blocks, 0)
    groups += _pair(blocks, 4)


def _q8_g16(blocks: Bytes, out: Floats) -> None:
    """Byte 0: two scales; 4-35: int8 values."""
    values = blocks[:, 4:].view(np.int8).reshape(len(out), 2, 16)
    np.multiply(values, _pair(blocks, 0), out=out.reshape(len(out), 2, 16))


def _pair(blocks: Bytes, offset: int) -> Floats:
    """The two float16 numbers at byte `offset` of every block, (n, 2, 1)."""
    return blocks[:, offset : offset + 4].view("<f2").astype(np.float32)[:, :, None]


Unpack = Callable[[Bytes], QuantizedGroups]


def _in_8_bits(
    name: str, type_id: int | None, sizes: tuple[int, int], unpack: Unpack, to: str
) -> QuantTraits:
    recoding = Recoding(to, partial(grouped.as_8_bit, unpack))
    return QuantTraits(name, type_id, *sizes, partial(decode_groups, unpack), recoding)


def _in_4_bits(
    name: str, type_id: int, sizes: tuple[int, int], unpack: Unpack, to: str, levels: range
) -> QuantTraits:
    convert = partial(grouped.as_4_bit, unpack, levels.start, levels.step)
    return QuantTraits(name, type_id, *sizes, partial(decode_groups, unpack), Recoding(to, convert))


def _from_scheme(
    name: str,
    block_bytes: int,
    decode: Callable[[Bytes, Floats], None],
    convert: Callable[[Bytes], Bytes],
    to: str = "Q8_0",
) -> QuantTraits:
    return QuantTraits(name, None, schemes.BLOCK, block_bytes, decode, Recoding(to, convert))


TRAITS: dict[str, QuantTraits] = {
    traits.name: traits
    for traits in (
        QuantTraits("F32", 0, 1, 4, _f32),
        QuantTraits("F16", 1, 1, 2, _f16),
        QuantTraits("BF16", 30, 1, 2, _bf16),
        QuantTraits("Q4_0", 2, 32, 18, _q4_0),
        QuantTraits("Q4_1", 3, 32, 20, _q4_1),
        QuantTraits("Q5_0", 6, 32, 22, _q5_0),
        QuantTraits("Q5_1", 7, 32, 24, _q5_1),
        QuantTraits("Q8_0", 8, 32, 34, _q8_0),
        QuantTraits("Q2_K", 10, 256, 84, kquants.decode_q2_k),
        QuantTraits("Q3_K", 11, 256, 110, kquants.decode_q3_k),
        QuantTraits("Q4_K", 12, 256, 144, kquants.decode_q4_k),
        QuantTraits("Q5_K", 13, 256, 176, kquants.decode_q5_k),
        QuantTraits("Q6_K", 14, 256, 210, kquants.decode_q6_k),
        QuantTraits("IQ4_NL", 20, 32, 18, kquants.decode_iq4_nl),
        QuantTraits("IQ4_XS", 23, 256, 136, kquants.decode_iq4_xs),
        _in_8_bits("IQ2_XXS", 16, (256, 66), iquants.unpack_iq2_xxs, "Q8_0"),
        _in_8_bits("IQ2_XS", 17, (256, 74), iquants.unpack_iq2_xs, "Q8_G16"),
        _in_8_bits("IQ2_S", 22, (256, 82), iquants.unpack_iq2_s, "Q8_G16"),
        _in_8_bits("IQ3_XXS", 18, (256, 98), iquants.unpack_iq3_xxs, "Q8_0"),
        _in_4_bits("IQ3_S", 21, (256, 110), iquants.unpack_iq3_s, "Q4_1", range(-15, 16, 2)),
        _in_4_bits("IQ1_S", 19, (256, 50), iquants.unpack_iq1_s, "Q4_1", range(-9, 10, 2)),
        _in_4_bits("IQ1_M", 29, (256, 56), iquants.unpack_iq1_m, "Q4_G16", range(-9, 10, 2)),
        _in_4_bits("TQ1_0", 34, (256, 54), grouped.unpack_tq1_0, "Q4_1", range(-1, 2)),
        _in_4_bits("TQ2_0", 35, (256, 66), grouped.unpack_tq2_0, "Q4_1", range(-1, 3)),
        _in_4_bits("Q1_0", 41, (128, 18), grouped.unpack_q1_0, "Q4_1", range(-1, 2)),
        QuantTraits("MXFP4", 39, 32, 17, partial(decode_groups, grouped.unpack_mxfp4)),
        _in_8_bits("NVFP4", 40, (64, 36), grouped.unpack_nvfp4, "Q8_G16"),
        # Safetensors checkpoints store these types, as several tensors.
        _from_scheme("FP8_E4M3", 36, schemes.decode_e4m3, schemes.e4m3_as_q8_0),
        _from_scheme("FP8_E5M2", 36, schemes.decode_e5m2, schemes.e5m2_as_q8_0),
        _in_8_bits("INT8", None, (32, 36), schemes.unpack_int8, "Q8_0"),
        _from_scheme(
            "INT4",
            21,
            partial(decode_groups, schemes.unpack_int4),
            schemes.int4_as_q4_1,
            "Q4_1",
        ),
        _from_scheme("INT4_ORDERED", 128, schemes.decode_floats, schemes.floats_as_q8_0),
        _in_8_bits("FP4_G16", None, (32, 24), schemes.unpack_fp4_g16, "Q8_G16"),
        _from_scheme(
            "NF4",
            20,
            schemes.decode_nf4,
            partial(grouped.as_8_bit, schemes.unpack_rounded_nf4),
        ),
        _from_scheme(
            "BNB_FP4",
            20,
            schemes.decode_bnb_fp4,
            partial(grouped.as_8_bit, schemes.unpack_rounded_bnb_fp4),
        ),
        # Types of our own, with a scale for each 16 values. Others are written as these types.
        QuantTraits("Q4_G16", None, 32, 24, _q4_g16),
        QuantTraits("Q8_G16", None, 32, 36, _q8_g16),
    )
}
BY_TYPE_ID: dict[int, QuantTraits] = {
    traits.type_id: traits for traits in TRAITS.values() if traits.type_id is not None
}
