"""Element by element; `activate` is also the epilogue of matrix kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def activate(x, KIND: tl.constexpr):
    """float32 in, float32 out."""
    if KIND == "silu":
        factor = tl.sigmoid(x)
    elif KIND == "gelu":
        factor = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        factor = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * factor


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + columns, mask=inside, other=0.0)
    value = activate(gate, KIND) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, value, mask=inside)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(size, _BLOCK))
    _gated_kernel[grid](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, KIND=kind, num_warps=4
    )
    return out
