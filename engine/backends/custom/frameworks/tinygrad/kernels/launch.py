"""Custom kernels: written as loops over tinygrad's operations, compiled for any device."""

from collections.abc import Callable

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import AxisType, KernelInfo

MAX_LANES = 16
# From the tensors' buffers to the store of one element, and the loops around it.
Body = Callable[..., tuple[UOp, tuple[UOp, ...]]]


def launch(
    name: str,
    body: Body,
    *tensors: Tensor,
    bound: UOp | None = None,
    as_written: bool = False,
) -> list[Tensor]:
    """Returns the tensors after the kernel has run. `bound` is a bound variable at which loops may
    end. tinygrad vectorizes and threads the loops unless they stay `as_written`.
    """
    sources = [tensor.uop for tensor in tensors]
    places = [UOp.placeholder_like(source, slot) for slot, source in enumerate(sources)]
    store, loops = body(*places)
    info = KernelInfo(name=name, opts_to_apply=() if as_written else None)
    call = store.end(*loops).sink(arg=info).call(*sources, *(() if bound is None else (bound,)))
    return [Tensor(source.after(call)) for source in sources]


def inside(bound: UOp) -> UOp:
    """A bound variable as the kernel sees it: without its value."""
    variable, _ = bound.unbind()
    return UOp.variable(variable.expr, variable.vmin, variable.vmax, param=True)


def loop(size: int | UOp, number: int) -> UOp:
    return UOp.range(size, number)


def reduction(size: int | UOp, number: int) -> UOp:
    return UOp.range(size, number, AxisType.REDUCE)


def index(value: UOp) -> UOp:
    """Casts a loaded integer to an index."""
    return value.load().cast(dtypes.weakint)


def lanes(size: int, number: int) -> tuple[UOp, tuple[UOp, UOp]]:
    """An index over `size`, and its two loops, of which the inner one runs over vector lanes."""
    width = next(width for width in range(min(size, MAX_LANES), 0, -1) if size % width == 0)
    outer, inner = UOp.range(size // width, number), UOp.range(width, number + 1, AxisType.UPCAST)
    return outer * width + inner, (outer, inner)
