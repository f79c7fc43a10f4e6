"""Llama 1 to 3, and what shares its block: Mistral (a sliding window) and SmolLM."""

from jax import Array

from engine.backends.custom.frameworks.jax.layers.linear import Params, embedding
from engine.backends.custom.frameworks.jax.layers.mlp import gated_mlp
from engine.backends.custom.frameworks.jax.layers.norm import rms_norm
from engine.backends.custom.frameworks.jax.models.base import Family


def embed(params: Params, token_ids: Array, positions: Array) -> Array:
    return embedding(params["embed"], token_ids)


FAMILY = Family(embed=embed, norm=rms_norm, mlp=gated_mlp)
