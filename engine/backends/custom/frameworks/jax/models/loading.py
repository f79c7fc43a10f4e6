"""A family's model and its parameters from a checkpoint, one tensor at a time.

Each weight is decoded, cast, put where it belongs on the devices and dropped, so the host holds one
float32 tensor at most. Names with dots become the levels of a pytree; numbers become lists.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.jax.layers.linear import Params
from engine.backends.custom.frameworks.jax.models import gpt2, llama, qwen2, qwen3
from engine.backends.custom.frameworks.jax.models.base import Family, Model
from engine.backends.custom.ir.rotary import rope_frequencies
from engine.backends.custom.weights.random import RandomWeight
from engine.core.errors import ModelFormatError

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
}
ROPE_FACTORS = "rope.factors"
FUSED = ".attn.qkv."  # a matrix whose rows are those of q, then k, then v

Place = Callable[[str, Array | NDArray[np.generic]], Array]  # by name, onto the devices


class Weight(Protocol):
    def numpy(self) -> NDArray[np.float32]:
        """The decoded tensor, (out, in) for a matrix."""
        ...


def build_model(config: ModelConfig, weights: Mapping[str, Weight], max_seq_len: int) -> Model:
    """What is known before any weight is read, but for the factors of a rotary rule."""
    if config.family not in FAMILIES:
        raise ModelFormatError(
            f"the jax framework has no model for family '{config.family}'; "
            f"it has {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[config.family]
    if config.rope is None:
        return Model(config, family)
    factors = weights.get(ROPE_FACTORS)
    given = None if factors is None else factors.numpy()
    frequencies, scale = rope_frequencies(config.rope, max_seq_len, given)
    return Model(config, family, tuple(map(float, frequencies)), scale)


def load_params(weights: Mapping[str, Weight], dtype: jnp.dtype, place: Place) -> Params:
    """Every weight as the given type, under the names of `architectures`."""
    params: Params = {}
    for name, weight in weights.items():
        if name == ROPE_FACTORS:
            continue
        for part, values in _parts(name, _values(weight, dtype)):
            _insert(params, part.split("."), place(part, values))
    params["layers"] = [params["layers"][str(i)] for i in range(len(params["layers"]))]
    return params


def _values(weight: Weight, dtype: jnp.dtype) -> Array | NDArray[np.generic]:
    if isinstance(weight, RandomWeight):  # drawn where it is needed
        normal = weight.values
        drawn = jax.random.normal(jax.random.key(normal.seed), weight.spec.shape, dtype)
        return drawn * normal.std + normal.mean
    return weight.numpy().astype(dtype)


def _parts(
    name: str, values: Array | NDArray[np.generic]
) -> Iterator[tuple[str, Array | NDArray[np.generic]]]:
    if FUSED not in name:
        yield name, values
        return
    size = len(values) // 3
    for index, part in enumerate("qkv"):
        rows = values[index * size : (index + 1) * size]
        yield name.replace(FUSED, f".attn.{part}."), rows


def _insert(tree: Params, path: list[str], value: Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
