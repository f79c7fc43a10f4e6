"""What every decoder shares, as functions of its parameters.

A model is a `Model`, which is data known when a function is traced, and a pytree of parameters,
which is not. Serving runs `decode` with an `attend` that reads and writes the paged cache; parity
tests and training call `forward_sequence`, which is differentiable with respect to the parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.frameworks.jax.layers.attention import causal_attention, heads
from engine.backends.custom.frameworks.jax.layers.linear import Params, linear
from engine.backends.custom.frameworks.jax.layers.rotary import Rotation, rotation

Memory = Any  # a pytree of the step's own kind
# From a layer's queries (T, N, H), keys and values (T, K, H), and what it remembers of earlier
# tokens: (T, N, H), and what it remembers now.
Attend = Callable[[Array, Array, Array, Memory], tuple[Array, Memory]]


@dataclass(frozen=True, slots=True)
class Family:
    """Where families differ."""

    embed: Callable[[Params, Array, Array], Array]  # parameters, token ids, positions: (T, D)
    norm: Callable[[Params, Array, float], Array]
    mlp: Callable[[Params, Array, str], Array]


@dataclass(frozen=True, slots=True)
class Model:
    """Hashable, so that models of the same shape share their compiled programs."""

    config: ModelConfig
    family: Family
    # Radians per position, dim / 2 of them, and what cosines and sines are multiplied by.
    frequencies: tuple[float, ...] | None = None
    rotary_scale: float = 1.0


def turn_of(model: Model, params: Params, positions: Array) -> Rotation | None:
    if model.frequencies is None:
        return None
    dtype = params["norm"]["weight"].dtype
    return rotation(positions, model.frequencies, model.rotary_scale, dtype)


def block(
    model: Model,
    attend: Attend,
    params: Params,
    x: Array,
    turn: Rotation | None,
    memory: Memory,
) -> tuple[Array, Memory]:
    """Attention, then feed-forward, each on a normalised copy of the stream. `params` are the
    layer's own.
    """
    config, family = model.config, model.family
    normed = family.norm(params["attn_norm"], x, config.norm_eps)
    attended, memory = attend(*heads(params["attn"], config, normed, turn), memory)
    x = x + linear(params["attn"]["o"], attended.reshape(len(x), -1))
    normed = family.norm(params["mlp_norm"], x, config.norm_eps)
    return x + family.mlp(params["mlp"], normed, config.activation), memory


def decode(
    model: Model,
    params: Params,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    memories: Sequence[Memory],
) -> tuple[list[Array], list[Memory]]:
    """The residual stream before the first block and after each, (T, D); each layer's memory."""
    turn = turn_of(model, params, positions)
    one_layer = jax.jit(partial(block, model, attend))  # traced once: layers are alike
    states, after = [model.family.embed(params, token_ids, positions)], []
    for own, memory in zip(params["layers"], memories, strict=True):
        x, remembered = one_layer(own, states[-1], turn, memory)
        states.append(x)
        after.append(remembered)
    return states, after


def final_norm(model: Model, params: Params, x: Array) -> Array:
    return model.family.norm(params["norm"], x, model.config.norm_eps)


def head_logits(params: Params, hidden: Array) -> Array:
    """Of normed states: (R, D) -> (R, V) float32"""
    head = params["head" if "head" in params else "embed"]
    return linear(head, hidden).astype(jnp.float32)


def forward_sequence(model: Model, params: Params, token_ids: Array) -> tuple[Array, list[Array]]:
    """Logits (T, V) of one sequence (T,), and the states of `decode`."""

    def attend(q: Array, k: Array, v: Array, memory: None) -> tuple[Array, None]:
        return causal_attention(q, k, v, model.config.sliding_window), None

    positions = jnp.arange(len(token_ids))
    nothing = [None] * model.config.num_layers
    states, _ = decode(model, params, token_ids, positions, attend, nothing)
    return head_logits(params, final_norm(model, params, states[-1])), states
