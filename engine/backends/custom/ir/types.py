"""The vocabulary of the op table: values, counts, costs, tolerances, and what a row holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# A size is a number or one of the letters
#   T tokens of the step        R tokens whose logits are wanted   S sequences
#   B blocks of a block table   C blocks of the cache              P tokens of a block
Dim = int | str
DType = Literal["f32", "i32", "i64"]
Numerics = Literal["f32", "int8", "bf16"]
Array = NDArray[Any]


class ShapeError(ValueError):
    """An op cannot take these values; the message says why, the caller knows where."""


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor before there is one."""

    shape: tuple[Dim, ...]
    dtype: DType = "f32"

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Counts:
    """The size of a step, for costs."""

    tokens: int
    logits: int
    context: int = 0  # positions that a token sees, in the mean
    sequences: int = 1  # each reads its part of the cache once

    def size(self, value: Value) -> int:
        """How many elements the value has."""
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
    """The largest error allowed to any element, in units of the expected values' mean square root.

    Dot products cancel, so an error relative to each element would say nothing.
    """

    error: float

    def worst(self, got: Array, expected: Array) -> float:
        """The largest error in those units; infinite where `got` is not finite."""
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
    """Arguments that an op's reference can be called with."""

    attributes: Any
    inputs: tuple[Array, ...]
    weights: tuple[Array, ...] = ()


Infer = Callable[[Any, Sequence[Value], Sequence[Value]], Value]
Reference = Callable[[Any, Sequence[Array], Sequence[Array]], Array]
Price = Callable[[Any, Sequence[Value], Sequence[Value], Counts], Cost]
Examples = Callable[[np.random.Generator], Iterator[Example]]


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table: the op's specification, reference and test generator."""

    name: str
    attributes: type
    infer: Infer
    reference: Reference
    tolerances: Mapping[Numerics, Tolerance]
    examples: Examples
    cost: Price
