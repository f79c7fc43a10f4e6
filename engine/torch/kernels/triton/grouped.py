"""Matmul with weights of 4 or 8 bits, and the dequantization of such weights.

Weight tiles have three dimensions, (rows, groups, bytes of a group), so that scales and minima
apply by broadcasting. The low and the high nibbles of 4-bit weights are multiplied by different
columns of the input. The kernel computes a dot product for the low nibbles and another for the high
nibbles, so no value has to be moved between threads. With one input row, the products of a group
are summed before the sum is scaled.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages
from engine.torch.kernels.cuda.grouped import BLOCK_COLUMNS, TILE_ROWS
from engine.torch.kernels.quantized import NARROW, PIECE, GroupedWeight
from engine.torch.kernels.skinny import Fusion
from engine.torch.kernels.triton.assembly import float_bits
from engine.torch.kernels.triton.epilogue import finish, weight_rows

# What `offset_values` adds to values of 4 and of 8 bits.
_OFFSET_4, _OFFSET_8 = tl.constexpr(128.0), tl.constexpr(32768.0)
_TILE_ROWS, _BLOCK_COLUMNS = tl.constexpr(TILE_ROWS), tl.constexpr(BLOCK_COLUMNS)
_PIECE = tl.constexpr(PIECE)


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    rows: int
    groups: int  # number of groups per iteration
    warps: int
    tokens: int = 1
    stages: int = 3


@triton.jit
def load_group_values(
    ptr, rows, run, COUNT: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, TILED: tl.constexpr
):
    """Loads the scales or minima of runs (ROWS, number of runs) as float32. RUNS runs are a group.
    The result is 0 past the last run.
    """
    row, group = rows.to(tl.int64)[:, None], (run // RUNS)[None, :]
    if TILED:
        GROUPS: tl.constexpr = _BLOCK_COLUMNS // (RUN * RUNS)  # of a row of a block
        tile = row // _TILE_ROWS * (COUNT // RUNS * _TILE_ROWS)
        place = tile + group // GROUPS * (_TILE_ROWS * GROUPS)
        place += row % _TILE_ROWS * GROUPS + group % GROUPS
    else:
        place = row * (COUNT // RUNS) + group
    return tl.load(ptr + place, mask=(run < COUNT)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_bytes(
    ptr, rows, run, COUNT: tl.constexpr, RUN: tl.constexpr, BITS: tl.constexpr, TILED: tl.constexpr
):
    """Loads the bytes of runs of quantized weights: (ROWS, number of runs, bytes of a run)"""
    BYTES: tl.constexpr = RUN * BITS // 8
    byte = run[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    row = rows.to(tl.int64)[:, None, None]
    if TILED:
        ROW: tl.constexpr = _BLOCK_COLUMNS * BITS // 8  # bytes of a row of a block
        key = row // 2 % 4 if BITS == 4 else row % 8
        piece = ((byte // _PIECE % (ROW // _PIECE))[None, :, :] ^ key) * _PIECE
        tile = row // _TILE_ROWS * (COUNT * BYTES * _TILE_ROWS)
        place = tile + (byte // ROW * (ROW * _TILE_ROWS))[None, :, :] + row % _TILE_ROWS * ROW
        place += piece + (byte % _PIECE)[None, :, :]
    else:
        place = row * (COUNT * BYTES) + byte[None, :, :]
    return tl.load(ptr + place, mask=(run < COUNT)[None, :, None], other=0)


@triton.jit
def _load_input(x_ptr, norm_ptr, column, inside, NORMS: tl.constexpr):
    """Loads a part of the input row. Returns the values, multiplied by the norm's weight if NORMS,
    and the squares of the original values.
    """
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    squares = x * x
    if NORMS:
        x *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x, squares


@triton.jit
def _vector_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    RUNS: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    BYTES: tl.constexpr = GROUP * BITS // 8
    OFFSET: tl.constexpr = _OFFSET_8 if BITS == 8 else _OFFSET_4
    rows = weight_rows(tl.program_id(0), outputs, ROWS, GATE)
    products = tl.zeros((ROWS, GROUPS), tl.float32)
    squares = tl.zeros((GROUPS, BYTES), tl.float32)
    for start in range(0, COUNT, GROUPS):
        group = start + tl.arange(0, GROUPS)
        packed = load_bytes(values_ptr, rows, group, COUNT, GROUP, BITS, TILED)
        scale = load_group_values(scales_ptr, rows, group, COUNT, GROUP, RUNS, TILED)
        column = group[:, None] * GROUP + tl.arange(0, BYTES)[None, :]
        inside = (group < COUNT)[:, None]
        x, squared = _load_input(x_ptr, norm_ptr, column, inside, NORMS)
        squares += squared
        if BITS == 4:
            high, squared = _load_input(x_ptr, norm_ptr, column + BYTES, inside, NORMS)
            squares += squared
            terms = offset_values(packed, BITS, False) * x[None, :, :]
            terms += offset_values(packed, BITS, True) * high[None, :, :]
            x += high
        else:
            terms = offset_values(packed, BITS, False) * x[None, :, :]
        sums = tl.sum(x, axis=1)[None, :]
        dots = tl.sum(terms, axis=2) - OFFSET * sums
        if MINIMA:
            products += (
                scale * dots
                + load_group_values(minima_ptr, rows, group, COUNT, GROUP, RUNS, TILED) * sums
            )
        else:
            products += scale * (dots - 2.0 ** (BITS - 1) * sums)
    y = tl.sum(products, axis=1)
    if NORMS:
        y *= tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / (COUNT * GROUP) + eps)
    finish(
        y[:, None],
        rows,
        bias_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        outputs,
        0,
        1,
        ROWS,
        1,
        BIAS,
        False,
        GATE,
        ADDS,
    )


@triton.jit
def offset_values(packed, BITS: tl.constexpr, HIGH: tl.constexpr):
    """Quantized values as float32 numbers, plus _OFFSET_4 or _OFFSET_8: the bits of a value are
    bits of the fraction of this power of two. With HIGH, the values are in the upper halves of the
    bytes.
    """
    return float_bits(packed, BITS, HIGH).to(tl.float32, bitcast=True)


@triton.jit
def dequantized(
    packed, scale, minimum, BITS: tl.constexpr, MINIMA: tl.constexpr, HIGH: tl.constexpr
):
    """Dequantizes values (ROWS, GROUPS, BYTES) to float32 weights."""
    offset: tl.constexpr = _OFFSET_8 if BITS == 8 else _OFFSET_4
    smallest = (minimum if MINIMA else -(2.0 ** (BITS - 1)) * scale) - offset * scale
    return offset_values(packed, BITS, HIGH) * scale[:, :, None] + smallest[:, :, None]


@triton.jit
def _load_inputs(
    x_ptr, norm_ptr, token, column, num_tokens, x_stride, SIZE: tl.constexpr, NORMS: tl.constexpr
):
    """Loads inputs (columns, tokens). Returns the values, multiplied by the norm's weight if NORMS,
    and for each token the sum of squares of its original values.
    """
    inside = (column < SIZE)[:, None] & (token < num_tokens)[None, :]
    places = x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    x = tl.load(places, mask=inside, other=0.0)
    exact = x.to(tl.float32)
    squares = tl.sum(exact * exact, axis=0)
    if NORMS:
        norm = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
        x = (exact * norm[:, None]).to(x.dtype)
    return x, squares


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    eps,
    num_tokens,
    x_stride,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    RUNS: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    BYTES: tl.constexpr = GROUP * BITS // 8
    SIZE: tl.constexpr = COUNT * GROUP
    rows = weight_rows(tl.program_id(0), outputs, ROWS, GATE)
    first_token = tl.program_id(1) * TOKENS
    token = first_token + tl.arange(0, TOKENS)
    place = tl.arange(0, GROUPS * BYTES)
    y = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, COUNT, GROUPS):
        group = start + tl.arange(0, GROUPS)
        packed = load_bytes(values_ptr, rows, group, COUNT, GROUP, BITS, TILED)
        scale = load_group_values(scales_ptr, rows, group, COUNT, GROUP, RUNS, TILED)
        minimum = scale
        if MINIMA:
            minimum = load_group_values(minima_ptr, rows, group, COUNT, GROUP, RUNS, TILED)
        column = (start + place // BYTES) * GROUP + place % BYTES
        x, squared = _load_inputs(x_ptr, norm_ptr, token, column, num_tokens, x_stride, SIZE, NORMS)
        squares += squared
        weight = dequantized(packed, scale, minimum, BITS, MINIMA, False)
        weight = tl.reshape(weight, (ROWS, GROUPS * BYTES))
        y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
        if BITS == 4:
            x, squared = _load_inputs(
                x_ptr, norm_ptr, token, column + BYTES, num_tokens, x_stride, SIZE, NORMS
            )
            squares += squared
            weight = dequantized(packed, scale, minimum, BITS, MINIMA, True)
            weight = tl.reshape(weight, (ROWS, GROUPS * BYTES))
            y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
    if NORMS:
        y *= tl.rsqrt(squares / SIZE + eps)[None, :]
    finish(
        y,
        rows,
        bias_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        outputs,
        first_token,
        num_tokens,
        ROWS,
        TOKENS,
        BIAS,
        False,
        GATE,
        ADDS,
    )


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    minima_ptr,
    rows_ptr,
    out_ptr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    RUNS: tl.constexpr,
    TILED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    BYTES: tl.constexpr = GROUP * BITS // 8
    out_row = (tl.program_id(0) + tl.zeros((1,), tl.int32)).to(tl.int64)
    row = out_row
    if CHOSEN:
        row = tl.load(rows_ptr + out_row)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    packed = load_bytes(values_ptr, row, group, COUNT, GROUP, BITS, TILED)
    scale = load_group_values(scales_ptr, row, group, COUNT, GROUP, RUNS, TILED)
    minimum = scale
    if MINIMA:
        minimum = load_group_values(minima_ptr, row, group, COUNT, GROUP, RUNS, TILED)
    column = group[:, None] * GROUP + tl.arange(0, BYTES)[None, :]
    places = out_ptr + out_row[:, None, None] * (COUNT * GROUP) + column[None, :, :]
    inside = (group < COUNT)[None, :, None]
    tl.store(places, dequantized(packed, scale, minimum, BITS, MINIMA, False), mask=inside)
    if BITS == 4:
        high = dequantized(packed, scale, minimum, BITS, MINIMA, True)
        tl.store(places + BYTES, high, mask=inside)


def choose(num_tokens: int, outputs: int, group: int, is_float32: bool) -> GroupedConfig:
    """Chooses the tile sizes that were the fastest on an H200 for the matrices of Llama models."""
    if num_tokens == 1:
        return GroupedConfig(rows=4, groups=2048 // group, warps=2)
    tokens = max(16, triton.next_power_of_2(num_tokens))
    if is_float32:
        return GroupedConfig(rows=32, groups=128 // group, warps=4, tokens=min(tokens, 64))
    if outputs <= NARROW:  # more programs, each with fewer rows
        return GroupedConfig(
            rows=32, groups=256 // group, warps=4, tokens=min(tokens, 64), stages=4
        )
    if tokens == 16:
        return GroupedConfig(rows=64, groups=128 // group, warps=4, tokens=16, stages=4)
    return GroupedConfig(rows=128, groups=128 // group, warps=8, tokens=min(tokens, 128), stages=4)


def described(weight: GroupedWeight) -> dict[str, int | bool]:
    """The layout of a weight as arguments of a kernel."""
    return {
        "COUNT": weight.shape[1] // weight.run,
        "GROUP": weight.run,
        "BITS": weight.bits,
        "MINIMA": weight.minima is not None,
        "RUNS": weight.group // weight.run,
        "TILED": weight.is_tiled,
    }


def grouped_linear(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    fusion: Fusion,
    config: GroupedConfig | None = None,
) -> Tensor:
    norm, eps, gate, residual = fusion
    num_tokens, rows = len(x), weight.shape[0]
    assert x.stride(1) == 1 and (residual is None or residual.is_contiguous())
    chosen = config or choose(num_tokens, rows, weight.run, x.dtype == torch.float32)
    outputs = rows // 2 if gate else rows
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    tensors = [x if each is None else each for each in (bias, norm, residual)]
    minima = weight.scales if weight.minima is None else weight.minima
    args = (x, weight.values, weight.scales, minima, *tensors, out, rows, eps)
    parts = {
        **described(weight),
        "ROWS": chosen.rows,
        "GROUPS": chosen.groups,
        "BIAS": bias is not None,
        "NORMS": norm is not None,
        "GATE": gate or "",
        "ADDS": residual is not None,
        "num_warps": chosen.warps,
        "num_stages": num_stages(chosen.stages),
    }
    programs = triton.cdiv(rows, chosen.rows)
    if num_tokens == 1:
        _vector_kernel[(programs,)](*args, **parts)
    else:
        grid = (programs, triton.cdiv(num_tokens, chosen.tokens))
        _tile_kernel[grid](*args, num_tokens, x.stride(0), TOKENS=chosen.tokens, **parts)
    return out


def dequantize(weight: GroupedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    outputs, size = weight.shape
    count = outputs if rows is None else len(rows)
    out = torch.empty((count, size), dtype=dtype, device=weight.values.device)
    groups = 1024 // weight.run
    _dequantize_kernel[(count, triton.cdiv(size // weight.run, groups))](
        weight.values,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        weight.scales if rows is None else rows,
        out,
        **described(weight),
        GROUPS=groups,
        CHOSEN=rows is not None,
        num_warps=2,
    )
    return out
