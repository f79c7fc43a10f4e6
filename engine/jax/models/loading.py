"""Loads a model and its parameters from a checkpoint, one tensor at a time."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.architectures.base import ModelConfig
from engine.ir.rotary import rope_frequencies
from engine.jax.layers.linear import Params
from engine.jax.models.base import Frequencies, Model
from engine.runners.parameters import (
    Weight,
    check_decoder,
    parameter_tree,
    rope_factors,
)
from engine.weights.random import RandomWeight

Place = Callable[[str, Array | NDArray[np.generic]], Array]  # puts a named array on the devices


def build_model(config: ModelConfig, weights: Mapping[str, Weight], max_seq_len: int) -> Model:
    """Builds the compile-time part of a model. The only weight that it reads is "rope.factors"."""
    check_decoder(config, "jax")
    factors = rope_factors(weights)
    found = [rope_frequencies(rope, max_seq_len, factors) for rope in config.ropes]
    frequencies = (Frequencies(tuple(map(float, each)), scale) for each, scale in found)
    return Model(config, tuple(frequencies))


def load_params(weights: Mapping[str, Weight], dtype: jnp.dtype, place: Place) -> Params:
    """Loads all weights in the given dtype into a parameter tree. The modules of `architectures/`
    list the names of the weights.
    """

    def decode(weight: Weight) -> Array | NDArray[np.generic]:
        if isinstance(weight, RandomWeight):  # random weights are generated on the device
            normal = weight.values
            drawn = jax.random.normal(jax.random.key(normal.seed), weight.spec.shape, dtype)
            return drawn * normal.std + normal.mean
        return weight.numpy().astype(dtype)

    return parameter_tree(weights, decode, place)
