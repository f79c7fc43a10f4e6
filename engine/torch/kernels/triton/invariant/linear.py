"""The Triton kernel of `kernels/invariant/linear.py`.

The products of an output are one chain of tensor-core instructions in ascending order of columns.
On Hopper, the chain has the same bits for all tile sizes, and also in cuBLASLt: it does not matter
whether an instruction is `mma` or `wgmma`. Programs of the same weight rows are neighbours in the
launch, so that weights are read from memory once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.skinny import Fusion
from engine.torch.kernels.triton.assembly import begin, overlapping
from engine.torch.kernels.triton.epilogue import gate_times

_MANY_TOKENS = 1024
_FEW_OUTPUTS = 2048  # with so few, tiles of 64 outputs would leave most of the device idle


class LinearTile(NamedTuple):
    """What one program computes, and how."""

    rows: int  # outputs
    columns: int  # input columns per iteration
    tokens: int
    warps: int
    stages: int


@triton.jit
def _load_weights(weights_ptr, columns, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    if SIZE % COLUMNS == 0:
        weights = tl.load(weights_ptr + columns[None, :])
    else:
        weights = tl.load(weights_ptr + columns[None, :], mask=columns[None, :] < SIZE, other=0.0)
    return weights


@triton.jit(do_not_specialize=["num_tokens"])  # one compilation serves all numbers of tokens
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    num_tokens,
    x_stride,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """With GATE, the weight has `outputs` rows of the gate and as many of up. A sum is rounded
    before bias, gate and residual, as if a library had computed it.
    """
    begin(OVERLAPS)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.minimum(tl.program_id(1) * ROWS + tl.arange(0, ROWS), outputs - 1)
    known = (tokens < num_tokens)[None, :]
    weights_ptr = weight_ptr + rows.to(tl.int64)[:, None] * SIZE
    up_weights_ptr = weights_ptr + outputs.to(tl.int64) * SIZE
    inputs_ptr = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    y, up = tl.zeros((ROWS, TOKENS), tl.float32), tl.zeros((ROWS, TOKENS), tl.float32)
    for start in tl.range(0, SIZE, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = known & (columns < SIZE)[:, None] if SIZE % COLUMNS else known
        x = tl.load(inputs_ptr + columns[:, None], mask=there, other=0.0)
        weights = _load_weights(weights_ptr, columns, SIZE, COLUMNS)
        y = tl.dot(weights, x, y, input_precision="ieee")
        if GATE != "":
            weights = _load_weights(up_weights_ptr, columns, SIZE, COLUMNS)
            up = tl.dot(weights, x, up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        y = y.to(dtype).to(tl.float32) + tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        if GATE != "":
            up_bias = tl.load(bias_ptr + outputs + rows).to(tl.float32)
            up = up.to(dtype).to(tl.float32) + up_bias[:, None]
    if GATE != "":
        y = gate_times(y.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), GATE)
    places = tokens.to(tl.int64)[None, :] * outputs + rows[:, None]
    if ADDS:
        y = y.to(dtype).to(tl.float32)
        y += tl.load(residual_ptr + places, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y, mask=known)


def choose(
    num_tokens: int, outputs: int, size: int, value_bytes: int = 2, gate: bool = False
) -> LinearTile:
    """The fastest tile on an H200. It only decides the speed."""
    tokens = max(16, triton.next_power_of_2(num_tokens))
    if value_bytes > 2:
        return LinearTile(32, 64, min(tokens, 64), 4, 2)
    if tokens <= 64 and gate:
        return LinearTile(64, 128, tokens, 4, 4)
    if tokens <= 16 and outputs <= _FEW_OUTPUTS and size > _FEW_OUTPUTS:
        # So few programs are bound by the time of one instruction after another.
        return LinearTile(16, 1024, 8 if num_tokens <= 8 else 16, 2, 3)
    if tokens <= 64:
        return LinearTile(64, 128, min(tokens, 32), 4, 8 if tokens <= 16 else 6)
    if num_tokens >= _MANY_TOKENS and outputs > 8192:
        return LinearTile(128, 64, 256, 8, 3)
    return LinearTile(64 if outputs * num_tokens < 2**20 else 128, 64, 128, 8, 3)


def invariant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fusion: Fusion,
    tile: LinearTile | None = None,
) -> Tensor:
    norm, _, gate, residual = fusion
    assert norm is None, "a norm would change the order of the sums"
    num_tokens, size = x.shape
    outputs = len(weight) // 2 if gate else len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    tile = tile or choose(num_tokens, outputs, size, x.element_size(), gate is not None)
    out = torch.empty((num_tokens, outputs), dtype=x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(num_tokens, tile.tokens), triton.cdiv(outputs, tile.rows))](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        num_tokens,
        x.stride(0),
        SIZE=size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        TOKENS=tile.tokens,
        BIAS=bias is not None,
        GATE=gate or "",
        ADDS=residual is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlapping(x),
    )
    return out
