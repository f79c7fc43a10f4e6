"""A checkpoint tensor whose bytes are read on first use."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.weights.files import FileBytes


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """One named tensor in a mapped file. `shape` is row-major: (out, in) for a matrix.

    `dtype` is the storage type in GGUF spelling ("F32", "BF16", "Q4_1", ...). For every type, each
    matrix row is contiguous in the stored bytes, so rows can be selected or reordered without
    dequantizing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    _view: Callable[[], NDArray[np.uint8]]
    _dequantize: Callable[[NDArray[np.uint8], tuple[int, ...]], NDArray[np.float32]]
    # The bytes of rows [begin, end). Only tensors have it that are gathered from several stored
    # tensors when they are read.
    _rows: Callable[[int, int], NDArray[np.uint8]] | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether the bytes come from several stored tensors."""
        return self._rows is not None

    def raw(self) -> NDArray[np.uint8]:
        """The stored bytes as a read-only flat view of the mapping, without a copy. A tensor that
        is gathered from several stored tensors returns new memory.
        """
        return self._view()

    def rows(self, begin: int, end: int) -> NDArray[np.uint8]:
        """The stored bytes of the rows [begin, end) of a matrix, or of these values of a vector:
        (rows, bytes of a row). Reads only them.
        """
        if self._rows is not None:
            return self._rows(begin, end).reshape(end - begin, -1)
        return self.raw().reshape(self.shape[0], -1)[begin:end]

    def sample(self, count: int) -> NDArray[np.uint8]:
        """Some of the stored bytes. For a gathered tensor: `count` rows, which may repeat."""
        if self._rows is None:
            return self.raw()
        rows = np.linspace(0, prod(self.shape[:-1]) - 1, count, dtype=np.intp)
        return np.concatenate([self._rows(row, row + 1) for row in rows])

    def decode(self, raw: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The values of some stored bytes, which may be a part of the tensor, as float32."""
        return self._dequantize(raw, shape)

    def numpy(self) -> NDArray[np.float32]:
        """The values as float32. Reads and dequantizes the whole tensor."""
        return self._dequantize(self.raw(), self.shape)

    def part(self, index: int) -> "LazyTensor":
        """One of the tensors that are stacked along the first dimension."""
        size = self.nbytes // self.shape[0]
        if (gathered := self._rows) is not None:
            first = index * prod(self.shape[1:-1])
            last = first + prod(self.shape[1:-1])
            return replace(
                self,
                shape=self.shape[1:],
                nbytes=size,
                _view=lambda: gathered(first, last),
                _rows=lambda begin, end: gathered(first + begin, first + end),
            )
        return replace(
            self,
            shape=self.shape[1:],
            nbytes=size,
            _view=lambda: self.raw()[index * size : (index + 1) * size],
        )


class Checkpoint(Protocol):
    """An opened set of weight files. `tensors` maps the stored names to lazy tensors.

    After `close`, tensors can no longer be read. Views that were taken before stay valid.
    """

    @property
    def tensors(self) -> dict[str, LazyTensor]: ...

    @property
    def format(self) -> str:
        """The file format, "gguf" or "safetensors". It decides under which names the tensors are
        looked up.
        """
        ...

    @property
    def files(self) -> list[FileBytes]: ...

    def close(self) -> None: ...
