"""Shared code of matmul kernels: the choice of weight rows for a program, and the epilogue.

GATE names the activation of a gated MLP. For other matmuls it is empty. If there is a gate, the
first half of the weight's rows is the gate projection, and the second half is the up projection. A
program reads some rows of gate and the same rows of up, so it has both factors of its outputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT

_BLOCK = 1024
_LIMIT, _ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Applies the activation KIND to float32 values."""
    if KIND == "silu":
        factor = tl.sigmoid(x)
    elif KIND == "gelu":
        factor = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "relu2":
        factor = tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        factor = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * factor


@triton.jit
def gate_times(gate, up, KIND: tl.constexpr):
    """The gated activation KIND of float32 values."""
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        value = gate * tl.sigmoid(gate * _ALPHA) * (up + 1)
    else:
        value = activate(gate, KIND) * up
    return value


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + columns, mask=inside, other=0.0)
    value = gate_times(gate, up.to(tl.float32), KIND)
    tl.store(out_ptr + row * SIZE + columns, value, mask=inside)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(size, _BLOCK))
    _gated_kernel[grid](
        gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=_BLOCK, KIND=kind, num_warps=4
    )
    return out


@triton.jit
def weight_rows(program, outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """The indices (ROWS,) of the weight rows that a program reads. The weight has `outputs` rows.
    Indices past its end are replaced by the index of the last row.
    """
    index = tl.arange(0, ROWS)
    if GATE != "":
        half: tl.constexpr = ROWS // 2
        row = tl.minimum(program * half + index % half, outputs // 2 - 1)
        row += index // half * (outputs // 2)
    else:
        row = tl.minimum(program * ROWS + index, outputs - 1)
    return row


@triton.jit
def gate_halves(y, rows, ROWS: tl.constexpr, TOKENS: tl.constexpr, GATE: tl.constexpr):
    """The gated activation of y (ROWS, TOKENS), whose rows `weight_rows` chose, and its rows."""
    pairs = tl.reshape(y, (2, ROWS // 2, TOKENS))
    first = tl.arange(0, 2)[:, None, None] == 0
    gate = tl.sum(tl.where(first, pairs, 0.0), axis=0)
    up = tl.sum(tl.where(first, 0.0, pairs), axis=0)
    return gate_times(gate, up, GATE), tl.min(tl.reshape(rows, (2, ROWS // 2)), axis=0)


@triton.jit
def finish(
    y,
    rows,
    bias_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    outputs,
    first_token,
    num_tokens,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Applies scale, bias, gated activation and residual to y (ROWS, TOKENS) float32, and writes
    the result to out (T, F), for tokens from `first_token` on.

    The last weight row may occur several times in `rows`. Its result is then written several times,
    always with the same value.
    """
    if SCALED:
        y *= tl.load(scale_ptr + rows)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    if GATE != "":
        y, rows = gate_halves(y, rows, ROWS, TOKENS, GATE)
        width = outputs // 2
    else:
        width = outputs
    tokens = first_token + tl.arange(0, TOKENS)
    places = tokens.to(tl.int64)[None, :] * width + rows[:, None]
    known = (tokens < num_tokens)[None, :]
    if ADDS:
        y += tl.load(residual_ptr + places, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, y, mask=known)
