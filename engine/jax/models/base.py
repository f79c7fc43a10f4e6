"""The decoder of all model families, as functions of the model's parameters.

A `Model` has the data that is known at compile time; the parameters are a pytree. Serving calls
`decode` with a function `attend` that reads and writes the paged cache. Parity tests and training
call `forward_sequence`, which is differentiable with respect to the parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from engine.architectures.base import LayerConfig, ModelConfig, RopeConfig
from engine.jax.kernels.work import PerHead
from engine.jax.layers.attention import causal_attention, heads, outputs
from engine.jax.layers.experts import mixture
from engine.jax.layers.linear import Params, embedding, linear
from engine.jax.layers.mlp import gated_mlp, mlp
from engine.jax.layers.norm import layer_norm, rms_norm
from engine.jax.layers.rotary import Rotation, rotation
from engine.jax.models.gpt2 import add_positions
from engine.runners.scoring import Scoring, alibi_slopes, scoring_of

Memory = Any  # the KV state of a layer, for example its cache: a pytree that only `attend` reads
# A function that attends in one layer. It gets the layer's scoring rules, per-head values, queries
# (T, N, H), keys (T, K, H), values (T, K, U) and KV state. It returns the attention output
# (T, N, U) and the new KV state.
Attend = Callable[[Scoring, PerHead, Array, Array, Array, Memory], tuple[Array, Memory]]


class Frequencies(NamedTuple):
    """One RoPE setting of a model."""

    values: tuple[float, ...]  # radians per position, one per pair of rotated values
    scale: float  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class Model:
    """The compile-time part of a model. It is hashable, so that models with the same config share
    compiled programs.
    """

    config: ModelConfig
    frequencies: tuple[Frequencies, ...] = ()  # one per setting in `config.ropes`


def rotations_of(model: Model, params: Params, positions: Array) -> dict[RopeConfig, Rotation]:
    """The rotation of each RoPE setting. Layers with the same setting share it."""
    dtype = params["norm"]["weight"].dtype
    return {
        rope: rotation(positions, *frequencies, dtype)
        for rope, frequencies in zip(model.config.ropes, model.frequencies, strict=True)
    }


def block(
    config: ModelConfig,
    layer: LayerConfig,
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
    read = entering(config, params, "attn", x)
    qkv = heads(params["attn"], config, read, rotation)
    per_head = per_head_of(config, params["attn"])
    attended, memory = attend(scoring_of(config, layer), per_head, *qkv, memory)
    half = outputs(params["attn"], attended)
    after = merged(config, params, "attn", x, half)
    if config.parallel != "shared":
        read = entering(config, params, "mlp", after if config.parallel is None else x)
    return merged(config, params, "mlp", after, feed_forward(config, layer, params, read)), memory


def per_head_of(config: ModelConfig, params: Params) -> PerHead:
    slopes, sinks = alibi_slopes(config), params.get("sinks")
    return PerHead(
        None if slopes is None else jnp.array(slopes),
        None if sinks is None else sinks.astype(jnp.float32),
    )


def feed_forward(config: ModelConfig, layer: LayerConfig, params: Params, x: Array) -> Array:
    if layer.experts:
        assert config.experts is not None, config
        return mixture(params, config.experts, config.activation, x)
    return (gated_mlp if config.gated_mlp else mlp)(params["mlp"], x, config.activation)


def entering(config: ModelConfig, params: Params, part: str, x: Array) -> Array:
    """What attention ("attn") or MLP ("mlp") reads: x, normalized if the model has input norms."""
    has_norm = config.norm_placement in ("input", "both")
    return norm(config, params[f"{part}_norm"], x) if has_norm else x


def merged(config: ModelConfig, params: Params, part: str, x: Array, half: Array) -> Array:
    """Adds `half`, the output of attention ("attn") or MLP ("mlp"), to the residual stream `x`. If
    the model has output norms, `half` is normalized first.
    """
    if config.norm_placement == "output":
        half = norm(config, params[f"{part}_norm"], half)
    if config.norm_placement == "both":
        half = norm(config, params[f"{part}_out_norm"], half)
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
    return add_positions(params, x, positions) if config.learned_positions else x


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
    config = model.config
    rotations = rotations_of(model, params, positions)

    @cache  # layers of one kind share a jitted function, so that each kind is traced once
    def of_kind(layer: LayerConfig) -> Callable[..., tuple[Array, Memory]]:
        return jax.jit(partial(block, config, layer, attend))

    states, after = [embed(config, params, token_ids, positions)], []
    for index, (own, memory) in enumerate(zip(params["layers"], memories, strict=True)):
        layer = config.layer(index)
        rotation = None if layer.rope is None else rotations[layer.rope]
        x, remembered = of_kind(layer)(own, states[-1], rotation, memory)
        states.append(x)
        after.append(remembered)
    return states, after


def final_norm(model: Model, params: Params, x: Array) -> Array:
    return norm(model.config, params["norm"], x)


def head_logits(model: Model, params: Params, hidden: Array) -> Array:
    """Hidden states after the final norm (R, D) -> logits (R, V) float32"""
    head = params["head" if "head" in params else "embed"]
    logits = linear(head, hidden).astype(jnp.float32)
    scaling, cap = model.config.logits_scaling, model.config.logits_softcap
    if scaling != 1:
        logits = logits / scaling
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def forward_sequence(model: Model, params: Params, token_ids: Array) -> tuple[Array, list[Array]]:
    """The logits (T, V) of one sequence of token ids (T,), and the residual streams that `decode`
    returns.
    """

    def attend(
        scoring: Scoring, per_head: PerHead, q: Array, k: Array, v: Array, memory: None
    ) -> tuple[Array, None]:
        return causal_attention(q, k, v, scoring, per_head), None

    positions = jnp.arange(len(token_ids))
    nothing = [None] * model.config.num_layers
    states, _ = decode(model, params, token_ids, positions, attend, nothing)
    return head_logits(model, params, final_norm(model, params, states[-1])), states
