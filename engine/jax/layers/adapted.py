"""LoRA adapters in a parameter tree. The matrices of all places are stacked, and a mask over the
stacked ranks keeps, for each row, those of its own adapter.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.adapters.matrices import EMBED, HEAD
from engine.jax.layers.linear import (
    LORA,
    TABLE_LORA,
    TABLE_WHOLE,
    WHOLE,
    Lora,
    Params,
    Whole,
)


class Stack(NamedTuple):
    """The matrices of one weight in all places. Place 0 is the base model and is zero."""

    a: Array  # (P, R, D); for embeddings (P, R, V)
    b: Array  # (P, R, F)


class RowAdapters(NamedTuple):
    """The stacks by weight name, and the place of each row's adapter."""

    stacks: dict[str, Stack]
    # Matrices that replace embeddings or head, (N, V, D), and the places of their adapters, (N,).
    whole: dict[str, tuple[Array, Array]]
    places: Array | NDArray[np.int32]  # (T,)


def with_adapters(params: Params, rows: RowAdapters | None) -> Params:
    """The parameters of a step, with the adapters of its rows."""
    if rows is None:
        return params
    tree = dict(params)
    if "layers" in tree:
        tree["layers"] = list(tree["layers"])
    # The head may share the table of embeddings.
    if HEAD in {*rows.stacks, *rows.whole} and "head" not in tree:
        tree["head"] = {"weight": tree["embed"]["weight"]}
    for name, stack in rows.stacks.items():
        *path, part, _ = name.split(".")
        branch = tree
        for key in path:
            index = int(key) if key.isdigit() else key
            if isinstance(branch, dict) and index not in branch:
                break  # of the layers, which this function does not need
            branch[index] = dict(branch[index]) if key != "layers" else branch[index]
            branch = branch[index]
        else:
            kind = TABLE_LORA if name == EMBED else LORA
            branch[part] = {**branch[part], kind: _masked(stack, rows.places)}
    for name, (weights, of) in rows.whole.items():
        part, kind = ("embed", TABLE_WHOLE) if name == EMBED else ("head", WHOLE)
        if part in tree:
            own = jnp.asarray(rows.places)[:, None] == of
            tree[part] = {**tree[part], kind: Whole(weights, own)}
    return tree


def _masked(stack: Stack, places: Array | NDArray[np.int32]) -> Lora:
    count, rank = stack.a.shape[:2]
    own = jnp.repeat(jnp.asarray(places)[:, None] == jnp.arange(count), rank, axis=1)  # (T, P R)
    return Lora(
        stack.a.reshape(count * rank, -1),
        stack.b.reshape(count * rank, -1),
        own.astype(stack.a.dtype),
    )
