"""The compiled functions of the JAX model runner."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from engine.jax.execution.buckets import Bucket, step_layout
from engine.jax.execution.sharding import AXIS, CACHE_SPEC
from engine.jax.kernels.attention import (
    AttentionBackend,
    write_and_attend,
)
from engine.jax.kernels.work import AttentionShape, PerHead, Work
from engine.jax.layers.adapted import RowAdapters, with_adapters
from engine.jax.layers.linear import Params
from engine.jax.models.base import (
    Attend,
    Model,
    decode,
    final_norm,
    head_logits,
)
from engine.runners.scoring import Scoring


class StepProgram(NamedTuple):
    """The compile-time arguments of `forward`, besides the bucket of a step."""

    model: Model
    tree: jax.tree_util.PyTreeDef  # structure of the parameters
    attention: AttentionBackend
    block_size: int
    mesh: Mesh | None


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def forward(
    program: StepProgram,
    bucket: Bucket,
    leaves: list[Array],
    caches: list[Array],
    last_token: Array,
    packed: Array,
    adapters: RowAdapters | None = None,
) -> tuple[list[Array], Array, Array]:
    """The forward pass of a step. `leaves` are the model's parameters as a flat list. `last_token`
    (max_slots,) has the last sampled token of each slot. `caches` are the KV caches of the layers.
    Each has the shape (slots, 2, K, H), with key before value, or (slots, 1, 1, H) in latent
    attention. They are donated and written in place.

    Returns the caches, the residual stream (T, D) of the tokens in `logit_rows`, and for each token
    whether its residual stream is finite after the last layer.
    """
    given = prepared(program, bucket, leaves, last_token, packed, adapters)
    step, params, token_ids, attend = given
    states, caches = decode(program.model, params, token_ids, step["positions"], attend, caches)
    finite = jnp.isfinite(states[-1].sum(axis=-1, dtype=jnp.float32))
    return caches, states[-1][step["logit_rows"]], finite


def prepared(
    program: StepProgram,
    bucket: Bucket,
    leaves: list[Array],
    last_token: Array,
    packed: Array,
    adapters: RowAdapters | None = None,
) -> tuple[dict[str, Array], Params, Array, Attend]:
    """What a forward pass needs: the arrays of the step, the parameters, the token ids, and the
    function that attends in a layer.
    """
    _, tree, attention, block_size, mesh = program
    params = with_adapters(jax.tree.unflatten(tree, leaves), adapters)
    tables = ("tables", "window_tables") if bucket.has_windows else ("tables",)
    step = step_layout(bucket).views(packed, dict.fromkeys(tables, bucket.table_width))
    token_ids, positions = step["token_ids"], step["positions"]
    token_ids = jnp.where(token_ids >= 0, token_ids, last_token[step["slots"]])
    items = (step[name] for name in ("token", "length", "row"))
    work = Work(positions, step["tables"], *items, *step["num_items"])

    def attend(
        scoring: Scoring, per_head: PerHead, q: Array, k: Array, v: Array, cache: Array
    ) -> tuple[Array, Array]:
        shape = AttentionShape(bucket.tile, block_size, scoring, v.shape[-1])
        write = partial(write_and_attend, attention, shape)
        if mesh is not None:
            heads, pages = P(None, AXIS), CACHE_SPEC
            given, made = (P(AXIS), heads, heads, heads, pages, P(), P()), (heads, pages)
            write = jax.shard_map(write, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
        if bucket.has_windows and scoring.window is not None:
            own = work._replace(tables=step["window_tables"])
            return write(per_head, q, k, v, cache, step["window_slots"], own)
        return write(per_head, q, k, v, cache, step["write_slots"], work)

    return step, params, token_ids, attend


@partial(jax.jit, static_argnums=0)
def row_logits(
    model: Model, params: Params, states: Array, adapters: RowAdapters | None = None
) -> Array:
    """The logits (R, V) float32 of rows of the residual stream (R, D)."""
    hidden = final_norm(model, params, states)
    return head_logits(model, with_adapters(params, adapters), hidden).astype(jnp.float32)


@partial(jax.jit, donate_argnums=0)
def set_row(counts: Array, slot: Array, row: Array) -> Array:
    return counts.at[slot].set(row)
