"""Defines `KernelOp`, an operation with a kernel, and `KernelSpec`: tolerances, examples, min work.

An op is declared as one function, which computes it by PyTorch: its reference. For CUDA tensors the
op runs a kernel instead. A `KernelSpec` has both, so tests can compare them. Tests and the
micro-benchmark use the same examples. Launching a kernel never waits for the device, and the memory
that it allocates depends only on the shapes of its inputs. So each kernel can be captured in a CUDA
graph.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

KERNELS: dict[str, "KernelSpec"] = {}
_PACKAGE = __package__
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model and of its steps. Examples for tests and benchmarks have these sizes."""

    name: str
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rows: tuple[int, ...]  # numbers of tokens per step; there are examples for each
    context: int  # context length of each row, for kernels that depend on it
    block_size: int = 16
    num_experts: int = 16
    experts_per_token: int = 2
    expert_size: int = 1024

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


# The model sizes of TINY are no powers of two, so that the last block of each kernel is partly
# filled.
TINY = Shape(
    "tiny", 96, 160, 6, 2, 24, 130, (1, 3, 17), 37, block_size=4, num_experts=5, expert_size=40
)
LLAMA_1B = Shape("llama-1b", 2048, 8192, 32, 8, 64, 128256, (1, 8, 64, 256, 4096), 384)
LLAMA_8B = Shape("llama-8b", 4096, 14336, 32, 8, 128, 128256, (1, 8, 64, 256, 4096), 384)
QWEN3_30B = Shape(
    "qwen3-30b",
    2048,
    6144,
    32,
    4,
    128,
    151936,
    (1, 8, 64, 256, 4096),
    384,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
)


@dataclass(frozen=True, slots=True)
class Example:
    """The arguments of one call of a kernel. The kernel may write to some of these tensors."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tolerance:
    relative: float
    absolute: float


# Tolerances for results that are computed in float32 and rounded once. In 16 bits, they allow an
# error of one or two units in the last place.
ROUNDED = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
# Tolerances for matmuls, whose sums have another order in the reference, or are rounded on the way.
SUMMED = {
    torch.float32: Tolerance(1e-4, 1e-4),
    torch.float16: Tolerance(1e-2, 1e-2),
    torch.bfloat16: Tolerance(4e-2, 4e-2),
}


class Inputs:
    """Makes random tensors for examples. A fixed seed makes them the same in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device)
        return (values * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(
            high, shape, generator=self._generator, device=self.device, dtype=dtype
        )

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self._generator, device=self.device)


ExampleMaker = Callable[[Shape, torch.device, torch.dtype], Iterator[Example]]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel and how to test and measure it.

    `bytes_of` and `flops_of` take the arguments of a call and return the min work of the call. This
    assumes that each input is read once and each output is written once. The roofline time is the
    time for these bytes or the time for these FLOPs, whichever is longer.
    """

    name: str
    reference: Callable[..., Any]
    triton: Callable[..., Any]
    examples: ExampleMaker
    bytes_of: Callable[..., int]
    flops_of: Callable[..., int] = lambda *_, **__: 0
    tolerance: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: ROUNDED)


def register(spec: KernelSpec) -> KernelSpec:
    assert spec.name not in KERNELS, spec.name
    KERNELS[spec.name] = spec
    return spec


def compiled(path: str) -> Callable[..., Any]:
    """Returns a function that calls a Triton function and imports its module at the first call.
    `path` is "module:function", with a module of `kernels/triton`.
    """
    module, _, name = path.partition(":")

    @cache
    def found() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"{_PACKAGE}.triton.{module}"), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return found()(*args, **kwargs)

    return call


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them. Triton decides this
    when a kernel is defined, so it never changes within a process.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(tensor: Tensor) -> bool:
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return (tensor.is_cuda or interpreting()) and _has_triton()


class KernelOp(Generic[P, R]):
    """An operation that runs `triton` if that suits its first argument, and `reference` otherwise,
    which is also run if a gradient is needed.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        triton: Callable[P, R],
        suits: Callable[[Any], bool] = use_triton,
    ) -> None:
        update_wrapper(self, reference)
        self.name, self.reference, self.triton = name, reference, triton
        self._suits = suits

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        learns = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in([*args, *kwargs.values()])
        )
        run = self.triton if self._suits(args[0]) and not learns else self.reference
        return run(*args, **kwargs)

    def specify(self, examples: ExampleMaker, bytes_of: Callable[..., int], **rest: Any) -> None:
        """Registers the op's `KernelSpec`. `rest` are further fields of it."""
        register(KernelSpec(self.name, self.reference, self.triton, examples, bytes_of, **rest))


def op(
    path: str, suits: Callable[[Any], bool] = use_triton
) -> Callable[[Callable[P, R]], KernelOp[P, R]]:
    """Makes a reference the op whose kernel is at `path` (see `compiled`)."""
    name = path.partition(":")[2]
    return lambda reference: KernelOp(name, reference, compiled(path), suits)


def load_all() -> Mapping[str, KernelSpec]:
    """The specs of all kernels by name. Imports all modules of the package."""
    for module in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__):
        importlib.import_module(f"{_PACKAGE}.{module.name}")
    return KERNELS


def size_of(*tensors: Tensor | None) -> int:
    """The number of bytes of all elements of the tensors together. None counts as 0."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def check(spec: KernelSpec, example: Example) -> None:
    """Compares a kernel with its reference on one example. Raises AssertionError if they differ in
    their results, or in what they write to their arguments.
    """
    expected = outcome(spec.reference, example)
    actual = outcome(spec.triton, example)
    tolerance = _tolerance(spec, expected)
    assert len(actual) == len(expected), (spec.name, example.label, len(actual), len(expected))
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        where = f"{spec.name}, {example.label}, tensor {index}"
        _compare(ours, theirs, tolerance, where)


def outcome(call: Any, example: Example) -> list[Tensor]:
    """Runs `call` on copies of the example's tensors. Returns its results, then these copies, which
    the call may have modified.
    """
    args = [copied(each) for each in example.args]
    kwargs = {name: copied(each) for name, each in example.kwargs.items()}
    with torch.no_grad():
        result = call(*args, **kwargs)
    return list(tensors_in([result, *args, *kwargs.values()]))


def copied(value: Any) -> Any:
    """A copy of a tensor with the same strides, or of a tuple of tensors. What lies between a
    tensor's values in memory is copied too, because a float8 cache has its scales there.
    """
    if isinstance(value, tuple):
        copies = map(copied, value)
        return tuple(copies) if type(value) is tuple else type(value)(*copies)
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype, device=value.device)
    return copy.set_(storage, value.storage_offset(), value.shape, value.stride())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _tolerance(spec: KernelSpec, tensors: list[Tensor]) -> Tolerance:
    """The largest tolerance for any dtype among the tensors."""
    found = [spec.tolerance[t.dtype] for t in tensors if t.dtype in spec.tolerance]
    return max(found, key=lambda tolerance: tolerance.relative)


def _compare(actual: Tensor, expected: Tensor, tolerance: Tolerance, where: str) -> None:
    assert actual.dtype == expected.dtype, (where, actual.dtype, expected.dtype)
    if actual.dtype.is_floating_point:
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(
        actual,
        expected,
        rtol=tolerance.relative if actual.dtype.is_floating_point else 0,
        atol=tolerance.absolute if actual.dtype.is_floating_point else 0,
        equal_nan=True,
        msg=lambda message: f"{where}: {message}",
    )
