"""The decoder of all model families, as functions of the model's parameters.

A `Model` has the data that is known at compile time; the parameters are a pytree. Serving calls
`decode` with a function `attend` that reads and writes the paged cache. Parity tests and training
call `forward_sequence`, which is differentiable with respect to the parameters.
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

Memory = Any  # the KV state of a layer, for example its cache: a pytree that only `attend` reads
# A function that attends in one layer. It gets the layer's queries (T, N, H), keys and values
# (T, K, H) and KV state. It returns the attention output (T, N, H) and the new KV state.
Attend = Callable[[Array, Array, Array, Memory], tuple[Array, Memory]]


@dataclass(frozen=True, slots=True)
class Model:
    """The compile-time part of a model. It is hashable, so that models with the same config share
    compiled programs.
    """

    config: ModelConfig
    # The RoPE frequencies in radians per position, one per pair of rotated values. None: no RoPE.
    frequencies: tuple[float, ...] | None = None
    rotary_scale: float = 1.0  # factor of the cosines and sines of RoPE


def rotation_of(model: Model, params: Params, positions: Array) -> Rotation | None:
    if model.frequencies is None:
        return None
    dtype = params["norm"]["weight"].dtype
    return rotation(positions, model.frequencies, model.rotary_scale, dtype)


def block(
    model: Model,
    attend: Attend,
    params: Params,
    x: Array,
    rotation: Rotation | None,
    memory: Memory,
) -> tuple[Array, Memory]:
    """One layer: attention, then MLP. Both add to the residual stream x (T, D).

    `params` are the layer's parameters, `memory` is its KV state. Returns the new residual stream
    and the new KV state.
    """
    config = model.config
    read = norm(config, params["attn_norm"], x) if config.norm_placement == "input" else x
    attended, memory = attend(*heads(params["attn"], config, read, rotation), memory)
    half = linear(params["attn"]["o"], attended.reshape(len(x), -1))
    x = merged(config, params["attn_norm"], x, half)
    read = norm(config, params["mlp_norm"], x) if config.norm_placement == "input" else x
    half = (gated_mlp if config.gated_mlp else mlp)(params["mlp"], read, config.activation)
    return merged(config, params["mlp_norm"], x, half), memory


def merged(config: ModelConfig, params: Params, x: Array, half: Array) -> Array:
    """Adds `half`, the output of attention or MLP, to the residual stream `x`. If the model has
    output norms, `half` is normalized first. `params` are the parameters of this norm.
    """
    if config.norm_placement == "output":
        half = norm(config, params, half)
    if config.residual_multiplier != 1:
        half = half * config.residual_multiplier
    return x + half


def norm(config: ModelConfig, params: Params, x: Array) -> Array:
    return (rms_norm if config.norm == "rms" else layer_norm)(params, x, config.norm_eps)


def embed(config: ModelConfig, params: Params, token_ids: Array, positions: Array) -> Array:
    """The input of the first layer: token ids (T,) and positions (T,) -> embeddings (T, D)"""
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
    """Runs all layers. Returns a list of the residual stream (T, D) before the first layer and
    after each layer, and a list of each layer's new KV state.
    """
    rotation = rotation_of(model, params, positions)
    one_layer = jax.jit(partial(block, model, attend))  # traced once, not once per layer
    states, after = [embed(model.config, params, token_ids, positions)], []
    for own, memory in zip(params["layers"], memories, strict=True):
        x, remembered = one_layer(own, states[-1], rotation, memory)
        states.append(x)
        after.append(remembered)
    return states, after


def final_norm(model: Model, params: Params, x: Array) -> Array:
    return norm(model.config, params["norm"], x)


def head_logits(model: Model, params: Params, hidden: Array) -> Array:
    """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
    head = params["head" if "head" in params else "embed"]
    logits, scaling = linear(head, hidden).astype(jnp.float32), model.config.logits_scaling
    return logits if scaling == 1 else logits / scaling


def forward_sequence(model: Model, params: Params, token_ids: Array) -> tuple[Array, list[Array]]:
    """The logits (T, V) of one sequence of token ids (T,), and the residual streams that `decode`
    returns.
    """

    config = model.config

    def attend(q: Array, k: Array, v: Array, memory: None) -> tuple[Array, None]:
        return causal_attention(q, k, v, config.sliding_window, config.attention_scale), None

    positions = jnp.arange(len(token_ids))
    nothing = [None] * config.num_layers
    states, _ = decode(model, params, token_ids, positions, attend, nothing)
    return head_logits(model, params, final_norm(model, params, states[-1])), states
