"""Matrices of 8-bit and 4-bit floats: FP8, MXFP4, NVFP4 and the 4-bit types of bitsandbytes."""

import json
from math import prod
from typing import Any

import numpy as np

from engine.architectures.base import Reader
from engine.weights.grouped import Bytes, Floats
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.schemes.integers import int8_matrix
from engine.weights.schemes.parts import (
    Finder,
    Found,
    Matrix,
    Parts,
    array,
    fail,
    float_bytes,
    halves_last,
    pairs_last,
    setting,
)
from engine.weights.schemes.types import (
    BLOCK,
    BNB_FP4_LEVELS,
    E4M3_NUMBERS,
    NF4_LEVELS,
)

_FP8 = {"F8_E4M3": "FP8_E4M3", "F8_E5M2": "FP8_E5M2"}
_SCALE_TYPES = ("F32", "F16", "BF16", "F8_E8M0")
_MAX_STATE_BYTES = 4096
_BNB_TYPES: dict[str, tuple[str, Floats]] = {
    "nf4": ("NF4", NF4_LEVELS),
    "fp4": ("BNB_FP4", BNB_FP4_LEVELS),
}


def _scales(tensor: LazyTensor) -> Floats:
    if tensor.dtype == "F8_E8M0":
        return np.ldexp(np.float32(1), array(tensor).astype(np.int32) - 127)
    return tensor.numpy()


def fp8(reader: Reader) -> Finder:
    """Checkpoints of Transformers: a scale per block, stored as `weight_scale_inv`, or per tensor
    or output channel.
    """
    setting(reader, str, "fmt", ("e4m3", "e5m2"))
    size = reader.read(list, "weight_block_size", default=None)

    def find(parts: Parts) -> Found:
        base, is_scale, _ = parts.name.partition(".weight_scale")
        if not is_scale:
            return None
        return f"{base}.weight", fp8_matrix(parts, base, parts.name, size)

    return find


