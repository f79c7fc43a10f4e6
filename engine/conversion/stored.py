"""The tensors of a file to be written. Each has a name, a storage type and a stream of bytes.

Matrix rows are converted a few megabytes at a time. If the source already has the wanted storage
type, its rows are copied in the target's order, without rounding. Otherwise the values are
dequantized, then quantized to the wanted type.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.architectures.tensors import Transform
from engine.core.errors import ModelFormatError
from engine.weights.quantize import quantize
from engine.weights.quants import TRAITS, dequantize, traits_of
from engine.weights.weight import Weight, stored_places

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
EMPTY: Mapping[str, Floats] = {}

_PIECE_VALUES = 4 * 2**20  # max number of values converted at a time
PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor to be written. `shape` is row-major, in the layout of the target. `pieces` returns
    the bytes in chunks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterator[Bytes]]

    @property
    def nbytes(self) -> int:
        return traits_of(self.dtype).num_bytes(prod(self.shape))


Part = tuple[Weight, Transform]  # a weight, and how the target stores it


def stored_tensors(
    weights: Iterable[Weight],
    to: Literal["gguf", "safetensors"],
    type_of: Callable[[Weight], str],
    importance: Mapping[str, Floats] = EMPTY,
) -> list[TargetTensor]:
    """The tensors to be written. `type_of` gives the storage type of a weight. Weights that the
    format stores as one tensor become one; they are float32 if their types differ. `importance` has
    the weights of columns, (experts or 1, columns), by the name of the tensor.
    """
    parts: dict[str, list[Part]] = {}
    for weight in weights:
        spec = weight.spec
        name = spec.gguf if to == "gguf" else spec.hf
        if name is not None:
            transform = spec.gguf_transform if to == "gguf" else spec.hf_transform
            parts.setdefault(name, []).append((weight, transform))
    tensors: list[TargetTensor] = []
    for name, together in parts.items():
        types = {type_of(weight) for weight, _ in together}
        dtype = types.pop() if len(types) == 1 else "F32"
        tensors += _stored(name, together, dtype, importance.get(name))
    return tensors


def stored_weight(weight: Weight, name: str, transform: Transform, dtype: str) -> TargetTensor:
    """A weight to be written as storage type `dtype`, in the layout that `transform` describes."""
    (tensor,) = _stored(name, [(weight, transform)], dtype)
    return tensor


def _stored(
    name: str, parts: Sequence[Part], dtype: str, importance: Floats | None = None
) -> Iterator[TargetTensor]:
    weight, transform = parts[0]
    shape = weight.spec.shape
    count = shape[0] if weight.spec.of_experts else 1
    columns: list[Floats | None] = [None] * count
    if importance is not None:
        if importance.shape[1] != shape[-1] or len(importance) not in (1, count):
            raise ModelFormatError(
                f"the importance matrix has shape {list(importance.shape)} for '{name}', "
                f"which has {shape[-1]} columns; it belongs to another model"
            )
        columns = list(np.broadcast_to(importance, (count, shape[-1])))
    if not weight.spec.of_experts:
        stored = transform.stored_shape(shape)
        yield TargetTensor(name, stored, dtype, partial(_pieces, parts, dtype, columns[0]))
        return
    of_one = transform.stored_shape(shape[1:])
    experts = [[(each.expert(e), how) for each, how in parts] for e in range(shape[0])]
    if "{e}" in name:
        for e, own in enumerate(experts):
            numbered = name.replace("{e}", str(e))
            yield TargetTensor(numbered, of_one, dtype, partial(_pieces, own, dtype, columns[e]))
        return
    yield TargetTensor(
        name,
        (shape[0] * of_one[0], *of_one[1:]) if transform.joined else (shape[0], *of_one),
        dtype,
        lambda: chain.from_iterable(
            _pieces(own, dtype, each) for own, each in zip(experts, columns, strict=True)
        ),
    )


def stored_array(values: NDArray[np.float32], name: str) -> TargetTensor:
    """A tensor with these `values`, to be written as float32. It is for tensors that the source
    model does not have.
    """
    return TargetTensor(name, values.shape, "F32", lambda: iter([quantize("F32", values)]))


def plain_type(weight: Weight, wanted: str | None) -> str:
    """The storage type of a weight in a safetensors file: the `wanted` type. If `wanted` is None, a
    float type is kept, and a quantized type becomes float32.
    """
    now = weight.tensor.dtype
    return wanted or (now if now in PLAIN_TYPES else "F32")


def most_bytes(tensors: Iterable[TargetTensor]) -> str:
    """The storage type that most bytes of the tensors have."""
    sizes = dict.fromkeys(TRAITS, 0)
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _pieces(parts: Sequence[Part], dtype: str, importance: Floats | None = None) -> Iterator[Bytes]:
    """The bytes of a matrix or vector to be written. `importance` has a weight for each column."""
    weight, transform = parts[0]
    keeps_rows = len(parts) == 1 and not transform.is_part and not weight.transform.turned
    if keeps_rows and not transform.transposed and not weight.transform.transposed:
        return _by_rows(weight, transform, dtype, importance)
    return _at_once(parts, dtype, importance)


def _by_rows(
    weight: Weight, transform: Transform, dtype: str, importance: Floats | None
) -> Iterator[Bytes]:
    rows = weight.spec.shape[0]
    columns = prod(weight.spec.shape[1:])
    raw, order, _ = weight.rows()
    source = raw.reshape(rows, -1)
    target = np.argsort(stored_places(transform, rows))
    if order is not None:
        target = order[target]
    moves = not np.array_equal(target, np.arange(rows))
    difference = np.float32(weight.transform.added - transform.added)
    keeps_log = weight.transform.is_log == transform.is_log
    step = max(1, _PIECE_VALUES // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        piece = source[target[part]] if moves else source[part]
        if dtype == weight.tensor.dtype and not difference and keeps_log:
            yield piece.reshape(-1)
        else:
            values = dequantize(weight.tensor.dtype, piece.reshape(-1), (len(piece), columns))
            if not keeps_log:
                values = np.log(-values) if transform.is_log else -np.exp(values)
            yield quantize(dtype, values + difference, importance)


def _at_once(parts: Sequence[Part], dtype: str, importance: Floats | None) -> Iterator[Bytes]:
    """Convert a matrix that is made of several weights, or that is transposed in one of the
    formats. The whole matrix is converted at once, because its rows come from several places.
    """
    weight, transform = parts[0]
    shape = replace(transform, transposed=False).stored_shape(weight.spec.shape)
    if all(_keeps_bits(each, how, dtype) for each, how in parts):
        size = weight.nbytes // weight.spec.shape[0]
        stored = np.empty((shape[0], size), np.uint8)
        for each, how in parts:
            rows = each.spec.shape[0]
            raw, order, _ = each.rows()
            own = raw.reshape(rows, size)
            stored[stored_places(how, rows)] = own if order is None else own[order]
        yield stored.reshape(-1)
        return
    values = np.empty(shape, np.float32)
    for each, how in parts:
        ours = each.numpy() - np.float32(how.added)
        ours = ours.T if how.turned else ours
        values[stored_places(how, len(ours))] = ours
    if transform.transposed:
        values = np.ascontiguousarray(values.T)
    step = max(1, _PIECE_VALUES // values.shape[-1])
    for start in range(0, len(values), step):
        yield quantize(dtype, values[start : start + step], importance)


def _keeps_bits(weight: Weight, transform: Transform, dtype: str) -> bool:
    return (
        weight.tensor.dtype == dtype
        and weight.transform.added == transform.added
        and not transform.transposed
        and not transform.turned
        and not weight.transform.turned
        and not (weight.transform.transposed and not weight.transform.is_part)
    )
