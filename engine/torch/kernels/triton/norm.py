"""RMSNorm with one program per input row. It reads the row once and keeps it in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.triton.assembly import (
    launch_dependents,
    overlapping,
    wait_for_previous,
)


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAPS:
        wait_for_previous()
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADDS:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + columns, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + columns, x * scale * weight, mask=inside)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, adds: bool
) -> None:
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    _norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADDS=adds,
        num_warps=min(max(block // 512, 1), 16),
        **overlapping(x),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, eps, adds=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, eps, adds=True)
    return out, total
