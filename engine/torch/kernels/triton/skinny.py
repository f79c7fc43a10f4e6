"""Skinny GEMM: a matmul with few input rows (tokens). A program multiplies some rows of the weight
by the whole input, without split-K.

A single input row uses plain float32 arithmetic. More rows use tensor cores, with the weights as
the left operand. A fused norm needs no extra pass over the input. The norm's weight multiplies the
input as it is loaded. The sum of squares is computed in the same loop as the matmul. At the end,
the result is divided by the root of the mean square.

Consecutive matmuls can overlap (programmatic dependent launch). The next kernel starts while the
last programs of the current kernel still run. It prefetches its first weights, and then waits for
the current kernel's results.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages, overlaps_kernels
from engine.torch.kernels.skinny import Fusion
from engine.torch.kernels.triton.assembly import (
    begin,
    launch_dependents,
    wait_for_previous,
)
from engine.torch.kernels.triton.epilogue import finish, weight_rows

_MAX_RESIDENT = 8192  # max columns of an input that fits in the registers of a program
# The kernel of a float8 matrix of up to this many values starts before the previous kernel ends.
# The programs of a larger one would take the place of programs that still read weights.
_SMALL = 2**24


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    rows: int  # weight rows per program
    columns: int  # input columns per iteration
    warps: int
    stages: int = 3
    steps: int = 0  # above 0: the input stays in registers, for this many times `rows` weight rows
    # Whether the kernel starts before the previous one ends. Only for a single token.
    overlaps: bool = False


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        launch_dependents()
    rows = weight_rows(tl.program_id(0), outputs, ROWS, GATE)
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        places = weight_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        inside = columns < SIZE
        if SIZE % COLUMNS == 0:
            weight = tl.load(places, eviction_policy="evict_first")
        else:
            weight = tl.load(places, mask=inside[None, :], other=0.0)
        if OVERLAPS:  # noqa: SIM102 - only OVERLAPS is a compile-time constant
            if start == 0:
                wait_for_previous()
        x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        products += weight.to(tl.float32) * x[None, :]
    y = tl.sum(products, axis=1)
    if NORMS:
        y *= tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
    finish(
        y[:, None],
        rows,
        bias_ptr,
        scale_ptr,
        residual_ptr,
        out_ptr,
        outputs,
        0,
        1,
        ROWS,
        1,
        BIAS,
        SCALED,
        GATE,
        ADDS,
    )


@triton.jit
def _resident_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """As `_vector_kernel`, for float8 weights. They are read so fast that reading and normalizing
    the input for every few weight rows takes a third of the time. So a program keeps the whole
    normalized input in registers, and multiplies it by ROWS weight rows at each of its STEPS.
    """
    begin(OVERLAPS)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * norm
    for step in range(STEPS):
        rows = weight_rows(tl.program_id(0) * STEPS + step, outputs, ROWS, GATE)
        places = weight_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        if SIZE == BLOCK:
            weight = tl.load(places, eviction_policy="evict_first")
        else:
            weight = tl.load(places, mask=inside[None, :], other=0.0)
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        finish(
            y[:, None],
            rows,
            bias_ptr,
            scale_ptr,
            residual_ptr,
            out_ptr,
            outputs,
            0,
            1,
            ROWS,
            1,
            BIAS,
            True,
            GATE,
            ADDS,
        )


@triton.jit
def _load_tiles(places, sources, columns, known, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of the weight, and the tile of the input that it is multiplied by."""
    if SIZE % COLUMNS == 0:
        weight = tl.load(places, eviction_policy="evict_first")
        x = tl.load(sources, mask=known, other=0.0)
    else:
        inside = columns < SIZE
        weight = tl.load(places, mask=inside[None, :], other=0.0)
        x = tl.load(sources, mask=known & inside[:, None], other=0.0)
    return weight, x


