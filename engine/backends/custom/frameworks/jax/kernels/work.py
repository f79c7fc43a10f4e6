"""The attention work of a step. The host cuts the step's queries into items. An item is a run of
consecutive queries of one row.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array


class Work(NamedTuple):
    """The attention items of a step. Items with one query come first; padding items come last.

    Letters: T tokens, S rows, B blocks of a table, I items.
    """

    positions: Array  # (T,)
    tables: Array  # (S, B)
    token: Array  # (I,) index of each item's first token in the step
    length: Array  # (I,) number of queries of each item; 0: padding
    row: Array  # (I,) index of each item's row in `tables`
    num_singles: Array  # () number of items with one query
    num_items: Array  # () number of items without padding


def is_visible(distance: Array, window: int | None) -> Array:
    """Whether a query attends to a key that is `distance` positions before the query. `window` is
    the size of the sliding window; None: the model has no window.
    """
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The arguments of attention that are known when a step is compiled."""

    tile: int  # max queries per item
    block_size: int
    window: int | None
    scale: float  # multiplies the attention scores
