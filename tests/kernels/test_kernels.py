"""Every kernel against its reference, on tiny shapes that leave every block partly filled."""

import pytest
import torch

from engine.torch.kernels.base import TINY, check, load_all

KERNELS = load_all()
# The interpreter has no matrix product of bfloat16, and takes its time: one type is enough to tell
# whether a kernel computes what it should, the other has tiles of its own.
INTERPRETED = (pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16)
DTYPES = (
    (torch.float32, torch.float16, torch.bfloat16) if torch.cuda.is_available() else INTERPRETED
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernel_agrees_with_its_reference(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    spec = KERNELS[name]
    examples = list(spec.examples(TINY, device, dtype))
    assert examples
    for example in examples:
        check(spec, example)
        assert spec.bytes_of(*example.args, **example.kwargs) > 0
