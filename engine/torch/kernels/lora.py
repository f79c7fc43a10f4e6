"""What LoRA adapters add to the result of a matmul, for rows that have adapters.

The rows of a step are divided into tiles of at most `TILE_ROWS` consecutive rows with the same
adapter. A tile is (first row, number of rows, place of the adapter). Place 0 is the base model.
Tiles without rows are padding.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.runtime.model_runner import I32
from engine.torch.kernels.activation import gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, Shape, op, size_of

Made = Callable[[], Tensor]  # a tensor that is computed when it is needed
TILE_ROWS = 16
TILE_FIELDS = 3
MAX_ADAPTERS = 256  # the max of performance.max_adapters


def most_tiles(num_rows: int, num_adapters: int) -> int:
    """The max number of tiles of so many rows. Rows are sorted by adapter, so there is at most one
    tile that is not full for each adapter, for rows without one, and for padding.
    """
    runs = min(num_rows, num_adapters + 2)
    return (num_rows + (TILE_ROWS - 1) * runs) // TILE_ROWS


def tiles_of(places: I32, num_rows: int, num_adapters: int) -> I32:
    """The tiles of `num_rows` rows, (N, 3). The first rows have these places, the rest have none.
    There are always as many tiles as such rows can need.
    """
    rows = np.zeros(num_rows, np.int32)
    rows[: len(places)] = places
    edges = np.flatnonzero(np.diff(rows, prepend=-1, append=-1))
    tiles = [
        (start, min(TILE_ROWS, end - start), rows[first])
        for first, end in zip(edges[:-1], edges[1:], strict=True)
        for start in range(first, end, TILE_ROWS)
    ]
    padded = np.zeros((max(1, most_tiles(num_rows, num_adapters)), TILE_FIELDS), np.int32)
    padded[: len(tiles)] = np.array(tiles, np.int32).reshape(-1, TILE_FIELDS)
    return padded


class LoraStack(NamedTuple):
    """The matrices of one layer in all places. Place 0, which is the base model, is zero."""

    a: Tensor  # (P, parts * R, D); for embeddings (P, R, V)
    b: Tensor  # (P, F, R)
    sizes: tuple[int, ...]  # output channels of each part of a fused layer


@op("lora:lora_linear")
def lora_linear(
    tiles: Tensor, stack: LoraStack, read: Made, product: Made, gate: str | None, yields: bool
) -> Tensor:
    """product()[t] + b[p] (a[p] read()[t]) for each row t of a tile with place p. `gate` names a
    gated activation of the result.

    `product` computes the matmul of the base model, (T, F), and `read` its input, (T, D). What
    `product` returns may be modified. `tiles` is (N, 3) int32, and covers all rows.
    `yields` says that a x, beside the product in a CUDA graph, gets the multiprocessors that the
    product leaves free. That is better for few tiles, if the product does not use all of them.
    """
    a, b, sizes = stack
    x, y = read(), product()
    places = places_of(tiles, len(y))
    for place in range(1, len(a)):
        own = (places == place).nonzero()[:, 0]
        if not len(own):
            continue
        hidden = (x.index_select(0, own) @ a[place].T).chunk(len(sizes), dim=1)
        parts = zip(hidden, b[place].split(sizes), strict=True)
        y.index_add_(0, own, torch.cat([each @ part.T for each, part in parts], dim=1))
    return y if gate is None else gated_halves(y, gate)


def lora_embed(y: Tensor, ids: Tensor, a: Tensor, b: Tensor, tiles: Tensor) -> Tensor:
    """y[t] += b[p] a[p][:, ids[t]] for each row t of a tile with place p. Returns the sum.

    y (T, D), ids (T,), a (P, R, V), b (P, D, R)
    """
    places = places_of(tiles, len(y))
    ranks = a[places, :, ids]  # (T, R)
    for place in range(1, len(b)):
        own = (places == place)[:, None]
        y = y + torch.where(own, ranks, 0) @ b[place].T
    return y


def places_of(tiles: Tensor, num_rows: int) -> Tensor:
    """The place of each row's adapter, (T,). 0: the row has none."""
    starts, counts, places = tiles.long().unbind(1)
    rows = torch.arange(num_rows, device=tiles.device)
    inside = (rows >= starts[:, None]) & (rows < (starts + counts)[:, None])  # (N, T)
    return (inside * places[:, None]).sum(0)


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype, seed=5)
    num_places, rank, size = 4, 16, shape.hidden_size
    keys = shape.num_kv_heads * shape.head_dim
    for rows in shape.rows:
        # Sorted by adapter, as the rows of a step are. The first ones have none.
        places = np.sort(np.arange(1, rows + 1, dtype=np.int32) % num_places)
        tiles = torch.from_numpy(tiles_of(places, rows, num_places - 1)).to(device)
        x = inputs.normal(rows, size)
        queries = shape.qkv_size - 2 * keys
        for gate, sizes in (
            (None, (queries, keys, keys)),
            (None, (size,)),
            ("silu", 2 * (shape.inner_size,)),
        ):
            a = inputs.normal(num_places, rank * len(sizes), size, scale=size**-0.5)
            b = inputs.normal(num_places, sum(sizes), rank, scale=0.3)
            stack, y = LoraStack(a, b, sizes), inputs.normal(rows, sum(sizes))
            yield Example(
                f"{rows}x{size}x{'+'.join(map(str, sizes))} {gate or ''}",
                (tiles, stack, lambda x=x: x, lambda y=y: y.clone(), gate, False),
            )


def _bytes(tiles: Tensor, stack: LoraStack, read: Made, *_: Any) -> int:
    x = read()
    return size_of(x, stack.a, stack.b) + 2 * len(x) * stack.b.shape[1] * x.element_size()


def _flops(tiles: Tensor, stack: LoraStack, read: Made, *_: Any) -> int:
    return 2 * len(read()) * (stack.a[0].numel() + stack.b[0].numel())


# The reference rounds A x, and the sum before the activation, which the kernel does not.
lora_linear.specify(_examples, _bytes, flops_of=_flops, tolerance=SUMMED)
