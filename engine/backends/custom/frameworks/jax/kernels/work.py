"""A step's attention work: the host cuts its queries into items of one row each."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array


class Work(NamedTuple):
    """Attention's work in a step. Single-query items come first; padding items come last.

    Letters: T tokens, S rows, B blocks of a table, I items.
    """

    positions: Array  # (T,)
    tables: Array  # (S, B)
    token: Array  # (I,) an item's first query, index into T
    length: Array  # (I,) number of queries; 0: padding
    row: Array  # (I,) index into S
    num_singles: Array  # () items of one query
    num_items: Array  # () items in use


def is_visible(distance: Array, window: int | None) -> Array:
    """Whether a query sees a key that lies `distance` positions before it."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is known when attention is traced."""

    tile: int  # max queries per item
    block_size: int
    window: int | None
    scale: float  # multiplies scores
