"""Matmul and embedding lookup. The parameters of a layer are a dictionary with "weight", (out, in),
and an optional "bias". In a step with LoRA adapters, they have a `Lora` as well.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from engine.jax.kernels.matmul import precision

Params = dict  # a pytree: names to arrays or to nested dictionaries
LORA, TABLE_LORA = "lora", "table_lora"  # keys of a `Lora`, for a matmul and for a lookup
WHOLE, TABLE_WHOLE = "whole", "table_whole"  # keys of a `Whole`, also for a matmul and a lookup


class Lora(NamedTuple):
    """The stacked matrices of all adapters, and which of the ranks each row uses."""

    a: Array  # (P R, in)
    b: Array  # (P R, out)
    mask: Array  # (T, P R) 0 or 1


class Whole(NamedTuple):
    """Matrices of some adapters that take the place of "weight", and which of them a row uses."""

    weights: Array  # (N, out, in)
    own: Array  # (T, N) bool


def _replaced(y: Array, whole: Whole | None, results: Callable[[Array], Array]) -> Array:
    """y, but for rows with a matrix of their own the results of that."""
    if whole is not None:
        for index in range(len(whole.weights)):
            y = jnp.where(whole.own[:, index, None], results(whole.weights[index]), y)
    return y


def linear(params: Params, x: Array) -> Array:
    y = jnp.einsum("...i,oi->...o", x, params["weight"], precision=precision(x.dtype))
    if (lora := params.get(LORA)) is not None:
        ranks = jnp.einsum("ti,ri->tr", x, lora.a, precision=precision(x.dtype)) * lora.mask
        y = y + jnp.einsum("tr,ro->to", ranks, lora.b, precision=precision(x.dtype))
    product = partial(jnp.einsum, "ti,oi->to", x, precision=precision(x.dtype))
    y = _replaced(y, params.get(WHOLE), product)
    return y + params["bias"] if "bias" in params else y


def embedding(params: Params, ids: Array) -> Array:
    """Looks up the embeddings of token ids or positions: (T,) -> (T, D)"""
    found = params["weight"].at[ids].get(mode="clip")
    found = _replaced(found, params.get(TABLE_WHOLE), lambda table: table.at[ids].get(mode="clip"))
    if (lora := params.get(TABLE_LORA)) is None:
        return found
    ranks = lora.a.T.at[ids].get(mode="clip") * lora.mask
    return found + jnp.einsum("tr,ro->to", ranks, lora.b, precision=precision(found.dtype))
