"""The MLP of a layer: gated in Llama and its descendants, without a gate in GPT-2."""

from collections.abc import Callable
from functools import partial

import jax
from jax import Array

from engine.backends.custom.frameworks.jax.layers.linear import Params, linear

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def gated_mlp(params: Params, x: Array, activation: str) -> Array:
    gate = ACTIVATIONS[activation](linear(params["gate"], x))
    return linear(params["down"], gate * linear(params["up"], x))


def mlp(params: Params, x: Array, activation: str) -> Array:
    return linear(params["down"], ACTIVATIONS[activation](linear(params["up"], x)))
