"""Cuts a weight: some of its rows, columns or experts, as a weight of its own.

Only the rows of the cut are read from the file. Quantized rows stay quantized. Columns are cut
between the blocks of a storage type; if the cut is inside of a block, the values are dequantized.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from engine.architectures.tensors import Transform
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quants import dequantize, traits_of
from engine.weights.weight import Weight, stored_places

Bytes = NDArray[np.uint8]
_FLOAT = "F32"


def cut(weight: Weight, rows: range | None = None, columns: range | None = None) -> Weight:
    """Some rows and columns of a matrix, or some values of a vector. None means all. If the weight
    has a matrix per expert, each of them is cut.
    """
    if weight.spec.of_experts:
        parts = [cut(weight.expert(i), rows, columns) for i in range(weight.spec.shape[0])]
        shape = (len(parts), *parts[0].spec.shape)
        tensors = tuple(part.tensor for part in parts)
        return Weight(replace(weight.spec, shape=shape), tensors, parts[0].transform)
    whole = weight.spec.shape
    assert not weight.transform.turned and not weight.transform.reshaped, weight.spec
    rows = range(whole[0]) if rows is None else rows
    sizes = whole[1:]
    if columns is not None and len(columns) < whole[1]:
        sizes = (len(columns),)
    else:
        columns = None
    shape = (len(rows), *sizes)
    kept = Transform(added=weight.transform.added, is_log=weight.transform.is_log)
    tensor = _tensor(weight, rows, columns, shape)
    return Weight(replace(weight.spec, shape=shape), (tensor,), kept)


def cut_experts(weight: Weight, experts: range) -> Weight:
    """Some of the matrices of a weight with one per expert or per head."""
    tensors = tuple(weight.expert(index).tensor for index in experts)
    shape = (len(experts), *weight.spec.shape[1:])
    transform = replace(weight.transform, joined=False)
    return Weight(replace(weight.spec, shape=shape), tensors, transform)


def zeros(weight: Weight) -> Weight:
    """A weight of the same shape whose values are all 0."""
    count = prod(weight.spec.shape)
    stored = weight.spec.shape
    tensor = _made(weight.tensor, stored, _FLOAT, lambda: np.zeros(4 * count, np.uint8))
    if not weight.spec.of_experts:
        return Weight(weight.spec, (tensor,))
    return Weight(weight.spec, tuple(tensor.part(index) for index in range(stored[0])))


def _tensor(
    weight: Weight, rows: range, columns: range | None, shape: tuple[int, ...]
) -> LazyTensor:
    tensor, num_rows = weight.tensor, weight.spec.shape[0]
    places = stored_places(weight.transform, num_rows)[rows.start : rows.stop]
    traits = traits_of(tensor.dtype)
    if weight.transform.transposed:
        assert not traits.quantized, weight.spec

        def turned() -> Bytes:
            values = tensor.raw().reshape(*tensor.shape, traits.block_bytes)
            if columns is not None:
                values = values[columns.start : columns.stop]
            values = values[:, places].swapaxes(0, 1) if values.ndim > 2 else values[places]
            return np.ascontiguousarray(values).reshape(-1)

        return _made(tensor, shape, tensor.dtype, turned)
    if columns is None:
        return _made(tensor, shape, tensor.dtype, lambda: _rows(tensor, places).reshape(-1))
    size = traits.block_elems
    first, last = columns.start // size, -(-columns.stop // size)

    def blocks() -> Bytes:
        stored = _rows(tensor, places, slice(first * traits.block_bytes, last * traits.block_bytes))
        return np.ascontiguousarray(stored).reshape(-1)

    if columns.start % size == 0 and columns.stop % size == 0:
        return _made(tensor, shape, tensor.dtype, blocks)

    def values() -> Bytes:
        decoded = tensor.decode(blocks(), (len(rows), (last - first) * size))
        begin = columns.start - first * size
        part = np.ascontiguousarray(decoded[:, begin : begin + len(columns)], "<f4")
        return part.reshape(-1).view(np.uint8)

    return _made(tensor, shape, _FLOAT, values)


def _rows(tensor: LazyTensor, places: NDArray[np.intp], within: slice = slice(None)) -> Bytes:
    """The stored bytes of some rows, or of some columns of these rows. Neighbouring rows are not
    copied.
    """
    first, last = int(places.min()), int(places.max()) + 1
    stored = tensor.rows(first, last)[:, within]
    is_run = len(places) == last - first and bool((np.diff(places) == 1).all())
    return stored if is_run else stored[places - first]


def _made(
    tensor: LazyTensor, shape: tuple[int, ...], dtype: str, view: Callable[[], Bytes]
) -> LazyTensor:
    return LazyTensor(
        name=tensor.name,
        shape=shape,
        dtype=dtype,
        nbytes=traits_of(dtype).num_bytes(prod(shape)),
        _view=view,
        _dequantize=tensor.decode if dtype == tensor.dtype else partial(dequantize, dtype),
    )
