"""Triton kernels of `kernels/experts.py`: the router's choice, the sorting of pairs by expert, and
the grouped GEMM in two launches, gate and up with the activation, then down.

A block is a few pairs of the same expert. `blocks` has for each block the expert, and the range of
its pairs in `order`, which lists all pairs sorted by expert. A program multiplies some weight rows
of one expert by the inputs of one block. The weights are the left operand, so a block of few pairs
wastes little.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.architectures.base import ExpertsConfig
from engine.torch.device import num_stages
from engine.torch.kernels.experts import ExpertMatrices
from engine.torch.kernels.triton.epilogue import gate_times

_BLOCK_FIELDS = 3
_CHUNK = 1024  # pairs that a sorting program reads at once


@triton.jit
def _route_kernel(
    logits_ptr,
    shares_ptr,
    ids_ptr,
    stride,
    scale,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, COUNT_BLOCK), tl.arange(0, CHOSEN_BLOCK)
    exists = expert < COUNT
    logits = tl.load(logits_ptr + token * stride + expert, mask=exists, other=float("-inf"))
    logits = logits.to(tl.float32)
    if SCORING == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        if SCORING == "softmax":
            scores /= tl.sum(scores, 0)
    # Softmax and sigmoid grow with the logit, so the best experts can be chosen by logits.
    shares = tl.zeros((CHOSEN_BLOCK,), tl.float32)
    ids = tl.zeros((CHOSEN_BLOCK,), tl.int32)
    for index in tl.static_range(CHOSEN):
        best = tl.minimum(tl.argmax(logits, 0), COUNT - 1)  # NaN must not lead out of bounds
        is_best = expert == best
        shares = tl.where(place == index, tl.sum(tl.where(is_best, scores, 0.0), 0), shares)
        ids = tl.where(place == index, best, ids)
        logits = tl.where(is_best, float("-inf"), logits)
    if RENORMALIZES or SCORING == "softmax_chosen":
        shares /= tl.sum(shares, 0)
    there = place < CHOSEN
    tl.store(shares_ptr + token * CHOSEN + place, shares * scale, mask=there)
    tl.store(ids_ptr + token * CHOSEN + place, ids, mask=there)


def route(logits: Tensor, correction: None, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
    rows, count = logits.shape
    chosen = experts.per_token
    shares = torch.empty((rows, chosen), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, chosen), dtype=torch.int32, device=logits.device)
    _route_kernel[(rows,)](
        logits,
        shares,
        ids,
        logits.stride(0),
        experts.scale,
        COUNT=count,
        COUNT_BLOCK=triton.next_power_of_2(count),
        CHOSEN=chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(chosen),
        SCORING=experts.scoring,
        RENORMALIZES=experts.renormalizes,
        num_warps=1,
    )
    return shares, ids


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(ids_ptr, counts_ptr, num_pairs, CHUNK: tl.constexpr):
    """Counts the pairs of one expert."""
    expert = tl.program_id(0)
    found = tl.zeros((CHUNK,), tl.int32)
    for first in tl.range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        found += (tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    num_pairs,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Lists the pairs of one expert, and its blocks of PAIRS pairs."""
    expert = tl.program_id(0)
    each = tl.arange(0, COUNT_BLOCK)
    counts = tl.load(counts_ptr + each, mask=each < COUNT, other=0)
    blocks = (counts + PAIRS - 1) // PAIRS
    start = tl.sum(tl.where(each < expert, counts, 0), 0)
    block = tl.sum(tl.where(each < expert, blocks, 0), 0)
    if expert == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, 0))
    end = start + tl.load(counts_ptr + expert)
    for first in tl.range(start, end, PAIRS):
        fields = blocks_ptr + block * 3
        tl.store(fields, expert)
        tl.store(fields + 1, first)
        tl.store(fields + 2, tl.minimum(first + PAIRS, end))
        block += 1
    for first in tl.range(0, num_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) == expert
        ranks = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order_ptr + start + ranks - 1, pair, mask=own)
        start += tl.sum(own.to(tl.int32), 0)


