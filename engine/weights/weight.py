"""A weight of a model: the stored tensor that has it, and the conversion to the engine's layout.

A stored tensor may have the rows of several weights, such as q, k and v. Row ranges and row orders
are applied to the stored bytes, so quantized rows stay quantized.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.architectures.tensors import TensorSpec, Transform
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quants import for_kernels, kernel_type, traits_of


class StoredRows(NamedTuple):
    """The stored bytes of a matrix. `order` has, for each matrix row in the engine's order, the
    index of the row in `raw`; None if both orders are the same. If `transposed`, `raw` has the
    matrix as (in, out).
    """

    raw: NDArray[np.uint8]
    order: NDArray[np.intp] | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of the model. It has one stored tensor, or one per expert. Where this class speaks
    of experts, a weight may also have a matrix per head.
    """

    spec: TensorSpec
    tensors: tuple[LazyTensor, ...]
    transform: Transform = Transform()

    @property
    def tensor(self) -> LazyTensor:
        """The stored tensor. For experts that are stored one by one: the tensor of the first. All
        have the same shape and storage type.
        """
        return self.tensors[0]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that each stored tensor must have."""
        shape = self.spec.shape
        if not self.spec.of_experts:
            return self.transform.stored_shape(shape)
        of_one = self.transform.stored_shape(shape[1:])
        if self.transform.joined:
            return (shape[0] * of_one[0], *of_one[1:])
        return of_one if self._is_by_expert else (shape[0], *of_one)

    @property
    def nbytes(self) -> int:
        """The stored bytes of this weight alone."""
        return traits_of(self.tensor.dtype).num_bytes(prod(self.spec.shape))

    @property
    def _is_by_expert(self) -> bool:
        return len(self.tensors) > 1 or len(self.tensor.shape) < len(self.spec.shape)

    def expert(self, index: int) -> "Weight":
        """The matrix or bias of one expert."""
        assert self.spec.of_experts, self.spec
        spec = replace(self.spec, shape=self.spec.shape[1:], of_experts=False)
        whole, count = self.tensor, self.spec.shape[0]
        if self.transform.joined:
            stacked = (count, whole.shape[0] // count, *whole.shape[1:])
            return Weight(spec, (replace(whole, shape=stacked).part(index),), self.transform)
        tensor = self.tensors[index] if self._is_by_expert else whole.part(index)
        return Weight(spec, (tensor,), self.transform)

    def row(self, index: int) -> NDArray[np.float32]:
        """One row of a matrix that is stored as it is, as float32. Reads only this row."""
        assert self.transform == Transform() and not self.spec.of_experts, self
        rows, columns = self.spec.shape
        raw = self.tensor.raw().reshape(rows, -1)[index]
        return self.tensor.decode(raw, (columns,))

    def rows(self) -> StoredRows:
        """The stored bytes of a matrix, without the rows of other weights."""
        raw, transform, shape = self.tensor.raw(), self.transform, self.spec.shape
        if transform.is_part:
            raw = self._own_rows(raw)
        is_transposed = transform.turned or (transform.transposed and not transform.is_part)
        return StoredRows(raw, _pair_order(transform, shape[0]), is_transposed)

    @property
    def kernel_dtype(self) -> str:
        """The storage type that `kernel_rows` has."""
        return "F16" if self._is_turned_quantized else kernel_type(self.tensor.dtype)

    def kernel_rows(self) -> StoredRows:
        """As `rows`, but a type without kernels of its own is written as one that has kernels. So
        are quantized rows that become columns.
        """
        rows = self.rows()
        if self._is_turned_quantized:
            values = self.tensor.decode(rows.raw, self.spec.shape[::-1])
            return rows._replace(raw=values.astype(np.float16).reshape(-1).view(np.uint8))
        return rows._replace(raw=for_kernels(self.tensor.dtype, rows.raw))

    @property
    def _is_turned_quantized(self) -> bool:
        """Whether this matrix is stored as its transpose in quantized rows. Columns of quantized
        rows have no scales of their own. Float16 values differ by 2 ** -12 of themselves at most.
        """
        return self.transform.turned and traits_of(self.tensor.dtype).quantized

    def _own_rows(self, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Select the bytes of this weight. They are copied unless they are consecutive."""
        transform = self.transform
        rows = self.spec.shape[1 if transform.turned else 0]
        if transform.transposed:
            size = traits_of(self.tensor.dtype).block_bytes
            values = raw.reshape(*self.tensor.shape, size)  # (in, out, bytes of a value)
            own = values[:, _own_places(transform, rows)]
            return np.ascontiguousarray(own.swapaxes(0, 1)).reshape(-1)
        stored = raw.reshape(self.tensor.shape[0], -1)
        if transform.groups == 1:
            return stored[transform.before : transform.before + rows].reshape(-1)
        return stored[_own_places(transform, rows)].reshape(-1)

    def numpy(self) -> NDArray[np.float32]:
        """The values in the engine's layout, as a new contiguous array."""
        if self.spec.of_experts:
            return np.stack([self.expert(index).numpy() for index in range(self.spec.shape[0])])
        raw, order, transposed = self.rows()
        shape = self.spec.shape
        values = self.tensor.decode(raw, shape[::-1] if transposed else shape)
        if transposed:
            values = np.ascontiguousarray(values.T)
        if order is not None:
            values = values[order]
        if self.transform.added:
            values += np.float32(self.transform.added)
        if self.transform.is_log:
            values = -np.exp(values)
        return values


def stored_places(transform: Transform, num_rows: int) -> NDArray[np.intp]:
    """For each row of a weight in the engine's order, its row in the whole stored matrix."""
    places = _own_places(transform, num_rows)
    order = _pair_order(transform, num_rows)
    return places if order is None else places[order]


def _own_places(transform: Transform, num_rows: int) -> NDArray[np.intp]:
    """The rows that a weight has in the stored matrix, in the stored order."""
    size = num_rows // transform.groups
    stride = transform.before + size + transform.after
    starts = np.arange(transform.groups) * stride + transform.before
    places: NDArray[np.intp] = (starts[:, None] + np.arange(size)).reshape(-1)
    return places


def _pair_order(transform: Transform, num_rows: int) -> NDArray[np.intp] | None:
    """For each row in the engine's order, its index among the rows in the stored order."""
    if not transform.paired:
        return None
    # In the file, the rotated rows of a head interleave the RoPE pairs: 0, R/2, 1, R/2 + 1, ... In
    # the engine's layout, the two halves follow each other. The other rows of the head are before
    # and after them.
    heads = np.arange(num_rows).reshape(-1, transform.head_dim)
    start, end = transform.unpaired, transform.unpaired + transform.paired
    pairs = heads[:, start:end].reshape(len(heads), -1, 2)
    halves = pairs.swapaxes(1, 2).reshape(len(heads), -1)
    return np.concatenate((heads[:, :start], halves, heads[:, end:]), axis=1).reshape(-1)
