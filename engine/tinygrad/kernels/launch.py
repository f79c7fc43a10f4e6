"""Helpers for custom kernels. A kernel is written as loops over tinygrad's operations (`UOp`).
tinygrad compiles the kernel for any device.
"""

from collections.abc import Callable

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import AxisType, KernelInfo

MAX_LANES = 16
# A function that defines a kernel. It gets the buffers of the tensors and returns the store of one
# element and the loops around that store.
Body = Callable[..., tuple[UOp, tuple[UOp, ...]]]


def launch(
    name: str,
    body: Body,
    *tensors: Tensor,
    bound: UOp | None = None,
    as_written: bool = False,
) -> list[Tensor]:
    """Runs a kernel and returns the tensors as they are afterwards. `bound` is a tinygrad variable
    with a value, at which loops of the kernel may end. With `as_written`, tinygrad compiles the
    loops as they are. Otherwise it vectorizes them and distributes them over threads.
    """
    sources = [tensor.uop for tensor in tensors]
    places = [UOp.placeholder_like(source, slot) for slot, source in enumerate(sources)]
    store, loops = body(*places)
    info = KernelInfo(name=name, opts_to_apply=() if as_written else None)
    call = store.end(*loops).sink(arg=info).call(*sources, *(() if bound is None else (bound,)))
    return [Tensor(source.after(call)) for source in sources]


def inside(bound: UOp) -> UOp:
    """Converts a tinygrad variable with a value to the same variable without a value. A kernel's
    code uses the latter.
    """
    variable, _ = bound.unbind()
    return UOp.variable(variable.expr, variable.vmin, variable.vmax, param=True)


def loop(size: int | UOp, number: int) -> UOp:
    return UOp.range(size, number)


def reduction(size: int | UOp, number: int) -> UOp:
    return UOp.range(size, number, AxisType.REDUCE)


def index(value: UOp) -> UOp:
    """Loads an integer and casts it to tinygrad's index type."""
    return value.load().cast(dtypes.weakint)


def lanes(size: int, number: int) -> tuple[UOp, tuple[UOp, UOp]]:
    """Splits a loop over `size` elements into two nested loops. The inner loop runs over the lanes
    of a vector. Returns the index of the element and both loops.
    """
    width = next(width for width in range(min(size, MAX_LANES), 0, -1) if size % width == 0)
    outer, inner = UOp.range(size // width, number), UOp.range(width, number + 1, AxisType.UPCAST)
    return outer * width + inner, (outer, inner)
