"""Runs a kernel and its reference on one example. Compares the results, and also all argument
tensors, because the calls may write to them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.base import Example, KernelSpec, Tolerance


def check(spec: KernelSpec, example: Example) -> None:
    """Raises AssertionError if kernel and reference differ in their results, or in what they write
    to their arguments.
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
    args = [_copy(each) for each in example.args]
    kwargs = {name: _copy(each) for name, each in example.kwargs.items()}
    with torch.no_grad():
        result = call(*args, **kwargs)
    return list(_tensors([result, *args, *kwargs.values()]))


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


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
