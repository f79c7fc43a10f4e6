"""Quantization of activations to float8, fused with what precedes it, and a matmul of float8 values
for up to some 256 tokens.

A program of the matmul multiplies some rows of the weight, as the left operand, by a tile of
tokens. The token tiles of the same weight rows are neighbours in the launch, so that only the first
of them reads the weights from memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.base import interpreting
from engine.torch.kernels.fp8 import (
    FP8,
    LARGEST,
    SMALLEST_SCALE,
    QuantizedRows,
)
from engine.torch.kernels.triton.assembly import begin, overlapping
from engine.torch.kernels.triton.epilogue import gate_times

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
# Adding and subtracting these rounds float32 numbers to the numbers that e4m3 has: normal numbers
# keep 4 bits (a factor), and subnormal ones are multiples of 2 ** -9 (a term).
_KEEPS_4_BITS, _KEEPS_512THS = tl.constexpr(2.0**20 + 1), tl.constexpr(1.5 * 2.0**14)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_INTERPRETS = tl.constexpr(interpreting())


@triton.jit
def to_fp8(x):
    """Rounds float32 numbers of up to 448 to e4m3. Triton's interpreter does not round correctly.
    There, they are rounded before the conversion.
    """
    if _INTERPRETS:
        wide = x * _KEEPS_4_BITS
        normal = wide - (wide - x)
        subnormal = (x + _KEEPS_512THS) - _KEEPS_512THS
        x = tl.where(tl.abs(x) < _SMALLEST_NORMAL, subnormal, normal)
    return x.to(tl.float8e4nv)


@triton.jit
def fp8_scale(largest, lost):
    """The scale of values whose largest absolute value is given. `lost` is NaN if the values have
    NaN or infinity, else 0. The scale is NaN then, because neither may get lost.
    """
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE) + lost


@triton.jit
def scaled_fp8(x, scale):
    x *= 1.0 / scale  # a division per value would take longer than reading the values
    return to_fp8(tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST))


@triton.jit
def _rows_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    total_ptr,
    values_ptr,
    scales_ptr,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADDS:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + columns, x, mask=inside)
    x = x.to(tl.float32)
    if GATE != "":
        up = tl.load(x_ptr + row * x_stride + SIZE + columns, mask=inside, other=0.0)
        x = tl.where(inside, gate_times(x, up.to(tl.float32), GATE), 0.0)
    if NORMS:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    scale = fp8_scale(tl.max(tl.abs(x), axis=0), tl.sum(x - x, axis=0))
    tl.store(values_ptr + row * SIZE + columns, scaled_fp8(x, scale), mask=inside)
    tl.store(scales_ptr + row, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    num_tokens,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    rows = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), outputs - 1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    known = (tokens < num_tokens)[None, :]
    y = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        places = weight_ptr + rows.to(tl.int64)[:, None] * SIZE + columns[None, :]
        sources = x_ptr + tokens.to(tl.int64)[None, :] * SIZE + columns[:, None]
        if SIZE % COLUMNS == 0:
            weight = tl.load(places, eviction_policy="evict_first" if ONCE else "")
            x = tl.load(sources, mask=known, other=0.0)
        else:
            inside = columns < SIZE
            weight = tl.load(places, mask=inside[None, :], other=0.0)
            x = tl.load(sources, mask=known & inside[:, None], other=0.0)
        y = tl.dot(weight, x, y)
    y *= tl.load(scale_ptr + rows)[:, None]
    y *= tl.load(x_scale_ptr + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    # The last weight row may occur several times. Its result is always the same.
    tl.store(out_ptr + tokens.to(tl.int64)[None, :] * outputs + rows[:, None], y, mask=known)


@triton.jit
def _dense_kernel(
    cache_ptr,
    blocks_ptr,
    out_ptr,
    BLOCK_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks_ptr + place // BLOCK_SIZE).to(tl.int64)
    slot = cache_ptr + (block * BLOCK_SIZE + place % BLOCK_SIZE) * SLOT_BYTES
    vector, columns = tl.arange(0, VECTOR_BLOCK), tl.arange(0, HEAD_BLOCK)
    inside = (vector < VECTORS)[:, None] & (columns < HEAD_DIM)[None, :]
    at = vector[:, None] * HEAD_DIM + columns[None, :]
    values = tl.load(slot + at, mask=inside, other=0.0).to(tl.float32)
    scales_ptr = (slot + VECTORS * HEAD_DIM).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr + vector, mask=vector < VECTORS, other=0.0)
    tl.store(out_ptr + place * VECTORS * HEAD_DIM + at, values * scales[:, None], mask=inside)


@dataclass(frozen=True, slots=True)
class LinearConfig:
    rows: int  # weight rows per program
    columns: int  # input columns per iteration
    tokens: int
    warps: int = 4
    stages: int = 4


def choose(num_tokens: int, outputs: int) -> LinearConfig:
    """Chooses the tile sizes that were the fastest on an H200 for the matrices of Llama models."""
    if num_tokens <= 16:
        return (
            LinearConfig(64, 256, 16, 4, 6) if outputs <= 8192 else LinearConfig(128, 256, 16, 4, 3)
        )
    tokens = triton.next_power_of_2(num_tokens)
    if outputs > 8192:
        return LinearConfig(128, 128, min(tokens, 64))
    # So few weight rows keep the device busy only if the tokens are cut into two tiles.
    if outputs <= 4096:
        tokens = max(tokens // 2, 32)
    tokens = min(tokens, 128)
    return LinearConfig(64, 256, tokens, stages=6 if tokens <= 64 else 4)


def scaled_linear(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: LinearConfig | None = None,
) -> Tensor:
    num_tokens, outputs = len(values), len(weight)
    assert values.is_contiguous() and scales.is_contiguous() and weight.is_contiguous()
    chosen = config or choose(num_tokens, outputs)
    out = torch.empty((num_tokens, outputs), dtype=dtype, device=values.device)
    grid = (triton.cdiv(num_tokens, chosen.tokens), triton.cdiv(outputs, chosen.rows))
    _linear_kernel[grid](
        values,
        scales,
        weight,
        scale,
        scale if bias is None else bias,
        out,
        outputs,
        num_tokens,
        SIZE=values.shape[1],
        ROWS=chosen.rows,
        COLUMNS=chosen.columns,
        TOKENS=chosen.tokens,
        BIAS=bias is not None,
        ONCE=grid[0] == 1,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        **overlapping(values),
    )
    return out


def _rows(
    x: Tensor,
    size: int,
    *,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
) -> QuantizedRows:
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    values = torch.empty((len(x), size), dtype=FP8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _rows_kernel[(len(x),)](
        x,
        x if residual is None else residual,
        x if norm is None else norm,
        x if total is None else total,
        values,
        scales,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=block,
        ADDS=residual is not None,
        NORMS=norm is not None,
        GATE=gate,
        num_warps=min(max(block // 512, 1), 16),
        **overlapping(x),
    )
    return QuantizedRows(values, scales)


def quantize_rows(x: Tensor) -> QuantizedRows:
    return _rows(x, x.shape[1])


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> QuantizedRows:
    return _rows(x, x.shape[1], norm=weight, eps=eps)


def add_rms_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[QuantizedRows, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _rows(x, x.shape[1], residual=residual, total=total, norm=weight, eps=eps), total


def gated_rows(gate_up: Tensor, kind: str) -> QuantizedRows:
    return _rows(gate_up, gate_up.shape[1] // 2, gate=kind)


def dense_blocks(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty((len(blocks), *cache.shape[1:]), dtype=dtype, device=cache.device)
    vectors, head_dim = cache.shape[2] * cache.shape[3], cache.shape[4]
    _dense_kernel[(len(blocks) * cache.shape[1],)](
        cache,
        blocks,
        out,
        BLOCK_SIZE=cache.shape[1],
        VECTORS=vectors,
        VECTOR_BLOCK=triton.next_power_of_2(vectors),
        HEAD_DIM=head_dim,
        HEAD_BLOCK=triton.next_power_of_2(head_dim),
        SLOT_BYTES=cache.stride(1),
        num_warps=4,
    )
    return out
