"""The decoder with taps, as functions of the model's parameters and of the tap groups."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from engine.architectures.base import ModelConfig
from engine.architectures.sites import Site
from engine.jax.layers.attention import outputs, projected, rotated
from engine.jax.layers.linear import Params, embedding, linear
from engine.jax.layers.mlp import ACTIVATIONS, gated
from engine.jax.layers.rotary import Rotation
from engine.jax.models.base import (
    Attend,
    Memory,
    Model,
    block,
    entering,
    feed_forward,
    final_norm,
    norm,
    per_head_of,
    rotations_of,
)
from engine.jax.models.gpt2 import add_positions
from engine.runners.scoring import scoring_of
from engine.runtime.interp.groups import GroupShape
from engine.runtime.interp.taps import (
    ADD,
    CAPTURE,
    CLAMP,
    EXTRA_COLUMNS,
    PROJECT_OUT,
    SCALE,
)


class GroupArrays(NamedTuple):
    """A `TapGroup` on the device."""

    tokens: Array  # (size,)
    scales: Array  # (size, 1)
    vectors: Array
    decoders: Array


class ArrayTaps:
    """The taps of a step that is being traced. `captured` gets what they capture, in order."""

    def __init__(
        self, shapes: Sequence[GroupShape], arrays: Sequence[GroupArrays], sites: tuple[Site, ...]
    ) -> None:
        self._at: dict[tuple[int, str], list[int]] = {}
        for index, shape in enumerate(shapes):
            site = sites[shape.site]
            self._at.setdefault((site.layer, site.part), []).append(index)
        self._shapes, self._arrays = shapes, arrays
        self._captured: dict[int, Array] = {}
        self._layers = {layer for layer, _ in self._at}

    def has_layer(self, layer: int) -> bool:
        return layer in self._layers

    def at(self, layer: int, part: str, x: Array) -> Array:
        """Applies the taps of a site to x (T, W)."""
        for index in self._at.get((layer, part), ()):
            x = self._apply(index, x)
        return x

    @property
    def captured(self) -> list[Array]:
        return [self._captured[index] for index in sorted(self._captured)]

    def _apply(self, index: int, x: Array) -> Array:
        kind, group, width = self._shapes[index].kind, self._arrays[index], x.shape[1]
        old = x[group.tokens]
        if kind == CAPTURE:
            self._captured[index] = old.astype(jnp.float32)
            return x
        vectors, scales = group.vectors[:, :width].astype(x.dtype), group.scales.astype(x.dtype)
        if kind == ADD:
            return x.at[group.tokens].add(scales * vectors)
        if kind == SCALE:
            new = scales * old
        elif kind == PROJECT_OUT:
            new = old - scales * (old * vectors).sum(1, keepdims=True) * vectors
        elif kind == CLAMP:
            bias, threshold = group.vectors[:, -EXTRA_COLUMNS, None], group.vectors[:, -1:]
            feature = (old * group.vectors[:, :width]).sum(1, keepdims=True) + bias
            feature = jnp.where(feature > threshold, feature, 0.0)
            new = (old + (group.scales - feature) * group.decoders[:, :width]).astype(x.dtype)
        else:
            new = scales * vectors
        return x.at[group.tokens].set(new)


def tapped_decode(
    model: Model,
    params: Params,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    memories: Sequence[Memory],
    taps: ArrayTaps,
) -> tuple[Array, Array, list[Memory]]:
    """As `decode`. Returns the residual stream (T, D) after the last layer, the same after the
    final norm, and a list of each layer's new KV state.
    """
    config, rotations = model.config, rotations_of(model, params, positions)
    x, after = _embedded(config, params, token_ids, positions, taps), []
    for index, (own, memory) in enumerate(zip(params["layers"], memories, strict=True)):
        layer = config.layer(index)
        rotation = None if layer.rope is None else rotations[layer.rope]
        if taps.has_layer(index):
            x, remembered = _block(config, index, attend, own, x, rotation, memory, taps)
        else:
            x, remembered = block(config, layer, attend, own, x, rotation, memory)
        after.append(remembered)
    return x, taps.at(-1, "normalized", final_norm(model, params, x)), after


def _embedded(
    config: ModelConfig, params: Params, token_ids: Array, positions: Array, taps: ArrayTaps
) -> Array:
    x = embedding(params["embed"], token_ids)
    if config.embedding_multiplier != 1:
        x = x * config.embedding_multiplier
    x = taps.at(-1, "embed", x)
    return add_positions(params, x, positions) if config.learned_positions else x


def _block(
    config: ModelConfig,
    index: int,
    attend: Attend,
    params: Params,
    x: Array,
    rotation: Rotation | None,
    memory: Memory,
    taps: ArrayTaps,
) -> tuple[Array, Memory]:
    layer = config.layer(index)
    x = taps.at(index, "resid_pre", x)
    read = entering(config, params, "attn", x)
    parts = projected(params["attn"], config, read)
    if config.latent is None:
        named = zip("qkv", parts, strict=True)
        parts = tuple(taps.at(index, name, part) for name, part in named)
    q, k, v = rotated(params["attn"], config, parts, rotation)
    taps.at(index, "rot_q", q.reshape(len(q), -1))
    taps.at(index, "rot_k", k.reshape(len(k), -1))
    per_head = per_head_of(config, params["attn"])
    attended, memory = attend(scoring_of(config, layer), per_head, q, k, v, memory)
    if config.latent is None:
        z = taps.at(index, "z", attended.reshape(len(x), -1))
        attended = z.reshape(attended.shape)
    half = outputs(params["attn"], attended)
    after = x + _merged(config, params, "attn", half, taps, index)
    if config.parallel is None:
        after = taps.at(index, "resid_mid", after)
    if config.parallel != "shared":
        read = entering(config, params, "mlp", after if config.parallel is None else x)
    if layer.experts:
        fed = feed_forward(config, layer, params, read)
    else:
        fed = _mlp(config, params["mlp"], read, taps, index)
    after = after + _merged(config, params, "mlp", fed, taps, index)
    return taps.at(index, "resid_post", after), memory


def _merged(
    config: ModelConfig, params: Params, part: str, half: Array, taps: ArrayTaps, index: int
) -> Array:
    """What attention or MLP adds to the residual stream."""
    if config.norm_placement == "output":
        half = norm(config, params[f"{part}_norm"], half)
    if config.norm_placement == "both":
        half = norm(config, params[f"{part}_out_norm"], half)
    half = taps.at(index, f"{part}_out", half)
    return half if config.residual_multiplier == 1 else half * config.residual_multiplier


def _mlp(config: ModelConfig, params: Params, x: Array, taps: ArrayTaps, index: int) -> Array:
    name = "gate" if config.gated_mlp else "up"
    pre = taps.at(index, "mlp_pre", linear(params[name], x))
    if config.gated_mlp:
        inner = gated(config.activation, pre, linear(params["up"], x))
    else:
        inner = ACTIVATIONS[config.activation](pre)
    return linear(params["down"], taps.at(index, "mlp_post", inner))
