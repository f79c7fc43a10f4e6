"""A forward pass with taps. Steps whose taps have the same shapes share a compiled program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from engine.architectures.sites import sites_of
from engine.jax.execution.buckets import Bucket
from engine.jax.execution.programs import StepProgram, prepared
from engine.jax.execution.runner import StepHandle
from engine.jax.kernels.work import PerHead
from engine.jax.layers.adapted import RowAdapters
from engine.jax.layers.attention import causal_attention
from engine.jax.layers.linear import Params, embedding
from engine.jax.models.base import Model, head_logits
from engine.jax.models.tapped import (
    ArrayTaps,
    GroupArrays,
    tapped_decode,
)
from engine.runners.scoring import Scoring
from engine.runtime.interp.groups import GroupShape, TapGroup, grouped
from engine.runtime.interp.taps import ADD, CAPTURE, EXTRA_COLUMNS, TapInputs
from engine.runtime.model_runner import F32, I32, BatchInputs


class Captured:
    """What the taps of a step captured, on its way to the host."""

    def __init__(self, taps: TapInputs, groups: tuple[TapGroup, ...], values: list[Array]) -> None:
        self._taps, self._groups, self._values = taps, groups, values
        for each in values:
            each.copy_to_host_async()

    def rows(self) -> F32:
        out = np.zeros((self._taps.num_captured, self._taps.width), np.float32)
        owners = (group for group in self._groups if group.shape.kind == CAPTURE)
        for group, values in zip(owners, self._values, strict=True):
            out[group.rows, : values.shape[1]] = np.asarray(values)[: len(group.rows)]
        return out


def forward_with_taps(
    program: StepProgram,
    bucket: Bucket,
    leaves: list[Array],
    caches: list[Array],
    last_token: Array,
    packed: I32,
    inputs: BatchInputs,
    adapters: RowAdapters | None = None,
) -> tuple[list[Array], StepHandle]:
    assert inputs.taps is not None
    groups = grouped(inputs.taps)
    arrays = [
        GroupArrays(
            *map(jnp.asarray, (each.tokens, each.scales[:, None], each.vectors, each.decoders))
        )
        for each in groups
    ]
    shapes = tuple(each.shape for each in groups)
    caches, states, normed, finite, captured = _forward(
        program, bucket, shapes, leaves, caches, last_token, jnp.asarray(packed), arrays, adapters
    )
    kept = Captured(inputs.taps, groups, captured)
    return caches, StepHandle(states, finite, inputs.query_start, captured=kept, normed=normed)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _forward(
    program: StepProgram,
    bucket: Bucket,
    shapes: tuple[GroupShape, ...],
    leaves: list[Array],
    caches: list[Array],
    last_token: Array,
    packed: Array,
    arrays: list[GroupArrays],
    adapters: RowAdapters | None,
) -> tuple[list[Array], Array, Array, Array, list[Array]]:
    given = prepared(program, bucket, leaves, last_token, packed, adapters)
    step, params, token_ids, attend = given
    taps = ArrayTaps(shapes, arrays, sites_of(program.model.config))
    x, normed, caches = tapped_decode(
        program.model, params, token_ids, step["positions"], attend, caches, taps
    )
    finite = jnp.isfinite(x.sum(axis=-1, dtype=jnp.float32))
    rows = step["logit_rows"]
    return caches, x[rows], normed[rows], finite, taps.captured


@partial(jax.jit, static_argnums=0)
def input_x_gradient(
    model: Model, params: Params, token_ids: Array, position: Array, target: Array
) -> tuple[Array, Array]:
    """For each token, its embedding times the gradient of the target's logit at `position`, (T,).
    A target of -1 is the likeliest token. Also returns the target.
    """
    sites, size = sites_of(model.config), len(token_ids)

    def attend(
        scoring: Scoring, per_head: PerHead, q: Array, k: Array, v: Array, memory: None
    ) -> tuple[Array, None]:
        return causal_attention(q, k, v, scoring, per_head), None

    def logits_of(delta: Array) -> Array:
        ones = jnp.ones((size, 1), delta.dtype)
        group = GroupArrays(jnp.arange(size), ones, delta, delta[:0])
        taps = ArrayTaps((GroupShape(0, ADD, size),), (group,), sites)
        nothing = [None] * model.config.num_layers
        positions = jnp.arange(size)
        _, normed, _ = tapped_decode(model, params, token_ids, positions, attend, nothing, taps)
        return head_logits(model, params, normed[position][None])[0]

    dtype = params["norm"]["weight"].dtype
    delta = jnp.zeros((size, model.config.hidden_size + EXTRA_COLUMNS), dtype)
    chosen = jnp.where(target < 0, jnp.argmax(logits_of(delta)), target)
    gradient = jax.grad(lambda given: logits_of(given)[chosen])(delta)
    embeds = embedding(params["embed"], token_ids) * model.config.embedding_multiplier
    return (gradient[:, : embeds.shape[1]] * embeds).sum(1).astype(jnp.float32), chosen
