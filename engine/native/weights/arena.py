"""Computes the offset of each packed weight in one memory arena, before any weight is read.

The offsets depend only on the shapes and storage types of the weights. So a file of packed weights
needs no table of contents, and no offset is ever read from a file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelFormatError
from engine.native import _native
from engine.weights.model import ModelSource

PANEL_ROWS = 16
_ALIGNMENT = 64


class MatrixParts(Protocol):
    """A matrix as a kernel reads it. It consists of one or more weights of the model, for example
    of q, k and v. `parts` are their names. `biases` has one name per part, or is empty.

    If the matrix is interleaved, panels of 16 rows from each part alternate. If `experts` is above
    0, there are that many such matrices, one after the other.
    """

    @property
    def name(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def biases(self) -> tuple[str, ...]: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def experts(self) -> int: ...


class Panels(NamedTuple):
    """A matrix that is packed in panels of 16 rows. If parts are interleaved, `rows` counts their
    padding rows; otherwise it does not count the padding rows that fill the last panel.
    """

    layout: int
    rows: int
    columns: int
    data: NDArray[np.uint8]


class MatrixPlace(msgspec.Struct, frozen=True):
    offset: int
    num_bytes: int
    layout: int
    rows: int
    columns: int


class VectorPlace(msgspec.Struct, frozen=True):
    offset: int
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * prod(self.shape)


Place = TypeVar("Place", MatrixPlace, VectorPlace)


@dataclass(slots=True)
class ArenaPlan:
    """The place of each weight in the arena, by name. A bias has the name of its matrix."""

    matrices: dict[str, MatrixPlace] = field(default_factory=dict)
    biases: dict[str, VectorPlace] = field(default_factory=dict)
    vectors: dict[str, VectorPlace] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, place: Place) -> Place:
        """Appends a place to the arena and returns this place. The next place may start at the next
        multiple of 64 bytes.
        """
        self.num_bytes = _round_up(place.offset + place.num_bytes, _ALIGNMENT)
        return place

    def floats(self, arena: NDArray[np.uint8], place: VectorPlace) -> NDArray[np.float32]:
        raw = arena[place.offset : place.offset + place.num_bytes]
        return raw.view(np.float32).reshape(place.shape)

    def bytes_of(self, arena: NDArray[np.uint8], place: MatrixPlace) -> NDArray[np.uint8]:
        return arena[place.offset : place.offset + place.num_bytes]


def plan_arena(
    source: ModelSource, matrices: Sequence[MatrixParts], vectors: Sequence[str]
) -> ArenaPlan:
    """Assigns an offset to each weight: first to the vectors, then to the matrices in the given
    order. The bias of a matrix is directly before the matrix.
    """
    plan = ArenaPlan()
    for name in vectors:
        plan.vectors[name] = plan.add(VectorPlace(plan.num_bytes, source.weights[name].spec.shape))
    for matrix in matrices:
        if matrix.biases:
            rows = max(1, matrix.experts) * _padded_rows(source, matrix)
            plan.biases[matrix.name] = plan.add(VectorPlace(plan.num_bytes, (rows,)))
        place = _matrix_place(source, matrix, plan.num_bytes)
        plan.matrices[matrix.name] = plan.add(place)
    return plan


def stacked_bias(source: ModelSource, matrix: MatrixParts) -> NDArray[np.float32]:
    """The biases of all parts of a matrix as one vector, in the order of the matrix's rows. The
    bias of a padding row is 0. The vectors of experts follow each other.
    """
    parts = [source.weights[name].numpy() for name in matrix.biases]
    rows = _padded_rows(source, matrix)
    if not matrix.experts:
        return _stack(parts, rows, matrix.interleaved)
    each = [[part[expert] for part in parts] for expert in range(matrix.experts)]
    return np.concatenate([_stack(biases, rows, matrix.interleaved) for biases in each])


def _stack(
    parts: Sequence[NDArray[np.float32]], num_rows: int, interleaved: bool
) -> NDArray[np.float32]:
    stacked = np.zeros(num_rows, np.float32)
    if interleaved:
        panels = stacked.reshape(-1, len(parts), PANEL_ROWS)
        for index, part in enumerate(parts):
            rows = np.zeros(panels.shape[0] * PANEL_ROWS, np.float32)
            rows[: part.size] = part
            panels[:, index] = rows.reshape(-1, PANEL_ROWS)
    else:
        whole = np.concatenate(parts)
        stacked[: whole.size] = whole
    return stacked


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _rows(source: ModelSource, matrix: MatrixParts) -> int:
    rows = [source.weights[name].spec.shape[-2] for name in matrix.parts]
    return sum(_round_up(count, PANEL_ROWS) for count in rows) if matrix.interleaved else sum(rows)


def _padded_rows(source: ModelSource, matrix: MatrixParts) -> int:
    return _round_up(_rows(source, matrix), PANEL_ROWS)


def _matrix_place(source: ModelSource, matrix: MatrixParts, offset: int) -> MatrixPlace:
    weights = [source.weights[name] for name in matrix.parts]
    layouts = {_native.layout_of(weight.kernel_dtype) for weight in weights}
    columns = {weight.spec.shape[-1] for weight in weights}
    if len(layouts) != 1 or len(columns) != 1:
        raise ModelFormatError(
            f"{source.path.name}: the parts of '{matrix.name}' differ in layout or columns: "
            + ", ".join(f"{weight.tensor.dtype} {weight.spec.shape}" for weight in weights)
        )
    (layout,), (width,) = layouts, columns
    panels = max(1, matrix.experts) * _padded_rows(source, matrix) // PANEL_ROWS
    num_bytes = panels * _native.panel_bytes(layout, width)
    return MatrixPlace(offset, num_bytes, layout, _rows(source, matrix), width)
