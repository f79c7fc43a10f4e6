"""GPT-2: learned positions, layer norms, a plain feed-forward half, biases everywhere."""

from jax import Array

from engine.backends.custom.frameworks.jax.layers.linear import Params, embedding
from engine.backends.custom.frameworks.jax.layers.mlp import mlp
from engine.backends.custom.frameworks.jax.layers.norm import layer_norm
from engine.backends.custom.frameworks.jax.models.base import Family


def embed(params: Params, token_ids: Array, positions: Array) -> Array:
    return embedding(params["embed"], token_ids) + embedding(params["position"], positions)


FAMILY = Family(embed=embed, norm=layer_norm, mlp=mlp)