@triton.jit
def pairs_of(order_ptr, blocks_ptr, block, PAIRS: tl.constexpr):
    """The expert of a block, its pairs (PAIRS,), and which of them exist."""
    expert = tl.load(blocks_ptr + block * 3).to(tl.int64)
    place = tl.load(blocks_ptr + block * 3 + 1) + tl.arange(0, PAIRS)
    known = place < tl.load(blocks_ptr + block * 3 + 2)
    return expert, tl.load(order_ptr + place, mask=known, other=0).to(tl.int64), known


@triton.jit
def _gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    x_stride,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
):
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert, pair, known = pairs_of(order_ptr, blocks_ptr, block, PAIRS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, INNER - 1)
    gate_ptr = weight_ptr + expert * 2 * INNER * SIZE + rows[:, None] * SIZE
    inputs_ptr = x_ptr + (pair // CHOSEN * x_stride)[None, :]
    gate = tl.zeros((ROWS, PAIRS), tl.float32)
    up = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        if SIZE % COLUMNS == 0:
            x = tl.load(inputs_ptr + column[:, None], mask=known[None, :], other=0.0)
            gates = tl.load(gate_ptr + column[None, :])
            ups = tl.load(gate_ptr + INNER * SIZE + column[None, :])
        else:
            inside = column < SIZE
            x_mask = known[None, :] & inside[:, None]
            x = tl.load(inputs_ptr + column[:, None], mask=x_mask, other=0.0)
            gates = tl.load(gate_ptr + column[None, :], mask=inside[None, :], other=0.0)
            ups_ptr = gate_ptr + INNER * SIZE
            ups = tl.load(ups_ptr + column[None, :], mask=inside[None, :], other=0.0)
        gate = tl.dot(gates, x, gate, input_precision="ieee")
        up = tl.dot(ups, x, up, input_precision="ieee")
    if BIAS:
        biases = bias_ptr + expert * 2 * INNER + rows
        gate += tl.load(biases).to(tl.float32)[:, None]
        up += tl.load(biases + INNER).to(tl.float32)[:, None]
    tl.store(
        out_ptr + pair[None, :] * INNER + row[:, None],
        gate_times(gate, up, GATE),
        mask=known[None, :] & (row < INNER)[:, None],
    )


@triton.jit
def _down_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    shares_ptr,
    out_ptr,
    order_ptr,
    blocks_ptr,
    num_blocks_ptr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
):
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert, pair, known = pairs_of(order_ptr, blocks_ptr, block, PAIRS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(row, SIZE - 1)
    rows_ptr = weight_ptr + expert * SIZE * INNER + rows[:, None] * INNER
    inputs_ptr = hidden_ptr + (pair * INNER)[None, :]
    y = tl.zeros((ROWS, PAIRS), tl.float32)
    for start in range(0, INNER, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        if INNER % COLUMNS == 0:
            x = tl.load(inputs_ptr + column[:, None], mask=known[None, :], other=0.0)
            weight = tl.load(rows_ptr + column[None, :])
        else:
            inside = column < INNER
            x_mask = known[None, :] & inside[:, None]
            x = tl.load(inputs_ptr + column[:, None], mask=x_mask, other=0.0)
            weight = tl.load(rows_ptr + column[None, :], mask=inside[None, :], other=0.0)
        y = tl.dot(weight, x, y, input_precision="ieee")
    if BIAS:
        y += tl.load(bias_ptr + expert * SIZE + rows).to(tl.float32)[:, None]
    y *= tl.load(shares_ptr + pair, mask=known, other=0.0)[None, :]
    tl.store(
        out_ptr + pair[None, :] * SIZE + row[:, None],
        y,
        mask=known[None, :] & (row < SIZE)[:, None],
    )


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, SIZE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for index in tl.static_range(CHOSEN):
        place = (token * CHOSEN + index) * SIZE + column
        total += tl.load(parts_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column, total, mask=inside)


class GemmTile(NamedTuple):
    """The tile of one program of the grouped GEMM."""

    rows: int  # weight rows; with a gate, as many rows of gate and of up
    columns: int  # input values per iteration
    warps: int
    stages: int


def pairs_per_block(num_pairs: int, num_experts: int) -> int:
    """Blocks are a little larger than the mean number of pairs of an expert, so that most experts
    need one block, and their weights are read once.
    """
    mean = num_pairs / num_experts
    return 16 if mean <= 8 else 32 if mean <= 20 else 64 if mean <= 48 else 128


def tiles_for(pairs: int, value_bytes: int) -> tuple[GemmTile, GemmTile]:
    """The tiles of the two launches, for blocks of `pairs` pairs."""
    if value_bytes > 2:
        return GemmTile(32, 32, 4, 2), GemmTile(32, 32, 4, 2)
    if pairs <= 32:
        return GemmTile(64, 64, 4, 4), GemmTile(64, 128, 4, 4)
    return GemmTile(128, 64, 8, 4), GemmTile(128, 64, 4, 3)


def experts_mlp(
    x: Tensor,
    shares: Tensor,
    ids: Tensor,
    experts: ExpertMatrices[Tensor],
    tiles: tuple[GemmTile, GemmTile] | None = None,
) -> Tensor:
    gate_up, down, gate_up_bias, down_bias, kind = experts
    (count, size, inner), (num_tokens, chosen) = down.shape, ids.shape
    assert x.stride(1) == 1 and gate_up.is_contiguous() and down.is_contiguous()
    num_pairs = num_tokens * chosen
    pairs = pairs_per_block(num_pairs, count)
    first, second = tiles or tiles_for(pairs, x.element_size())
    order, blocks, num_blocks = sorted_pairs(ids, count, pairs)
    lists = (order, blocks, num_blocks)
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(triton.cdiv(inner, first.rows), len(blocks))](
        x,
        gate_up,
        x if gate_up_bias is None else gate_up_bias,
        hidden,
        *lists,
        x.stride(0),
        CHOSEN=chosen,
        SIZE=size,
        INNER=inner,
        ROWS=first.rows,
        COLUMNS=first.columns,
        PAIRS=pairs,
        BIAS=gate_up_bias is not None,
        GATE=kind,
        num_warps=first.warps,
        num_stages=num_stages(first.stages),
    )
    parts = torch.empty((num_tokens, chosen, size), dtype=x.dtype, device=x.device)
    _down_kernel[(triton.cdiv(size, second.rows), len(blocks))](
        hidden,
        down,
        x if down_bias is None else down_bias,
        shares,
        parts,
        *lists,
        SIZE=size,
        INNER=inner,
        ROWS=second.rows,
        COLUMNS=second.columns,
        PAIRS=pairs,
        BIAS=down_bias is not None,
        num_warps=second.warps,
        num_stages=num_stages(second.stages),
    )
    return summed(parts)


def summed(parts: Tensor) -> Tensor:
    """The sum of each token's experts, (T, k, D) -> (T, D), added in the order of the router."""
    tokens, chosen, size = parts.shape
    out = torch.empty((tokens, size), dtype=parts.dtype, device=parts.device)
    grid = (tokens, triton.cdiv(size, _CHUNK))
    _sum_kernel[grid](parts, out, SIZE=size, CHOSEN=chosen, BLOCK=_CHUNK, num_warps=4)
    return out


def sorted_pairs(ids: Tensor, count: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs sorted by expert, the blocks of `pairs` pairs, and the number of blocks. The list
    of blocks has room for the worst case.
    """
    num_pairs = ids.numel()
    most = min(num_pairs, (num_pairs + count * (pairs - 1)) // pairs)
    made = torch.empty(
        count + 1 + num_pairs + _BLOCK_FIELDS * most, dtype=torch.int32, device=ids.device
    )
    counts, num_blocks, order, blocks = made.split((count, 1, num_pairs, _BLOCK_FIELDS * most))
    _count_kernel[(count,)](ids, counts, num_pairs, CHUNK=_CHUNK, num_warps=4)
    _sort_kernel[(count,)](
        ids,
        counts,
        order,
        blocks,
        num_blocks,
        num_pairs,
        COUNT=count,
        COUNT_BLOCK=triton.next_power_of_2(count),
        PAIRS=pairs,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return order, blocks.view(most, _BLOCK_FIELDS), num_blocks
