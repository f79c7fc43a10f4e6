"""The tensors of a file to be written. Each has a name, a storage type and a stream of bytes.

Matrix rows are converted a few megabytes at a time. If the source already has the wanted storage
type, its rows are copied in the target's order, without rounding. Otherwise the values are
dequantized, then quantized to the wanted type.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import Transform
from engine.backends.custom.weights.quantize import fits_rows, quantize
from engine.backends.custom.weights.quants import TRAITS, dequantize, traits_of
from engine.backends.custom.weights.weight import Weight, stored_places

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


Part = tuple[Weight, Transform]  # a weight, and how the target stores it


def stored_tensors(
    weights: Iterable[Weight], to: Literal["gguf", "safetensors"], type_of: Callable[[Weight], str]
) -> list[StoredTensor]:
    """The tensors to be written. `type_of` gives the storage type of a weight. Weights that the
    format stores as one tensor become one; they are float32 if their types differ.
    """
    parts: dict[str, list[Part]] = {}
    for weight in weights:
        spec = weight.spec
        name = spec.gguf if to == "gguf" else spec.hf
        if name is not None:
            transform = spec.gguf_transform if to == "gguf" else spec.hf_transform
            parts.setdefault(name, []).append((weight, transform))
    tensors: list[StoredTensor] = []
    for name, together in parts.items():
        types = {type_of(weight) for weight, _ in together}
        tensors += _stored(name, together, types.pop() if len(types) == 1 else "F32")
    return tensors


def stored_weight(weight: Weight, name: str, transform: Transform, dtype: str) -> StoredTensor:
    """A weight to be written as storage type `dtype`, in the layout that `transform` describes."""
    (tensor,) = _stored(name, [(weight, transform)], dtype)
    return tensor


def _stored(name: str, parts: Sequence[Part], dtype: str) -> Iterator[StoredTensor]:
    weight, transform = parts[0]
    shape = weight.spec.shape
    if not weight.spec.of_experts:
        yield StoredTensor(
            name, transform.stored_shape(shape), dtype, partial(_pieces, parts, dtype)
        )
        return
    of_one = transform.stored_shape(shape[1:])
    experts = [[(each.expert(e), how) for each, how in parts] for e in range(shape[0])]
    if "{e}" in name:
        for e, own in enumerate(experts):
            numbered = name.replace("{e}", str(e))
            yield StoredTensor(numbered, of_one, dtype, partial(_pieces, own, dtype))
        return
    yield StoredTensor(
        name,
        (shape[0], *of_one),
        dtype,
        lambda: chain.from_iterable(_pieces(own, dtype) for own in experts),
    )


def stored_array(values: NDArray[np.float32], name: str) -> StoredTensor:
    """A tensor with these `values`, to be written as float32. It is for tensors that the source
    model does not have.
    """
    return StoredTensor(name, values.shape, "F32", lambda: iter([quantize("F32", values)]))


def gguf_type(weight: Weight, wanted: str | None, tied: bool) -> str:
    """The storage type of a weight in a GGUF file for which the user requested the type `wanted`.
    If `wanted` is None, matrices keep the type that they have.

    Vectors, learned position embeddings and the routers of experts are float32, as llama.cpp
    requires. The output head (or the embeddings tied to it) keeps eight bits.
    """
    spec = weight.spec
    is_vector = len(spec.shape) == (2 if spec.of_experts else 1)
    if is_vector or spec.name == "position.weight" or spec.name.endswith(".router.weight"):
        return "F32"
    if wanted is None:
        now = weight.tensor.dtype
        return now if traits_of(now).type_id is not None else "F16"
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


def _pieces(parts: Sequence[Part], dtype: str) -> Iterator[Bytes]:
    """The bytes of a matrix or vector to be written."""
    weight, transform = parts[0]
    keeps_rows = len(parts) == 1 and not transform.is_part
    if keeps_rows and not transform.transposed and not weight.transform.transposed:
        return _by_rows(weight, transform, dtype)
    return _at_once(parts, dtype)


def _by_rows(weight: Weight, transform: Transform, dtype: str) -> Iterator[Bytes]:
    rows = weight.spec.shape[0]
    columns = prod(weight.spec.shape[1:])
    raw, order, _ = weight.rows()
    source = raw.reshape(rows, -1)
    target = np.argsort(stored_places(transform, rows))
    if order is not None:
        target = order[target]
    moves = not np.array_equal(target, np.arange(rows))
    difference = np.float32(weight.transform.added - transform.added)
    step = max(1, _PIECE_VALUES // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        piece = source[target[part]] if moves else source[part]
        if dtype == weight.tensor.dtype and not difference:
            yield piece.reshape(-1)
        else:
            values = dequantize(weight.tensor.dtype, piece.reshape(-1), (len(piece), columns))
            yield quantize(dtype, values + difference)


def _at_once(parts: Sequence[Part], dtype: str) -> Iterator[Bytes]:
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
        values[stored_places(how, each.spec.shape[0])] = each.numpy() - np.float32(how.added)
    if transform.transposed:
        values = np.ascontiguousarray(values.T)
    step = max(1, _PIECE_VALUES // values.shape[-1])
    for start in range(0, len(values), step):
        yield quantize(dtype, values[start : start + step])


def _keeps_bits(weight: Weight, transform: Transform, dtype: str) -> bool:
    return (
        weight.tensor.dtype == dtype
        and weight.transform.added == transform.added
        and not transform.transposed
        and not (weight.transform.transposed and not weight.transform.is_part)
    )
