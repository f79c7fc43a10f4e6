"""LoRA adapters in two launches beside a matmul: A x, then the sum of the product and B (A x).

A x does not depend on the product of the base model. So a captured CUDA graph has it on a branch of
its own, and the device computes both at the same time. Its columns are divided into splits, so that
few rows also use many programs. The second launch adds up the splits in a fixed order, adds B (A x)
to the product, and applies the activation of a gated MLP.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.torch.kernels.lora import TILE_ROWS, LoraStack, Made
from engine.torch.kernels.triton.epilogue import gate_times

_READ_BYTES = 1024  # of each row of x that a program multiplies at a time
_MAX_SPLITS, _MIN_SPLIT = 4, 256  # splits of x, and the columns of one
# Columns of the result per program. Tiles are the last dimension of a grid, because padding
# comes last: their programs end while others run.
_WRITTEN, _GATED = 64, 128


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr,
    a_ptr,
    out_ptr,
    tiles_ptr,
    x_stride,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    split, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles_ptr + tile * 3)
    count = tl.load(tiles_ptr + tile * 3 + 1)
    place = tl.load(tiles_ptr + tile * 3 + 2).to(tl.int64)
    if count * place == 0:
        return
    rows, ranks = tl.arange(0, ROWS), tl.arange(0, RANKS)
    is_row, is_rank = rows < count, ranks < RANK
    x_rows = x_ptr + (first + rows).to(tl.int64)[:, None] * x_stride
    a_rows = a_ptr + ((place * PARTS + part) * RANK + ranks)[:, None] * SIZE
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(split * SPLIT, min((split + 1) * SPLIT, SIZE), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (columns < SIZE)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & inside, other=0.0)
        a = tl.load(a_rows + columns[None, :], mask=is_rank[:, None] & inside, other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
    where = ((split * num_rows + first + rows).to(tl.int64) * PARTS + part)[:, None] * RANKS
    tl.store(out_ptr + where + ranks[None, :], sums, mask=is_row[:, None])


@triton.jit
def _change(
    hidden_ptr,
    b_ptr,
    tokens,
    is_row,
    place,
    part,
    columns,
    inside,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """B (A x) of a tile's rows in some columns of one part, float32."""
    ranks = tl.arange(0, RANKS)
    split = tl.arange(0, SPLITS).to(tl.int64)[:, None, None] * num_rows
    where = ((split + tokens[None, :, None]) * PARTS + part) * RANKS + ranks[None, None, :]
    hidden = tl.sum(tl.load(hidden_ptr + where, mask=is_row[None, :, None], other=0.0), axis=0)
    b_rows = b_ptr + (place * SIZE + columns)[:, None] * RANK
    mask = inside[:, None] & (ranks < RANK)[None, :]
    b = tl.load(b_rows + ranks[None, :], mask=mask, other=0.0)
    return tl.dot(hidden.to(b.dtype), tl.trans(b), input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    hidden_ptr,
    b_ptr,
    y_ptr,
    tiles_ptr,
    blocks_ptr,
    y_stride,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y += B (A x). A block of columns is in one part of a fused matmul."""
    block, tile = tl.program_id(0), tl.program_id(1)
    first = tl.load(tiles_ptr + tile * 3)
    count = tl.load(tiles_ptr + tile * 3 + 1)
    place = tl.load(tiles_ptr + tile * 3 + 2).to(tl.int64)
    if count * place == 0:
        return
    part = tl.load(blocks_ptr + block * 3)
    begin = tl.load(blocks_ptr + block * 3 + 1)
    end = tl.load(blocks_ptr + block * 3 + 2)
    columns = begin + tl.arange(0, BLOCK)
    inside = columns < end
    rows = tl.arange(0, ROWS)
    is_row, tokens = rows < count, (first + rows).to(tl.int64)
    change = _change(
        hidden_ptr,
        b_ptr,
        tokens,
        is_row,
        place,
        part,
        columns,
        inside,
        num_rows,
        SIZE=SIZE,
        RANK=RANK,
        RANKS=RANKS,
        PARTS=PARTS,
        SPLITS=SPLITS,
    )
    out = y_ptr + tokens[:, None] * y_stride + columns[None, :]
    mask = is_row[:, None] & inside[None, :]
    y = tl.load(out, mask=mask, other=0.0)
    tl.store(out, (y.to(tl.float32) + change).to(y.dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_gated_kernel(
    hidden_ptr,
    b_ptr,
    y_ptr,
    out_ptr,
    tiles_ptr,
    y_stride,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
):
    """out = act(gate + B (A x)) * (up + B (A x)), also for rows without adapters."""
    half: tl.constexpr = SIZE // 2
    tile = tl.program_id(1)
    first = tl.load(tiles_ptr + tile * 3)
    count = tl.load(tiles_ptr + tile * 3 + 1)
    place = tl.load(tiles_ptr + tile * 3 + 2).to(tl.int64)
    if count == 0:
        return
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < half
    rows = tl.arange(0, ROWS)
    is_row, tokens = rows < count, (first + rows).to(tl.int64)
    mask = is_row[:, None] & inside[None, :]
    y = y_ptr + tokens[:, None] * y_stride + columns[None, :]
    gate = tl.load(y, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(y + half, mask=mask, other=0.0).to(tl.float32)
    if place != 0:
        gate += _change(
            hidden_ptr,
            b_ptr,
            tokens,
            is_row,
            place,
            0,
            columns,
            inside,
            num_rows,
            SIZE=SIZE,
            RANK=RANK,
            RANKS=RANKS,
            PARTS=PARTS,
            SPLITS=SPLITS,
        )
        up += _change(
            hidden_ptr,
            b_ptr,
            tokens,
            is_row,
            place,
            PARTS - 1,
            columns + half,
            inside,
            num_rows,
            SIZE=SIZE,
            RANK=RANK,
            RANKS=RANKS,
            PARTS=PARTS,
            SPLITS=SPLITS,
        )
    out = out_ptr + tokens[:, None] * half + columns[None, :]
    tl.store(out, gate_times(gate, up, GATE), mask=mask)


def lora_linear(
    tiles: Tensor, stack: LoraStack, read: Made, product: Made, gate: str | None, yields: bool
) -> Tensor:
    a, b, sizes = stack

    def shrink() -> Tensor:
        return _shrink(read(), a, tiles, len(sizes), b.shape[2])

    side = _side_stream(a.device, yields) if a.is_cuda else None  # not made during a capture
    if side is None or not torch.cuda.is_current_stream_capturing():
        hidden, y = shrink(), product()
    else:
        main = torch.cuda.current_stream(a.device)
        begun = main.record_event()
        if yields:  # the programs of what comes first start first
            y = product()
        side.wait_event(begun)
        with torch.cuda.stream(side):
            hidden = shrink()
        if not yields:
            y = product()
        main.wait_stream(side)
    if gate is not None:
        return _expand_gated(y, hidden, b, tiles, gate)
    _expand(y, hidden, b, tiles, sizes)
    return y


@cache
def _side_stream(device: torch.device, yields: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0 if yields else -1)


@cache
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The part, the first column and the end of each block of columns, (N, 3) int32. The first step
    with adapters is no captured one, so this copy is not captured.
    """
    rows, start = [], 0
    for part, size in enumerate(sizes):
        end = start + size
        rows += [(part, column, end) for column in range(start, end, _WRITTEN)]
        start = end
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _shrink(x: Tensor, a: Tensor, tiles: Tensor, parts: int, rank: int) -> Tensor:
    """A x of all parts, as sums over splits of the columns: (splits, T, parts, ranks) float32."""
    num_rows, size = x.shape
    ranks = triton.next_power_of_2(rank)
    # A power of two, because a program of the second launch reads all of them at once.
    splits = triton.next_power_of_2(min(_MAX_SPLITS, triton.cdiv(size, _MIN_SPLIT)))
    read = min(_READ_BYTES // x.element_size(), triton.next_power_of_2(size))
    split = triton.cdiv(triton.cdiv(size, splits), read) * read
    hidden = torch.empty((splits, num_rows, parts, ranks), dtype=torch.float32, device=x.device)
    _shrink_kernel[(splits, parts, len(tiles))](
        x,
        a,
        hidden,
        tiles,
        x.stride(0),
        num_rows,
        SIZE=size,
        RANK=rank,
        RANKS=ranks,
        PARTS=parts,
        SPLIT=split,
        ROWS=TILE_ROWS,
        BLOCK=read,
        num_stages=2,
    )
    return hidden


def _expand(y: Tensor, hidden: Tensor, b: Tensor, tiles: Tensor, sizes: tuple[int, ...]) -> None:
    splits, num_rows, parts, ranks = hidden.shape
    blocks = _blocks(sizes, y.device)
    _expand_kernel[(len(blocks), len(tiles))](
        hidden,
        b,
        y,
        tiles,
        blocks,
        y.stride(0),
        num_rows,
        SIZE=b.shape[1],
        RANK=b.shape[2],
        RANKS=ranks,
        PARTS=parts,
        SPLITS=splits,
        ROWS=TILE_ROWS,
        BLOCK=_WRITTEN,
    )


def _expand_gated(y: Tensor, hidden: Tensor, b: Tensor, tiles: Tensor, gate: str) -> Tensor:
    splits, num_rows, parts, ranks = hidden.shape
    size = b.shape[1]
    out = torch.empty((num_rows, size // 2), dtype=y.dtype, device=y.device)
    _expand_gated_kernel[(triton.cdiv(size // 2, _GATED), len(tiles))](
        hidden,
        b,
        y,
        out,
        tiles,
        y.stride(0),
        num_rows,
        SIZE=size,
        RANK=b.shape[2],
        RANKS=ranks,
        PARTS=parts,
        SPLITS=splits,
        ROWS=TILE_ROWS,
        BLOCK=_GATED,
        GATE=gate,
    )
    return out
