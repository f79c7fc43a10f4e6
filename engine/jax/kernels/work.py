"""The attention work of a step. The host cuts the step's queries into items. An item is a run of
consecutive queries of one row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from engine.runners.scoring import HIDDEN, Scoring


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


class PerHead(NamedTuple):
    """Values of a layer's query heads, (N,) float32 each. None: the model has none."""

    slopes: Array | None = None  # of ALiBi
    sinks: Array | None = None  # logits that only add to the sum of softmax


def scores(scaled: Array, distance: Array, scoring: Scoring, slopes: Array | None) -> Array:
    """Attention scores from dot products that are already scaled. A key that is `distance`
    positions before the query gets HIDDEN if the query must not attend to it.
    """
    if scoring.softcap is not None:
        scaled = scoring.softcap * jnp.tanh(scaled / scoring.softcap)
    if slopes is not None:
        scaled = scaled - slopes * distance
    visible = distance >= 0
    if scoring.window is not None:
        visible = visible & (distance < scoring.window)
    return jnp.where(visible, scaled, HIDDEN)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The arguments of attention that are known when a step is compiled."""

    tile: int  # max queries per item
    block_size: int
    scoring: Scoring
    value_dim: int  # values that a head puts out
