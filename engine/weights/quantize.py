"""Quantizes values to GGUF storage types: the inverse of `quants`.

A quantizer takes (n, block_elems) floats and returns (n, block_bytes) bytes. Float types round to
nearest. Q4_0, Q5_0, Q5_1 and Q8_0 derive the scale of a block from its extreme values. Their
results are bit-identical to those of the reference implementation in ggml. The types in `kquantize`
search for the scales with the smallest error.
"""

from collections.abc import Callable

import numpy as np

from engine.core.errors import ModelFormatError
from engine.weights import kquantize
from engine.weights.grouped import Bytes, Floats
from engine.weights.quants import traits_of

# This many values are quantized at a time, so that temporary arrays fit the L2 cache.
_CHUNK_VALUES = 64 * 1024
_HALF_MAX = np.float32(65504)


def quantize(name: str, values: Floats, importance: Floats | None = None) -> Bytes:
    """Quantize a tensor, or some of its rows, to the type `name`. Returns flat bytes. The length of
    a row must be a multiple of the block size.

    `importance` has a weight for each column. Only the types in `kquantize` use it.
    """
    if name not in ENCODERS:
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
    of_row = None if importance is None else importance.reshape(-1, traits.block_elems)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        if name in _SIMPLE:
            out[start : start + step] = _SIMPLE[name](part)
            continue
        own = None if of_row is None else of_row[np.arange(start, start + len(part)) % len(of_row)]
        out[start : start + step] = _SEARCHING[name](part, own)
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


def _q5_1(blocks: Floats) -> Bytes:
    low = blocks.min(axis=1, keepdims=True)
    scales = (blocks.max(axis=1, keepdims=True) - low) / np.float32(31)
    levels = ((blocks - low) * _inverse(scales) + np.float32(0.5)).astype(np.int32)
    levels = np.clip(levels, 0, 31).astype(np.uint8)
    fifth = np.packbits(levels >> 4, axis=1, bitorder="little")
    return np.concatenate((_halves(scales), _halves(low), fifth, _nibbles(levels)), axis=1)


_SIMPLE: dict[str, Callable[[Floats], Bytes]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_0": _q4_0,
}
_SEARCHING: dict[str, Callable[[Floats, Floats | None], Bytes]] = {
    "Q4_K": kquantize.encode_q4_k,
    "Q5_K": kquantize.encode_q5_k,
    "Q6_K": kquantize.encode_q6_k,
    "IQ4_NL": kquantize.encode_iq4_nl,
    "IQ4_XS": kquantize.encode_iq4_xs,
}
ENCODERS = (*_SIMPLE, *_SEARCHING)  # the types that can be written
