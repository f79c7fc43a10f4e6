"""Matrices of 4-bit and 8-bit integers: GPTQ, AWQ and compressed-tensors.

A weight is (value - zero point) * scale. In act-order checkpoints, neighbouring columns belong to
different groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import Reader
from engine.weights.grouped import Bytes, Floats
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.schemes.parts import (
    Finder,
    Found,
    Matrix,
    Parts,
    Unsigned,
    array,
    fail,
    float_bytes,
    group_size,
    halves_last,
    per_block,
    setting,
)
from engine.weights.schemes.types import BLOCK

# AWQ packs eight output channels into a word in this order, from the lowest bits.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _unpack(words: NDArray[np.int32], bits: int, axis: int) -> Unsigned:
    """Split 32-bit words into values of `bits` bits, lowest first, along `axis` of two."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    values = wide.astype(np.uint8)  # (a, b, 32 / bits)
    if axis == 0:
        return values.swapaxes(1, 2).reshape(-1, words.shape[1])
    return values.reshape(len(words), -1)


def _integer_blocks(
    name: str, values: Unsigned, scales: Floats, zeros: Unsigned, bits: int
) -> Bytes:
    """Blocks of type INT4 or INT8. `scales` and `zeros` are (r, groups)."""
    columns = values.shape[1]
    blocks = values.reshape(len(values), -1, BLOCK)
    factors = float_bytes(per_block(scales, columns))
    points = per_block(zeros, columns)
    if bits == 4:
        return np.concatenate((factors, points, halves_last(blocks)), axis=2)
    centered = blocks.astype(np.int16) - points
    if centered.min(initial=0) < -128 or centered.max(initial=0) > 127:
        fail(name, "has 8-bit values with a zero point, which is not supported")
    return np.concatenate((factors, centered.astype(np.int8).view(np.uint8)), axis=2)


def _ordered_blocks(
    values: Unsigned, scales: Floats, zeros: Unsigned, order: NDArray[np.int32]
) -> Bytes:
    """Blocks of type INT4_ORDERED. `order` has the group of each column."""
    wide = (values.astype(np.float32) - zeros[:, order]) * scales[:, order]
    return float_bytes(wide)


