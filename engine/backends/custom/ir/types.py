"""Types of the op table: values, counts, costs, tolerances, and dimension letters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# A dimension is a number or one of the letters
#   T tokens of the step        R tokens whose logits are wanted   S sequences
#   B blocks of a block table   C blocks of the cache              P block size
Dim = int | str
DType = Literal["f32", "i32", "i64"]
Numerics = Literal["f32", "int8", "bf16"]
Array = NDArray[Any]


class ShapeError(ValueError):
    """An op cannot take these values; the message says why, the caller adds the node."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor's shape and dtype, known before the tensor exists."""

    shape: tuple[Dim, ...]
    dtype: DType = "f32"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Counts:
    """The size of a step, for cost estimates."""

    tokens: int
    logits: int
    context: int = 0  # mean number of positions that a token sees
    sequences: int = 1  # each sequence's part of the cache is read once

    def size(self, value: Value) -> int:
        """Number of elements of the value."""
        total = 1
        for dim in value.shape:
            total *= dim if isinstance(dim, int) else self._letter(dim)
        return total

    def _letter(self, letter: str) -> int:
        sizes = {"T": self.tokens, "R": self.logits, "S": self.sequences}
        if letter not in sizes:
            raise ShapeError(f"the size {letter} is not part of a step")
        return sizes[letter]


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The max error of any element, in units of the expected values' root mean square.

    Dot products cancel, so an error relative to each element would be meaningless.
    """

    error: float

    def worst(self, got: Array, expected: Array) -> float:
        """The max error in those units; infinite if `got` is not finite."""
        wide = expected.astype(np.float64)
        if not wide.size:
            return 0.0
        unit = max(float(np.sqrt(np.mean(np.square(wide)))), 1e-12)
        worst = float(np.max(np.abs(got.astype(np.float64) - wide))) / unit
        return worst if np.isfinite(worst) else float("inf")

    def accepts(self, got: Array, expected: Array) -> bool:
        return got.shape == expected.shape and self.worst(got, expected) <= self.error


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments for one call of an op's reference."""

    attributes: Any
    inputs: tuple[Array, ...]
    weights: tuple[Array, ...] = ()


Infer = Callable[[Any, Sequence[Value], Sequence[Value]], Value]
Reference = Callable[[Any, Sequence[Array], Sequence[Array]], Array]
Price = Callable[[Any, Sequence[Value], Sequence[Value], Counts], Cost]
Examples = Callable[[np.random.Generator], Iterator[Example]]


@dataclass(frozen=True, slots=True)
class Op:
    """One op: its shape inference, reference, tolerances, examples and cost."""

    name: str
    attributes: type
    infer: Infer
    reference: Reference
    tolerances: Mapping[Numerics, Tolerance]
    examples: Examples
    cost: Price
