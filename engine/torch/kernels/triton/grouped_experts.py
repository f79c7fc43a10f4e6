"""A mixture of experts whose matrices have 4 or 8 bits per weight.

It is the grouped GEMM of `experts.py` with the quantized weight tiles of `grouped.py`. The rows of
all experts form one matrix. One kernel serves both launches: gate and up with the activation, then
down with the tokens' shares.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.device import num_stages
from engine.torch.kernels.experts import ExpertMatrices
from engine.torch.kernels.quantized import GroupedWeight
from engine.torch.kernels.triton.epilogue import gate_halves, weight_rows
from engine.torch.kernels.triton.experts import (
    pairs_of,
    pairs_per_block,
    sorted_pairs,
    summed,
)
from engine.torch.kernels.triton.grouped import (
    dequantized,
    described,
    load_bytes,
    load_group_values,
)

_ROWS = 32
_COLUMNS = 128  # input values per iteration
_MAX_PAIRS = 64


@triton.jit
def _load_inputs(inputs_ptr, column, known, SIZE: tl.constexpr):
    """Loads the inputs of a block's pairs: (columns, PAIRS)"""
    inside = (column < SIZE)[:, None] & known[None, :]
    return tl.load(inputs_ptr + column[:, None], mask=inside, other=0.0)


@triton.jit
def _expert_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    minima_ptr,
    bias_ptr,
    shares_ptr,
    out_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    x_stride,
    CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MINIMA: tl.constexpr,
    RUNS: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    """Multiplies some rows of one expert by the inputs of one block. CHOSEN pairs share an input
    row. With GATE, the output is the gated activation, else it is multiplied by the pairs' shares.
    """
    BYTES: tl.constexpr = GROUP * BITS // 8
    SIZE: tl.constexpr = COUNT * GROUP
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert, pair, known = pairs_of(order_ptr, blocks_ptr, block, PAIRS)
    rows = weight_rows(tl.program_id(0), OUTPUTS, ROWS, GATE)
    own_rows = expert * OUTPUTS + rows
    inputs_ptr = x_ptr + (pair // CHOSEN * x_stride)[None, :]
    place = tl.arange(0, GROUPS * BYTES)
    y = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in range(0, COUNT, GROUPS):
        group = start + tl.arange(0, GROUPS)
        packed = load_bytes(values_ptr, own_rows, group, COUNT, GROUP, BITS, TILED)
        scale = load_group_values(scales_ptr, own_rows, group, COUNT, GROUP, RUNS, TILED)
        minimum = scale
        if MINIMA:
            minimum = load_group_values(minima_ptr, own_rows, group, COUNT, GROUP, RUNS, TILED)
        column = (start + place // BYTES) * GROUP + place % BYTES
        x = _load_inputs(inputs_ptr, column, known, SIZE)
        weight = dequantized(packed, scale, minimum, BITS, MINIMA, False)
        weight = tl.reshape(weight, (ROWS, GROUPS * BYTES))
        y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
        if BITS == 4:
            x = _load_inputs(inputs_ptr, column + BYTES, known, SIZE)
            high = dequantized(packed, scale, minimum, BITS, MINIMA, True)
            weight = tl.reshape(high, (ROWS, GROUPS * BYTES))
            y = tl.dot(weight.to(x.dtype), x, y, input_precision="ieee")
    if BIAS:
        y += tl.load(bias_ptr + own_rows).to(tl.float32)[:, None]
    if GATE != "":
        y, rows = gate_halves(y, rows, ROWS, PAIRS, GATE)
        width = OUTPUTS // 2
    else:
        y *= tl.load(shares_ptr + pair, mask=known, other=0.0)[None, :]
        width = OUTPUTS
    tl.store(out_ptr + pair[None, :] * width + rows[:, None], y, mask=known[None, :])


def grouped_experts_mlp(
    x: Tensor, shares: Tensor, ids: Tensor, experts: ExpertMatrices[GroupedWeight], count: int
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias, kind = experts
    (num_tokens, size), chosen = x.shape, ids.shape[1]
    assert x.stride(1) == 1
    num_pairs, inner = num_tokens * chosen, down.shape[1]
    pairs = min(pairs_per_block(num_pairs, count), _MAX_PAIRS)
    lists = sorted_pairs(ids, count, pairs)
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_tokens, chosen, size), dtype=x.dtype, device=x.device)
    for inputs, weight, bias, out, gate in (
        (x, gate_up, gate_up_bias, hidden, kind),
        (hidden, down, down_bias, parts, ""),
    ):
        outputs = weight.shape[0] // count
        _expert_kernel[(triton.cdiv(outputs, _ROWS), len(lists[1]))](
            inputs,
            weight.values,
            weight.scales,
            weight.scales if weight.minima is None else weight.minima,
            x if bias is None else bias,
            shares,
            out,
            *lists,
            inputs.stride(0),
            CHOSEN=chosen if gate else 1,
            OUTPUTS=outputs,
            **described(weight),
            ROWS=_ROWS,
            GROUPS=_COLUMNS // weight.run,
            PAIRS=pairs,
            BIAS=bias is not None,
            GATE=gate,
            num_warps=4,
            num_stages=num_stages(3),
        )
    return summed(parts)
