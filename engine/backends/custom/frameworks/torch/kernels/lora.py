"""What LoRA adapters add to the result of a matmul, for rows that have adapters.

The rows of a step that have an adapter are divided into tiles of at most `TILE_ROWS` consecutive
rows with the same adapter. A tile is (first row, number of rows, place of the adapter). Tiles
without rows are padding.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.backends.custom.frameworks.torch.kernels.base import (
    Example,
    Inputs,
    KernelSpec,
    Shape,
    compiled,
    register,
    size_of,
)

TILE_ROWS = 16
TILE_FIELDS = 3


def lora_add(y: Tensor, x: Tensor, a: Tensor, b: Tensor, tiles: Tensor) -> Tensor:
    """y[t] += b[p] (a[p] x[t]) for each row t of a tile with place p, in place. Returns y.

    y (T, F), x (T, D), a (P, R, D), b (P, F, R), tiles (N, 3) int32
    """
    return _LORA_ADD(y, x, a, b, tiles)


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


def _lora_add_reference(y: Tensor, x: Tensor, a: Tensor, b: Tensor, tiles: Tensor) -> Tensor:
    places = places_of(tiles, len(y))
    for place in range(1, len(a)):
        own = (places == place).nonzero()[:, 0]
        if len(own):
            y.index_add_(0, own, (x.index_select(0, own) @ a[place].T) @ b[place].T)
    return y


def _examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype, seed=5)
    num_places, rank = 4, 16
    size, inner = shape.hidden_size, shape.inner_size
    a = inputs.normal(num_places, rank, size, scale=size**-0.5)
    b = inputs.normal(num_places, inner, rank, scale=0.3)
    for rows in shape.rows:
        tiles, first = [], 0
        for place in (0, 2, 1, 3):  # the first rows have no adapter
            end = rows * (len(tiles) + 1) // 4 if place else max(rows // 4, 0)
            for start in range(first, end, TILE_ROWS) if place else ():
                tiles.append((start, min(TILE_ROWS, end - start), place))
            first = max(first, end)
        tiles += [(first, rows - first, 3)] if first < rows <= first + TILE_ROWS else []
        tiles.append((0, 0, 0))
        where = torch.tensor(tiles, dtype=torch.int32, device=device)
        x, y = inputs.normal(rows, size), inputs.normal(rows, inner)
        yield Example(f"{rows}x{size}x{inner}", (y, x, a, b, where))


_LORA_ADD = register(
    KernelSpec(
        name="lora_add",
        reference=_lora_add_reference,
        triton=compiled("lora:lora_add"),
        examples=_examples,
        bytes_of=lambda y, x, a, b, tiles: size_of(y, y, x, a, b),
        flops_of=lambda y, x, a, b, tiles: 2 * len(x) * a.shape[1] * (x.shape[1] + y.shape[1]),
    )
)
