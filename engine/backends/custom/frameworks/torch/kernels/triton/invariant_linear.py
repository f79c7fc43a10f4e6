"""The Triton kernel of `kernels/invariant/linear.py`.

Weights are the left operand of every product, with at least 64 rows. So Hopper's tensor cores use
the same instruction for all tiles in half precision, and a tile size changes no result. Programs of
the same weight rows are neighbours in the launch, so that weights are read from memory once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.invariant.linear import MAX_PARALLEL
from engine.backends.custom.frameworks.torch.kernels.triton.epilogue import finish, weight_rows

# Segments are multiples of this many columns, so that every tile fits them.
_SEGMENT = tl.constexpr(256)
# With this many tokens, a matmul is limited by tensor cores, and the largest tiles are the fastest.
_MANY_TOKENS = 1024


class LinearTile(NamedTuple):
    """What one program computes, and how."""

    rows: int  # weight rows
    columns: int  # input columns per iteration
    tokens: int
    warps: int
    stages: int


@triton.jit
def _segment_sum(
    weights_ptr,
    inputs_ptr,
    known,
    segment,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """The products of one segment of the columns, (ROWS, TOKENS)."""
    length: tl.constexpr = (SIZE + SEGMENTS * _SEGMENT - 1) // (SEGMENTS * _SEGMENT) * _SEGMENT
    first = segment * length
    y = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(first, tl.minimum(first + length, SIZE), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if SIZE % COLUMNS == 0:
            weight = tl.load(weights_ptr + columns[None, :])
            x = tl.load(inputs_ptr + columns[:, None], mask=known, other=0.0)
        else:
            inside = columns < SIZE
            weight = tl.load(weights_ptr + columns[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(inputs_ptr + columns[:, None], mask=known & inside[:, None], other=0.0)
        y = tl.dot(weight, x, y, input_precision="ieee")
    return y


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation serves all numbers of tokens
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    outputs,
    num_tokens,
    x_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARALLEL: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    rows = weight_rows(tl.program_id(1), outputs, ROWS, GATE)
    first_token = tl.program_id(0) * TOKENS
    tokens = first_token + tl.arange(0, TOKENS)
    known = (tokens < num_tokens)[None, :]
    weights_ptr = weight_ptr + rows.to(tl.int64)[:, None] * SIZE
    inputs_ptr = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    if PARALLEL:
        segment = tl.program_id(2)
        y = _segment_sum(
            weights_ptr, inputs_ptr, known, segment, SIZE, ROWS, COLUMNS, TOKENS, SEGMENTS
        )
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        lane, token = tl.arange(0, ROWS), tl.arange(0, TOKENS)
        place = partial_ptr + tile * SEGMENTS * ROWS * TOKENS
        place += lane[:, None] * TOKENS + token[None, :]
        tl.store(place + segment * ROWS * TOKENS, y)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1) == SEGMENTS - 1:
            tl.store(arrived_ptr + tile, 0)
            # Other programs wrote these sums, so they must be loaded past the L1 cache.
            total = tl.load(place, cache_modifier=".cg")
            for index in tl.static_range(1, SEGMENTS):
                total += tl.load(place + index * ROWS * TOKENS, cache_modifier=".cg")
            finish(
                total,
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
    else:
        y = _segment_sum(weights_ptr, inputs_ptr, known, 0, SIZE, ROWS, COLUMNS, TOKENS, SEGMENTS)
        for segment in tl.range(1, SEGMENTS):
            y += _segment_sum(
                weights_ptr, inputs_ptr, known, segment, SIZE, ROWS, COLUMNS, TOKENS, SEGMENTS
            )
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


def segments_of(outputs: int) -> int:
    """The number of segments. A weight with few rows has few tiles, which would leave most of the
    device idle at batch 1.
    """
    return 4 if outputs <= 3072 else 2 if outputs <= 8192 else 1


def choose(num_tokens: int, outputs: int, value_bytes: int = 2) -> LinearTile:
    """The tile for this many tokens. It only decides the speed."""
    tokens = max(16, triton.next_power_of_2(num_tokens))
    if value_bytes > 2:
        return LinearTile(32, 64, min(tokens, 64), 4, 2)
    segments = segments_of(outputs)
    if tokens <= 16:
        return LinearTile(64, 256 if segments > 1 else 128, 16, 4, 4)
    if tokens <= 64:
        return (
            LinearTile(64, 128, tokens, 4, 4) if segments > 1 else LinearTile(128, 64, tokens, 4, 4)
        )
    if num_tokens >= _MANY_TOKENS and segments == 1:
        return LinearTile(128, 64, 256, 8, 3)
    tiles = triton.cdiv(outputs, 128) * triton.cdiv(num_tokens, 128) * segments
    if tiles < MAX_PARALLEL:
        return LinearTile(64, 64, 128, 4, 4)
    return LinearTile(128, 64, 128, 8, 4)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor,
    *,
    gate: str | None = None,
    residual: Tensor | None = None,
    tile: LinearTile | None = None,
) -> Tensor:
    (num_tokens, size), outputs = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    tile = tile or choose(num_tokens, outputs, x.element_size())
    segments = segments_of(outputs)
    grid = (triton.cdiv(num_tokens, tile.tokens), triton.cdiv(outputs, tile.rows))
    tiles = grid[0] * grid[1]
    parallel = segments > 1 and tiles < MAX_PARALLEL
    partial = arrived
    if parallel:
        sums = tiles * segments * tile.rows * tile.tokens
        partial = torch.empty(sums, dtype=torch.float32, device=x.device)
    shape = (num_tokens, outputs // 2 if gate else outputs)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _linear_kernel[(*grid, segments if parallel else 1)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partial,
        arrived,
        outputs,
        num_tokens,
        x.stride(0),
        SIZE=size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TOKENS=tile.tokens,
        SEGMENTS=segments,
        PARALLEL=parallel,
        BIAS=bias is not None,
        GATE=gate or "",
        ADDS=residual is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