def fp8_matrix(parts: Parts, base: str, scale: str, size: list[Any] | None) -> Matrix:
    """An FP8 `weight`. `size` is the block size, (rows, columns), of scales per block."""
    stored = parts.take(f"{base}.weight", tuple(_FP8), 2)
    scales = parts.take(scale, _SCALE_TYPES, len(parts.shape_of(scale)))
    rows, columns = stored.shape
    count = prod(scales.shape)
    if len(scales.shape) <= 1 or scales.shape[1] == 1:
        if count not in (1, rows):
            fail(scale, f"has shape {list(scales.shape)} for {rows} output channels")
        height, width = (rows if count == 1 else 1), columns
    elif size is None:
        height, width = -(-rows // scales.shape[0]), -(-columns // scales.shape[1])
    elif len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        fail(base, f"has the block size {str(size)[:40]}; two positive integers are needed")
    else:
        height, width = size
    grid = (-(-rows // height), -(-columns // width))
    if count != prod(grid) or (len(scales.shape) > 1 and scales.shape != grid):
        fail(scale, f"has shape {list(scales.shape)}, but there are {grid[0]} x {grid[1]} blocks")
    if width != columns and width % BLOCK:
        fail(base, f"has blocks of {width} columns; only multiples of {BLOCK} load")

    def blocks(begin: int, end: int) -> Bytes:
        factors = _scales(scales).reshape(grid)[np.arange(begin, end) // height]
        each = factors[:, np.arange(0, columns, BLOCK) // width]  # (rows, blocks of a row)
        codes = array(stored)[begin:end].reshape(end - begin, -1, BLOCK)
        return np.concatenate((float_bytes(each[..., None]), codes), axis=2)

    return Matrix(_FP8[stored.dtype], (rows, columns), blocks)


def mxfp4(reader: Reader) -> Finder:
    """The experts of gpt-oss: `*_blocks` (..., rows, columns / 32, 16) and `*_scales`."""

    def find(parts: Parts) -> Found:
        base, is_blocks, rest = parts.name.partition("_blocks")
        if not is_blocks or rest:
            return None
        shape = parts.shape_of(parts.name)
        packed = parts.take(parts.name, "U8", (*shape[:-1], 16))
        scales = parts.take(f"{base}_scales", "U8", shape[:-1])
        if len(shape) < 3:
            fail(parts.name, f"has shape {list(shape)}, not (..., rows, blocks, 16)")
        return base, mxfp4_matrix(packed, scales, (*shape[:-2], shape[-2] * BLOCK))

    return find


def mxfp4_matrix(packed: LazyTensor, scales: LazyTensor, shape: tuple[int, ...]) -> Matrix:
    count = shape[-1] // BLOCK

    def blocks(begin: int, end: int) -> Bytes:
        nibbles = array(packed).reshape(-1, count, 16)[begin:end]
        exponents = array(scales).reshape(-1, count, 1)[begin:end]
        return np.concatenate((exponents, pairs_last(nibbles)), axis=2)

    return Matrix("MXFP4", shape, blocks)


def packed_fp4(parts: Parts, base: str) -> Matrix:
    """`weight_packed` of compressed-tensors: MXFP4, or NVFP4 if there is a global scale."""
    packed = parts.take(f"{base}.weight_packed", "U8", 2)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if columns % BLOCK:
        fail(packed.name, f"has rows of {columns} values; only multiples of {BLOCK} load")
    if not parts.has(f"{base}.weight_global_scale"):
        scales = parts.take(f"{base}.weight_scale", ("U8", "F8_E8M0"), (rows, columns // 32))
        return mxfp4_matrix(packed, scales, (rows, columns))
    scales = parts.take(f"{base}.weight_scale", "F8_E4M3", (rows, columns // 16))
    whole = parts.take_floats(f"{base}.weight_global_scale", (1,))

    def blocks(begin: int, end: int) -> Bytes:
        factors = E4M3_NUMBERS[array(scales)[begin:end]] / whole.numpy()
        nibbles = array(packed)[begin:end].reshape(end - begin, -1, 16)
        pairs = float_bytes(factors.reshape(end - begin, -1, 2))
        return np.concatenate((pairs, pairs_last(nibbles)), axis=2)

    return Matrix("FP4_G16", (rows, columns), blocks)


def bitsandbytes(reader: Reader) -> Finder:
    if not reader.read(bool, "load_in_4bit", default=False):
        setting(reader, bool, "load_in_8bit", (True,))

    def find(parts: Parts) -> Found:
        base, is_state, kind = parts.name.partition(".weight.quant_state.bitsandbytes__")
        if is_state:
            return f"{base}.weight", _bnb_4_bit(parts, f"{base}.weight", kind)
        base, is_scale, rest = parts.name.partition(".SCB")
        if not is_scale or rest:
            return None
        name = f"{base}.weight"
        stored = parts.take(name, "I8", 2)
        scales = parts.take(parts.name, "F32", (stored.shape[0],))
        if (
            parts.has(f"{base}.weight_format")
            and array(
                parts.take(
                    f"{base}.weight_format", "U8", len(parts.shape_of(f"{base}.weight_format"))
                )
            ).any()
        ):
            fail(name, "is not stored row by row")
        return name, int8_matrix(name, stored, scales, 127.0)

    return find


def _bnb_4_bit(parts: Parts, name: str, kind: str) -> Matrix:
    state = _bnb_state(parts, name, kind)
    dtype, levels = _BNB_TYPES[kind]
    shape, size = state["shape"], state["blocksize"]
    rows, columns = shape
    num_blocks = -(-rows * columns // size)
    packed = parts.take(name, "U8", (-(-rows * columns // 2), 1))
    table = parts.take(f"{name}.quant_map", "F32", (16,))
    if not np.allclose(table.numpy(), levels, atol=1e-6):
        fail(table.name, f"is not the {kind} table")
    absmax = parts.take(f"{name}.absmax", ("F32", "U8"), (num_blocks,))
    if absmax.dtype == "U8":
        nested_size = state["nested_blocksize"]
        inner = parts.take(f"{name}.nested_absmax", "F32", (-(-num_blocks // nested_size),))
        codes = parts.take(f"{name}.nested_quant_map", "F32", (256,))

    def magnitudes() -> Floats:
        if absmax.dtype == "F32":
            return absmax.numpy()
        outer = np.repeat(inner.numpy(), nested_size)[:num_blocks]
        return codes.numpy()[array(absmax)] * outer + np.float32(state["nested_offset"])

    def blocks(begin: int, end: int) -> Bytes:
        starts = np.arange(begin * columns, end * columns, BLOCK)
        nibbles = array(packed).reshape(-1, 16)[starts // BLOCK]
        values = np.stack((nibbles >> np.uint8(4), nibbles & np.uint8(15)), axis=-1)
        scaled = float_bytes(magnitudes()[starts // size][:, None])
        return np.concatenate((scaled, halves_last(values.reshape(-1, BLOCK))), axis=1)

    return Matrix(dtype, (rows, columns), blocks)


def _bnb_state(parts: Parts, name: str, kind: str) -> dict[str, Any]:
    """The JSON text that bitsandbytes stores as a tensor of bytes."""
    if kind not in _BNB_TYPES:
        fail(name, f"has the type {kind[:20]!r}; nf4 and fp4 are supported")
    stored = parts.take(parts.name, "U8", 1)
    if stored.nbytes > _MAX_STATE_BYTES:
        fail(stored.name, f"has {stored.nbytes} bytes, more than any state needs")
    try:
        state = json.loads(stored.raw().tobytes())
    except (ValueError, RecursionError):
        fail(stored.name, "is not JSON")
    is_nested = parts.has(f"{name}.nested_absmax")
    sizes = ["blocksize", "nested_blocksize"] if is_nested else ["blocksize"]
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
        fail(stored.name, "states no shape of two dimensions")
    for key in sizes:
        if not _is_size(state.get(key)) or state[key] % BLOCK:
            fail(stored.name, f"states no {key} that is a multiple of {BLOCK}")
    if is_nested and type(state.get("nested_offset")) is not float:
        fail(stored.name, "states no nested_offset")
    if shape[1] % BLOCK:
        fail(name, f"has rows of {shape[1]} values; only multiples of {BLOCK} load")
    return state


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
