"""Types that the op table uses: shapes, step sizes, costs and tolerances. In a shape, a letter
stands for a size that differs between steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

# A dimension is a number, or one of these letters if its size differs between steps:
#   T tokens of the step        R tokens whose logits are needed   S sequences
#   B blocks of a block table   C blocks of the KV cache           P tokens per block
Dim = int | str
DType = Literal["f32", "i32", "i64"]
Numerics = Literal["f32", "int8", "bf16", "int8_outliers"]
Array = NDArray[Any]


class ShapeError(ValueError):
    """An op cannot take these inputs. The message says why. The caller adds the node's name."""


class Value(msgspec.Struct, frozen=True):
    """A tensor's shape and dtype, known before the tensor exists."""

    shape: tuple[Dim, ...]
    dtype: DType = "f32"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Counts(msgspec.Struct, frozen=True):
    """The size of an engine step, for cost estimates."""

    tokens: int
    logits: int
    context: int = 0  # mean number of positions that a token attends to
    sequences: int = 1  # number of sequences; the keys and values of each are read once

    def size(self, value: Value) -> int:
        """Number of elements of a tensor in a step of this size."""
        total = 1
        for dim in value.shape:
            total *= dim if isinstance(dim, int) else self._letter(dim)
        return total

    def _letter(self, letter: str) -> int:
        sizes = {"T": self.tokens, "R": self.logits, "S": self.sequences}
        if letter not in sizes:
            raise ShapeError(f"the size {letter} is not part of a step")
        return sizes[letter]


class Cost(msgspec.Struct, frozen=True):
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


class OpTolerance(msgspec.Struct, frozen=True):
    """The largest error that an element may have, relative to the root mean square of the expected
    tensor.

    Errors are not relative to single elements, because the terms of a dot product may cancel to
    almost zero.
    """

    error: float

    def worst(self, got: Array, expected: Array) -> float:
        """The largest error of an element, relative to the root mean square of `expected`. The
        result is infinite if `got` has values that are not finite.
        """
        wide = expected.astype(np.float64)
        if not wide.size:
            return 0.0
        unit = max(float(np.sqrt(np.mean(np.square(wide)))), 1e-12)
        worst = float(np.max(np.abs(got.astype(np.float64) - wide))) / unit
        return worst if np.isfinite(worst) else float("inf")

    def accepts(self, got: Array, expected: Array) -> bool:
        return got.shape == expected.shape and self.worst(got, expected) <= self.error


class OpExample(msgspec.Struct, frozen=True):
    """Test arguments for one call of an op."""

    attributes: Any
    inputs: tuple[Array, ...]
    weights: tuple[Array, ...] = ()


Infer = Callable[[Any, Sequence[Value], Sequence[Value]], Value]
Reference = Callable[[Any, Sequence[Array], Sequence[Array]], Array]
Price = Callable[[Any, Sequence[Value], Sequence[Value], Counts], Cost]
Examples = Callable[["np.random.Generator"], Iterator[OpExample]]  # quoted: its import takes time


class Op(msgspec.Struct, frozen=True):
    """An entry of the op table. `infer` returns the shape of the result, `reference` computes the
    op in numpy, `examples` yields arguments for tests, and `cost` estimates bytes and FLOPs.
    """

    name: str
    attributes: type
    infer: Infer
    reference: Reference
    tolerances: Mapping[Numerics, OpTolerance]
    examples: Examples
    cost: Price
