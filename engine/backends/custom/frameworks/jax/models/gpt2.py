"""GPT-2's learned positions, added to the token embeddings; `base.py` has the rest."""

from jax import Array

from engine.backends.custom.frameworks.jax.layers.linear import Params, embedding


def add_positions(params: Params, x: Array, positions: Array) -> Array:
    """x (T, D), positions (T,) -> (T, D)"""
    return x + embedding(params["position"], positions)
