"""GPT-2's learned position embeddings. All other parts of the model are in `base.py`."""

from jax import Array

from engine.jax.layers.linear import Params, embedding


def add_positions(params: Params, x: Array, positions: Array) -> Array:
    """Adds the position embeddings to the token embeddings: x (T, D), positions (T,) -> (T, D)"""
    return x + embedding(params["position"], positions)