@triton.jit(do_not_specialize=["num_tokens"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    num_tokens,
    x_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    rows = weight_rows(tl.program_id(0), outputs, ROWS, GATE)
    first_token = tl.program_id(1) * TOKENS
    tokens = first_token + tl.arange(0, TOKENS)
    y = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        places = weight_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        sources = x_ptr + tokens.to(tl.int64)[None, :] * x_stride + columns[:, None]
        known = (tokens < num_tokens)[None, :]
        weight, x = _load_tiles(places, sources, columns, known, SIZE, COLUMNS)
        if NORMS:
            norm = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
            exact = x.to(tl.float32)
            squares += tl.sum(exact * exact, axis=0)
            x = (exact * norm[:, None]).to(x.dtype)
        y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
    if NORMS:
        y *= tl.rsqrt(squares / SIZE + eps)[None, :]
    finish(
        y,
        rows,
        bias_ptr,
        scale_ptr,
        residual_ptr,
        out_ptr,
        outputs,
        first_token,
        num_tokens,
        ROWS,
        TOKENS,
        BIAS,
        SCALED,
        GATE,
        ADDS,
    )


def choose(
    num_tokens: int, outputs: int, size: int, value_bytes: int = 2, weight_bytes: int = 2
) -> SkinnyConfig:
    """Chooses the tile sizes that were the fastest on an H200 for the matrices of Llama models."""
    if num_tokens == 1 and weight_bytes == 1:
        if size > _MAX_RESIDENT:
            return SkinnyConfig(rows=8, columns=1024, warps=4)
        steps = max(1, min(8, outputs // 3072))
        is_small = outputs <= size and outputs * size <= _SMALL
        warps = 4 if size <= 4096 else 8
        return SkinnyConfig(rows=4, columns=0, warps=warps, steps=steps, overlaps=is_small)
    if num_tokens > 1 and value_bytes > 2:
        return SkinnyConfig(rows=32, columns=64, warps=4, stages=2)
    if num_tokens > 1:
        return SkinnyConfig(rows=64, columns=128 if outputs > 8192 else 256, warps=4, stages=4)
    columns = min(triton.next_power_of_2(size), 2048)
    if size > 8192:
        return SkinnyConfig(rows=2, columns=columns, warps=4)
    if size > 2048:
        return (
            SkinnyConfig(8, 512, 4)
            if outputs > 65536
            else SkinnyConfig(rows=2, columns=columns, warps=8)
        )
    if 8192 < outputs <= 65536:
        return SkinnyConfig(rows=2, columns=min(columns, 1024), warps=4)
    return SkinnyConfig(rows=2 if outputs <= 8192 else 4, columns=columns, warps=4)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fusion: Fusion,
    scale: Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> Tensor:
    norm, eps, gate, residual = fusion
    (num_tokens, size), rows = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    chosen = config or choose(num_tokens, rows, size, x.element_size(), weight.element_size())
    outputs = rows // 2 if gate else rows
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    tensors = [x if each is None else each for each in (bias, scale, norm, residual)]
    arguments = (x, weight, *tensors, out, rows, eps)
    parts: dict[str, bool | str] = {
        "BIAS": bias is not None,
        "SCALED": scale is not None,
        "NORMS": norm is not None,
        "GATE": gate or "",
        "ADDS": residual is not None,
    }
    shape = {"SIZE": size, "ROWS": chosen.rows, "COLUMNS": chosen.columns}
    grid: tuple[int, ...] = (triton.cdiv(rows, chosen.rows),)
    options: dict[str, int | bool] = {
        "num_warps": chosen.warps,
        "num_stages": num_stages(chosen.stages),
    }
    overlaps = chosen.overlaps and overlaps_kernels(x.device)
    if overlaps:
        options["launch_pdl"] = True
    if chosen.steps:
        assert num_tokens == 1 and parts.pop("SCALED")
        parts["OVERLAPS"] = overlaps
        _resident_kernel[(triton.cdiv(rows, chosen.rows * chosen.steps),)](
            *arguments,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            ROWS=chosen.rows,
            STEPS=chosen.steps,
            **parts,
            **options,
        )
    elif num_tokens == 1:
        parts["OVERLAPS"] = overlaps
        _vector_kernel[grid](*arguments, **shape, **parts, **options)
    else:
        tokens = min(max(16, triton.next_power_of_2(num_tokens)), 64)
        grid = (*grid, triton.cdiv(num_tokens, tokens))
        more = (num_tokens, x.stride(0))
        _few_rows_kernel[grid](*arguments, *more, **shape, TOKENS=tokens, **parts, **options)
    return out
