"""The tensors that a quantized matrix is stored as, and the one tensor that they become."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.architectures.base import Reader
from engine.core.errors import ModelFormatError
from engine.weights.grouped import Bytes, Floats
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.quants import dequantize, traits_of
from engine.weights.schemes.types import BLOCK

WHERE = "config.json: quantization_config"
_NUMPY = {
    **{"U8": "<u1", "I8": "<i1", "I32": "<i4", "I64": "<i8"},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0"), "<u1"),
}
_PLAIN = ("F32", "F16", "BF16")
_ROWS_AT_ONCE = 512

Tensors = dict[str, LazyTensor]
Rows = Callable[[int, int], Bytes]  # the blocks of rows [begin, end), in any shape
Unsigned = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix, gathered from several tensors."""

    dtype: str
    shape: tuple[int, ...]
    rows: Rows

    def tensor(self, name: str) -> LazyTensor:
        columns = self.shape[-1]
        if columns % BLOCK:
            fail(name, f"has rows of {columns} values; only multiples of {BLOCK} load")
        row_bytes = traits_of(self.dtype).num_bytes(columns)
        num_rows = prod(self.shape[:-1])

        def gathered(begin: int, end: int) -> Bytes:
            out = np.empty((end - begin, row_bytes), np.uint8)
            for start in range(begin, end, _ROWS_AT_ONCE):
                stop = min(start + _ROWS_AT_ONCE, end)
                part = self.rows(start, stop).reshape(stop - start, row_bytes)
                out[start - begin : stop - begin] = part
            return out.reshape(-1)

        return LazyTensor(
            name=name,
            shape=self.shape,
            dtype=self.dtype,
            nbytes=num_rows * row_bytes,
            _view=partial(gathered, 0, num_rows),
            _dequantize=partial(dequantize, self.dtype),
            _rows=gathered,
        )


def fail(name: str, reason: str) -> NoReturn:
    raise ModelFormatError(f"quantized tensor '{name}' {reason}")


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors around the tensor `name`. Those that are taken belong to a quantized matrix."""

    name: str
    tensors: Tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def take(
        self, name: str, dtype: str | tuple[str, ...], shape: tuple[int, ...] | int
    ) -> LazyTensor:
        """Remove a tensor from the rest. `shape` may be only the number of dimensions."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            fail(self.name, f"lacks its '{name}'")
        kinds = (dtype,) if isinstance(dtype, str) else dtype
        if tensor.dtype not in kinds:
            fail(name, f"has dtype {tensor.dtype}, not {' or '.join(kinds)}")
        fits = len(tensor.shape) == shape if isinstance(shape, int) else tensor.shape == shape
        if not fits or 0 in tensor.shape:
            wanted = f"{shape} dimensions" if isinstance(shape, int) else f"shape {list(shape)}"
            fail(name, f"has shape {list(tensor.shape)}, not {wanted}")
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            fail(self.name, f"lacks its '{name}'")
        return self.tensors[name].shape

    def take_floats(self, name: str, shape: tuple[int, ...] | int) -> LazyTensor:
        return self.take(name, _PLAIN, shape)


Found = tuple[str, Matrix] | None
Finder = Callable[[Parts], Found]


def array(tensor: LazyTensor) -> NDArray[Any]:
    """The stored integers or codes."""
    return tensor.raw().view(_NUMPY[tensor.dtype]).reshape(tensor.shape)


def group_size(name: str, columns: int, groups: int) -> int:
    """The size of a group of columns, of which a row has `groups`."""
    size, rest = divmod(columns, groups)
    if rest or size % BLOCK:
        fail(name, f"has {groups} scales for {columns} columns; groups must be multiples of 32")
    return size


def per_block(factors: NDArray[Any], columns: int) -> NDArray[Any]:
    """Factors of groups (r, groups) -> factors of blocks (r, columns / 32, 1)."""
    return np.repeat(factors, columns // factors.shape[1] // BLOCK, axis=1)[..., None]


def float_bytes(factors: Floats) -> Bytes:
    return np.ascontiguousarray(factors, "<f4").view(np.uint8)


def halves_last(values: Unsigned) -> Bytes:
    """(..., 32) 4-bit values -> (..., 16) bytes, with the first 16 values in the low nibbles."""
    return values[..., :16] | (values[..., 16:] << np.uint8(4))


def pairs_last(packed: Bytes) -> Bytes:
    """Bytes with two neighbouring values (..., 16) -> bytes as `halves_last` packs them."""
    values = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return halves_last(values.reshape(*packed.shape[:-1], BLOCK))


def setting(reader: Reader, kind: type, key: str, allowed: tuple[Any, ...]) -> Any:
    """Read a setting that must have one of the `allowed` values. The first is the default."""
    value: Any = reader.read(kind, key, default=allowed[0])
    if value not in allowed:
        shown = ", ".join(map(str, allowed))
        raise ModelFormatError(f"{WHERE}: {key} {value} is not supported (supported: {shown})")
    return value
