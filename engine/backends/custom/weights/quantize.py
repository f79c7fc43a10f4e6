"""Encoders of storage types: the other direction of `quants`.

An encoder takes (n, block_elems) floats and gives (n, block_bytes) bytes. Plain types round to the
nearest value. Block types take the scale from the value that is farthest from zero, as the format's
reference does, to the same bits; Q4_K, which searches for its scales, has a file of its own.
"""

from collections.abc import Callable

import numpy as np

from engine.backends.custom.weights.kquantize import encode_q4_k
from engine.backends.custom.weights.quants import Bytes, Floats, traits_of
from engine.core.errors import ModelFormatError

# Values encoded at a time: what an encoder holds of them stays inside a second-level cache.
_CHUNK_VALUES = 64 * 1024
_HALF_MAX = np.float32(65504)


def quantize(name: str, values: Floats) -> Bytes:
    """The flat bytes of a tensor, or of some rows of one; rows must be whole blocks."""
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
    """Values that float16 cannot hold would become infinite, and the model with them."""
    if np.abs(blocks).max(initial=0) > _HALF_MAX:
        raise ModelFormatError(
            "the model holds values beyond float16's 65,504; convert it to BF16 or F32 instead"
        )
    return blocks.astype("<f2").view(np.uint8)


def _bf16(blocks: Floats) -> Bytes:
    """Rounded to the nearest value, ties to the even one."""
    bits = blocks.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype("<u2").view(np.uint8)


def _halves(scales: Floats) -> Bytes:
    """(n, 1) floats as the two bytes of a float16."""
    return scales.astype("<f2").view(np.uint8)


def _inverse(scales: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _levels(blocks: Floats, half: int) -> tuple[Floats, Bytes]:
    """Scales, and levels 0 .. 2 * half - 1 of which `half` is zero.

    The value farthest from zero, sign included, becomes level 0: one more level on its side.
    """
    farthest = np.abs(blocks).argmax(axis=1, keepdims=True)
    scales = np.take_along_axis(blocks, farthest, axis=1) / np.float32(-half)
    levels = blocks * _inverse(scales) + np.float32(half + 0.5)
    return scales, np.clip(levels.astype(np.int32), 0, 2 * half - 1).astype(np.uint8)


def _nibbles(levels: Bytes) -> Bytes:
    """Low halves of 16 bytes hold the first 16 levels, high halves the others."""
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
    # Halves round away from zero; numpy's own rounding takes them to the even side.
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
