"""A step as work for attention: its queries, cut on the host into items of one row each."""

from dataclasses import dataclass
from typing import NamedTuple

from jax import Array


class Work(NamedTuple):
    """What attention has to do in a step. Items of one query come first; the last ones are unused.

    Letters: T tokens, S rows, B blocks of a table, I items.
    """

    positions: Array  # (T,)
    tables: Array  # (S, B)
    token: Array  # (I,) an item's first query, index into T
    length: Array  # (I,) its queries; 0: unused
    row: Array  # (I,) index into S
    num_singles: Array  # () items of one query
    num_items: Array  # () items in use


def is_visible(distance: Array, window: int | None) -> Array:
    """Whether a query sees a key that lies so many positions before it."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is known when attention is traced."""

    tile: int  # queries of an item, at most
    block_size: int
    window: int | None
    scale: float  # of scores
