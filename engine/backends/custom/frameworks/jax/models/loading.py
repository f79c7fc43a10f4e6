"""A family's model and its parameters from a checkpoint, one tensor at a time."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.jax.layers.linear import Params
from engine.backends.custom.frameworks.jax.models import gpt2, llama, qwen2, qwen3
from engine.backends.custom.frameworks.jax.models.base import Family, Model
from engine.backends.custom.frameworks.parameters import (
    Weight,
    family_of,
    parameter_tree,
    rope_factors,
)
from engine.backends.custom.ir.rotary import rope_frequencies
from engine.backends.custom.weights.random import RandomWeight

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}

Place = Callable[[str, Array | NDArray[np.generic]], Array]  # by name, onto the devices


def build_model(config: ModelConfig, weights: Mapping[str, Weight], max_seq_len: int) -> Model:
    """What is known before any weight is read, but for the factors of a rotary rule."""
    family = family_of(FAMILIES, config, "jax")
    if config.rope is None:
        return Model(config, family)
    frequencies, scale = rope_frequencies(config.rope, max_seq_len, rope_factors(weights))
    return Model(config, family, tuple(map(float, frequencies)), scale)


def load_params(weights: Mapping[str, Weight], dtype: jnp.dtype, place: Place) -> Params:
    """Every weight as the given type, under the names of `architectures`."""

    def decode(weight: Weight) -> Array | NDArray[np.generic]:
        if isinstance(weight, RandomWeight):  # drawn where it is needed
            normal = weight.values
            drawn = jax.random.normal(jax.random.key(normal.seed), weight.spec.shape, dtype)
            return drawn * normal.std + normal.mean
        return weight.numpy().astype(dtype)

    return parameter_tree(weights, decode, place)
