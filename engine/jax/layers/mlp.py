"""The MLP of a layer: gated in Llama and its descendants, without a gate in GPT-2."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from engine.jax.layers.linear import Params, linear
from engine.runners.parameters import SWIGLU_ALPHA, SWIGLU_LIMIT

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def gated(activation: str, gate: Array, up: Array) -> Array:
    """The input of the down projection, from the outputs of the gate and up projections."""
    if activation == "swiglu_oai":
        gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up


def gated_mlp(params: Params, x: Array, activation: str) -> Array:
    gate, up = linear(params["gate"], x), linear(params["up"], x)
    return linear(params["down"], gated(activation, gate, up))


def mlp(params: Params, x: Array, activation: str) -> Array:
    return linear(params["down"], ACTIVATIONS[activation](linear(params["up"], x)))
