"""LoRA adapters in two launches: A x for each tile of rows, then y += B (A x).

The first launch divides the columns of x into parts, so that few rows also use many programs. The
second one adds up the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16
COLUMNS = 64  # columns of x, or of y, that a program multiplies at a time
MAX_PARTS = 8
MIN_PART = 256  # columns of x in a part


@triton.jit
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
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(tiles_ptr + tile * 3)
    count = tl.load(tiles_ptr + tile * 3 + 1)
    place = tl.load(tiles_ptr + tile * 3 + 2).to(tl.int64)
    if count == 0:
        return
    rows = tl.arange(0, ROWS)
    ranks = tl.arange(0, RANKS)
    is_row = rows < count
    x_rows = x_ptr + (first + rows).to(tl.int64)[:, None] * x_stride
    a_rows = a_ptr + (place * RANK + ranks)[:, None] * SIZE
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(part * PART, min((part + 1) * PART, SIZE), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < SIZE
        x = tl.load(x_rows + columns[None, :], mask=is_row[:, None] & inside[None, :], other=0.0)
        within = (ranks < RANK)[:, None] & inside[None, :]
        a = tl.load(a_rows + columns[None, :], mask=within, other=0.0)
        if EXACT:
            sums += tl.dot(x, tl.trans(a), input_precision="ieee")
        else:
            sums += tl.dot(x, tl.trans(a))
    where = (part * num_rows + first + rows).to(tl.int64)[:, None] * RANKS + ranks[None, :]
    tl.store(out_ptr + where, sums, mask=is_row[:, None])


@triton.jit
def _expand_kernel(
    hidden_ptr,
    b_ptr,
    y_ptr,
    tiles_ptr,
    y_stride,
    num_rows,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile = tl.program_id(0)
    first = tl.load(tiles_ptr + tile * 3)
    count = tl.load(tiles_ptr + tile * 3 + 1)
    place = tl.load(tiles_ptr + tile * 3 + 2).to(tl.int64)
    if count == 0:
        return
    rows = tl.arange(0, ROWS)
    ranks = tl.arange(0, RANKS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row, inside = rows < count, columns < SIZE
    where = (first + rows).to(tl.int64)[:, None] * RANKS + ranks[None, :]
    hidden = tl.zeros((ROWS, RANKS), tl.float32)
    for part in range(PARTS):
        offset = tl.cast(part, tl.int64) * num_rows * RANKS
        hidden += tl.load(hidden_ptr + offset + where, mask=is_row[:, None], other=0.0)
    within = inside[:, None] & (ranks < RANK)[None, :]
    b_rows = b_ptr + (place * SIZE + columns)[:, None] * RANK
    b = tl.load(b_rows + ranks[None, :], mask=within, other=0.0)
    if EXACT:
        change = tl.dot(hidden.to(b.dtype), tl.trans(b), input_precision="ieee")
    else:
        change = tl.dot(hidden.to(b.dtype), tl.trans(b))
    out = y_ptr + (first + rows).to(tl.int64)[:, None] * y_stride + columns[None, :]
    mask = is_row[:, None] & inside[None, :]
    y = tl.load(out, mask=mask, other=0.0)
    tl.store(out, (y.to(tl.float32) + change).to(y.dtype), mask=mask)


def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, tiles: Tensor) -> Tensor:
    num_rows, size = x.shape
    rank, out_size = a.shape[1], b.shape[1]
    ranks = max(16, triton.next_power_of_2(rank))
    parts = min(MAX_PARTS, triton.cdiv(size, MIN_PART))
    part = triton.cdiv(triton.cdiv(size, parts), COLUMNS) * COLUMNS
    hidden = torch.empty((parts, num_rows, ranks), dtype=torch.float32, device=x.device)
    sizes = {"RANK": rank, "RANKS": ranks, "ROWS": TILE_ROWS, "BLOCK": COLUMNS}
    sizes["EXACT"] = x.dtype == torch.float32
    _shrink_kernel[(len(tiles), parts)](
        x, a, hidden, tiles, x.stride(0), num_rows, SIZE=size, PART=part, **sizes
    )
    _expand_kernel[(len(tiles), triton.cdiv(out_size, COLUMNS))](
        hidden, b, y, tiles, y.stride(0), num_rows, SIZE=out_size, PARTS=parts, **sizes
    )
    return y
