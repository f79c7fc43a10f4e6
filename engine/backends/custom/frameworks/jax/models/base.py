"""The decoder of every family, as functions of its parameters.

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
from engine.backends.custom.frameworks.jax.layers.linear import Params, embedding, linear
from engine.backends.custom.frameworks.jax.layers.mlp import gated_mlp, mlp
from engine.backends.custom.frameworks.jax.layers.norm import layer_norm, rms_norm
from engine.backends.custom.frameworks.jax.layers.rotary import Rotation, rotation
from engine.backends.custom.frameworks.jax.models.gpt2 import add_positions

Memory = Any  # a pytree of the step's own kind
# From a layer's queries (T, N, H), keys and values (T, K, H), and what it remembers of earlier
# tokens: (T, N, H), and what it remembers now.
Attend = Callable[[Array, Array, Array, Memory], tuple[Array, Memory]]


@dataclass(frozen=True, slots=True)
class Model:
    """Hashable, so that models of the same shape share their compiled programs."""

    config: ModelConfig
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
    """Attention, then MLP, each of which adds to the stream. `params` are the layer's own."""
    config = model.config
    read = norm(config, params["attn_norm"], x) if config.norm_placement == "input" else x
    attended, memory = attend(*heads(params["attn"], config, read, turn), memory)
    half = linear(params["attn"]["o"], attended.reshape(len(x), -1))
    x = merged(config, params["attn_norm"], x, half)
    read = norm(config, params["mlp_norm"], x) if config.norm_placement == "input" else x
    half = (gated_mlp if config.gated_mlp else mlp)(params["mlp"], read, config.activation)
    return merged(config, params["mlp_norm"], x, half), memory


def merged(config: ModelConfig, params: Params, x: Array, half: Array) -> Array:
    """The stream with what attention or the MLP gave; `params` are of that half's norm."""
    if config.norm_placement == "output":
        half = norm(config, params, half)
    if config.residual_multiplier != 1:
        half = half * config.residual_multiplier
    return x + half


def norm(config: ModelConfig, params: Params, x: Array) -> Array:
    return (rms_norm if config.norm == "rms" else layer_norm)(params, x, config.norm_eps)


def embed(config: ModelConfig, params: Params, token_ids: Array, positions: Array) -> Array:
    """(T,) twice -> (T, D)"""
    x = embedding(params["embed"], token_ids)
    if config.embedding_multiplier != 1:
        x = x * config.embedding_multiplier
    return x if config.rope is not None else add_positions(params, x, positions)


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
    states, after = [embed(model.config, params, token_ids, positions)], []
    for own, memory in zip(params["layers"], memories, strict=True):
        x, remembered = one_layer(own, states[-1], turn, memory)
        states.append(x)
        after.append(remembered)
    return states, after


def final_norm(model: Model, params: Params, x: Array) -> Array:
    return norm(model.config, params["norm"], x)


def head_logits(model: Model, params: Params, hidden: Array) -> Array:
    """Of normed states: (R, D) -> (R, V) float32"""
    head = params["head" if "head" in params else "embed"]
    logits, scaling = linear(head, hidden).astype(jnp.float32), model.config.logits_scaling
    return logits if scaling == 1 else logits / scaling


def forward_sequence(model: Model, params: Params, token_ids: Array) -> tuple[Array, list[Array]]:
    """Logits (T, V) of one sequence (T,), and the states of `decode`."""

    config = model.config

    def attend(q: Array, k: Array, v: Array, memory: None) -> tuple[Array, None]:
        return causal_attention(q, k, v, config.sliding_window, config.attention_scale), None

    positions = jnp.arange(len(token_ids))
    nothing = [None] * config.num_layers
    states, _ = decode(model, params, token_ids, positions, attend, nothing)
    return head_logits(model, params, final_norm(model, params, states[-1])), states