def _order(tensor: LazyTensor, groups: int) -> NDArray[np.int32] | None:
    """The group of each column. None if the groups are in order."""
    order = array(tensor)
    size = -(-len(order) // groups)
    if (order < 0).all() or np.array_equal(order, np.arange(len(order)) // size):
        return None
    if order.min() < 0 or order.max() >= groups:
        fail(tensor.name, f"names a group beyond the {groups} that have scales")
    return order


@dataclass(frozen=True, slots=True)
class _Integers:
    """A matrix of 4-bit or 8-bit integers. `values`, `scales` and `zeros` return rows
    [begin, end).
    """

    name: str
    bits: int
    values: Callable[[int, int], Unsigned]
    scales: Callable[[int, int], Floats]
    zeros: Callable[[int, int], Unsigned]
    order: NDArray[np.int32] | None

    def matrix(self, shape: tuple[int, int]) -> Matrix:
        if self.order is None:
            return Matrix("INT4" if self.bits == 4 else "INT8", shape, self._rows)
        return Matrix("INT4_ORDERED", shape, self._rows)

    def _rows(self, begin: int, end: int) -> Bytes:
        values, scales = self.values(begin, end), self.scales(begin, end)
        zeros = self.zeros(begin, end)
        if self.order is not None:
            return _ordered_blocks(values, scales, zeros, self.order)
        return _integer_blocks(self.name, values, scales, zeros, self.bits)


def _packed(parts: Parts) -> tuple[str, LazyTensor] | None:
    """The name of a weight and its packed integers, if this part has them."""
    base, is_packed, _ = parts.name.partition(".qweight")
    return (base, parts.take(parts.name, "I32", 2)) if is_packed else None


def _scales(parts: Parts, base: str, rows: int) -> LazyTensor:
    """The scales of a weight, (groups, rows)."""
    scales = parts.take_floats(f"{base}.scales", 2)
    if scales.shape[1] != rows:
        fail(scales.name, f"has {scales.shape[1]} columns for {rows} output channels")
    return scales


def gptq(reader: Reader) -> Finder:
    bits = setting(reader, int, "bits", (4, 8))
    form = setting(reader, str, "checkpoint_format", ("gptq", "gptq_v2"))

    def find(parts: Parts) -> Found:
        if (found := _packed(parts)) is None:
            return None
        base, packed = found
        columns, rows = packed.shape[0] * 32 // bits, packed.shape[1]
        scales = _scales(parts, base, rows)
        groups = scales.shape[0]
        zeros = parts.take(f"{base}.qzeros", "I32", (groups, -(-rows * bits // 32)))
        order = None
        if parts.has(f"{base}.g_idx"):
            order = _order(parts.take(f"{base}.g_idx", "I32", (columns,)), groups)
        if order is None:
            group_size(base, columns, groups)
        # The first version of the format stores zero points minus one.
        shift = np.uint8(1 if form == "gptq" else 0)
        mask = np.uint8((1 << bits) - 1)
        integers = _Integers(
            base,
            bits,
            lambda b, e: _unpack(np.ascontiguousarray(array(packed)[:, b:e]), bits, 0).T,
            lambda b, e: scales.numpy()[:, b:e].T,
            lambda b, e: (_unpack(array(zeros), bits, 1)[:, b:e].T + shift) & mask,
            order,
        )
        return f"{base}.weight", integers.matrix((rows, columns))

    return find


def awq(reader: Reader) -> Finder:
    setting(reader, int, "bits", (4,))
    setting(reader, str, "version", ("gemm", "GEMM"))
    place = np.argsort(_AWQ_ORDER)  # where a word has the value of each channel

    def channels(tensor: LazyTensor, begin: int, end: int) -> Unsigned:
        """Channels [begin, end) of packed words, (end - begin, rows of the tensor)."""
        first, last = begin // 8, -(-end // 8)
        words = np.ascontiguousarray(array(tensor)[:, first:last])
        values = _unpack(words, 4, 1).reshape(len(words), -1, 8)[..., place]
        return values.reshape(len(words), -1).T[begin - 8 * first : end - 8 * first]

    def find(parts: Parts) -> Found:
        if (found := _packed(parts)) is None:
            return None
        base, packed = found
        columns, rows = packed.shape[0], packed.shape[1] * 8
        scales = _scales(parts, base, rows)
        groups = scales.shape[0]
        zeros = parts.take(f"{base}.qzeros", "I32", (groups, rows // 8))
        group_size(base, columns, groups)
        integers = _Integers(
            base,
            4,
            partial(channels, packed),
            lambda b, e: scales.numpy()[:, b:e].T,
            partial(channels, zeros),
            None,
        )
        return f"{base}.weight", integers.matrix((rows, columns))

    return find


def packed_integers(parts: Parts, base: str) -> Matrix:
    """`weight_packed` of compressed-tensors: words with values of a row. Values and zero points are
    stored with an offset of half their range.
    """
    packed = parts.take(f"{base}.weight_packed", "I32", 2)
    shape = array(parts.take(f"{base}.weight_shape", ("I64", "I32"), (2,)))
    rows, columns = int(shape[0]), int(shape[1])
    bits = 32 * packed.shape[1] // columns if columns > 0 else 0
    if packed.shape[0] != rows or bits not in (4, 8) or bits * columns != 32 * packed.shape[1]:
        fail(
            packed.name,
            f"has shape {list(packed.shape)}, which is no 4-bit or 8-bit matrix of shape "
            f"{[rows, columns]}",
        )
    scales = parts.take_floats(f"{base}.weight_scale", 2)
    groups = scales.shape[1]
    if scales.shape[0] != rows:
        fail(scales.name, f"has {scales.shape[0]} rows for {rows} output channels")
    order = None
    if parts.has(f"{base}.weight_g_idx"):
        order = _order(parts.take(f"{base}.weight_g_idx", "I32", (columns,)), groups)
    if order is None:
        group_size(base, columns, groups)
    middle = np.full((1, groups), 1 << (bits - 1), np.uint8)
    zeros = None
    if parts.has(f"{base}.weight_zero_point"):
        height = -(-rows * bits // 32)
        zeros = parts.take(f"{base}.weight_zero_point", "I32", (height, groups))

    def zero_points(begin: int, end: int) -> Unsigned:
        if zeros is None:
            return np.broadcast_to(middle, (end - begin, groups))
        return _unpack(array(zeros), bits, 0)[begin:end]

    return _Integers(
        base,
        bits,
        lambda b, e: _unpack(array(packed)[b:e], bits, 1),
        lambda b, e: scales.numpy()[b:e],
        zero_points,
        order,
    ).matrix((rows, columns))


def plain_int8(parts: Parts, base: str) -> Matrix:
    """`weight` of compressed-tensors as int8, with a scale per tensor, output channel or group."""
    stored = parts.take(f"{base}.weight", "I8", 2)
    scales = parts.take_floats(f"{base}.weight_scale", len(parts.shape_of(f"{base}.weight_scale")))
    return int8_matrix(base, stored, scales, 1.0)


def int8_matrix(name: str, stored: LazyTensor, scales: LazyTensor, divisor: float) -> Matrix:
    """Int8 values with scales of shape (1), (rows), (rows, 1) or (rows, groups)."""
    rows, columns = stored.shape
    shape = scales.shape if len(scales.shape) == 2 else (prod(scales.shape), 1)
    if shape[0] not in (1, rows) or len(scales.shape) > 2:
        fail(scales.name, f"has shape {list(scales.shape)} for {rows} output channels")
    group_size(name, columns, shape[1])

    def blocks(begin: int, end: int) -> Bytes:
        factors = np.broadcast_to(scales.numpy().reshape(shape), (rows, shape[1]))[begin:end]
        values = array(stored)[begin:end].view(np.uint8).reshape(end - begin, -1, BLOCK)
        scaled = float_bytes(per_block(factors / np.float32(divisor), columns))
        return np.concatenate((scaled, values), axis=2)

    return Matrix("INT8", (rows, columns), blocks)
