"""The tensors of a file to be written. Each has a name, a storage type and a stream of bytes.

Matrix rows are converted a few megabytes at a time. If the source already has the wanted storage
type, its rows are copied in the target's order, without rounding. Otherwise the values are
dequantized, then quantized to the wanted type.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import Transform
from engine.backends.custom.weights.model import Weight, row_order
from engine.backends.custom.weights.quantize import fits_rows, quantize
from engine.backends.custom.weights.quants import TRAITS, dequantize, traits_of

Bytes = NDArray[np.uint8]

_PIECE_VALUES = 4 * 2**20  # max number of values converted at a time
PLAIN_TYPES = ("F32", "F16", "BF16")
_LOGITS_TYPE = "Q8_0"  # storage type of the LM head (or tied embeddings) in 4-bit models
_FOUR_BITS = ("Q4_0", "Q4_K")
# For each storage type, the type to try next if the row length is not a multiple of its block size.
_NARROWER_BLOCKS = {"Q4_K": "Q5_0", "Q5_0": "F16", "Q4_0": "F16", "Q8_0": "F16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
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


def stored_weight(weight: Weight, name: str, transform: Transform, dtype: str) -> StoredTensor:
    """A weight to be written with storage type `dtype`. `transform` describes the target layout."""
    shape = weight.spec.shape[::-1] if transform == "transpose" else weight.spec.shape
    is_transposed = "transpose" in (transform, weight.transform)

    def pieces() -> Iterator[Bytes]:
        return (
            _transposed(weight, transform, dtype)
            if is_transposed
            else _by_rows(weight, transform, dtype)
        )

    return StoredTensor(name, shape, dtype, pieces)


def stored_array(values: NDArray[np.float32], name: str) -> StoredTensor:
    """A tensor with these `values`, to be written as float32. It is for tensors that the source
    model does not have.
    """
    return StoredTensor(name, values.shape, "F32", lambda: iter([quantize("F32", values)]))


def gguf_type(weight: Weight, wanted: str | None, tied: bool) -> str:
    """The storage type of a weight in a GGUF file for which the user requested the type `wanted`.
    If `wanted` is None, matrices keep the type that they have.

    Vectors and learned position embeddings are float32, as llama.cpp requires. In a 4-bit model,
    the LM head (or the embeddings tied to it) has eight bits.
    """
    spec = weight.spec
    if len(spec.shape) == 1 or spec.name == "position.weight":
        return "F32"
    if wanted is None:
        return weight.tensor.dtype
    if wanted in _FOUR_BITS and spec.name == ("embed.weight" if tied else "head.weight"):
        wanted = _LOGITS_TYPE
    while not fits_rows(wanted, spec.shape[-1]):
        wanted = _NARROWER_BLOCKS[wanted]
    return wanted


def plain_type(weight: Weight, wanted: str | None) -> str:
    """The storage type of a weight in a safetensors file: the `wanted` type. If `wanted` is None, a
    float type is kept, and a quantized type becomes float32.
    """
    now = weight.tensor.dtype
    return wanted or (now if now in PLAIN_TYPES else "F32")


def most_bytes(tensors: Iterable[StoredTensor]) -> str:
    """The storage type that most bytes of the tensors have."""
    sizes = dict.fromkeys(TRAITS, 0)
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _by_rows(weight: Weight, transform: Transform, dtype: str) -> Iterator[Bytes]:
    tensor = weight.tensor
    rows = weight.spec.shape[0]
    columns = prod(weight.spec.shape[1:])
    source = tensor.raw().reshape(rows, -1)
    order = _order(weight, transform)
    step = max(1, _PIECE_VALUES // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        raw = source[part] if order is None else source[order[part]]
        if dtype == tensor.dtype:
            yield raw.reshape(-1)
        else:
            values = dequantize(tensor.dtype, raw.reshape(-1), (len(raw), columns))
            yield quantize(dtype, values)


def _order(weight: Weight, transform: Transform) -> NDArray[np.intp] | None:
    """For each row of the target, the index of the same row in the source file. None if both files
    have the same order.
    """
    if transform == weight.transform:
        return None
    source = weight.row_order()
    target = row_order(transform, weight.spec.shape[0], weight.head_dim)
    ours = None if target is None else np.argsort(target)
    if ours is None or source is None:
        return source if ours is None else ours
    return source[ours]


def _transposed(weight: Weight, transform: Transform, dtype: str) -> Iterator[Bytes]:
    """Convert a matrix that is transposed in the source or the target. The whole matrix is
    dequantized at once, because each row of the target has a value from every row of the source.
    """
    values = weight.numpy()
    if transform == "transpose":
        values = np.ascontiguousarray(values.T)
    step = max(1, _PIECE_VALUES // values.shape[-1])
    for start in range(0, len(values), step):
        yield quantize(dtype, values[start : start + step])
