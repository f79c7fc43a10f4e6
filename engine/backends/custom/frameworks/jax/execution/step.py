"""The forward pass as one pure function: from parameters, cache and a step's arrays to the new
cache and the states that logits are computed from.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from engine.backends.custom.frameworks.jax.execution.buckets import Bucket, step_layout
from engine.backends.custom.frameworks.jax.execution.sharding import AXIS, CACHE_SPEC
from engine.backends.custom.frameworks.jax.kernels.attention import AttentionBackend
from engine.backends.custom.frameworks.jax.kernels.work import AttentionShape, Work
from engine.backends.custom.frameworks.jax.models.base import Model, decode


class StepProgram(NamedTuple):
    """What is known at trace time, besides a step's bucket."""

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
) -> tuple[list[Array], Array, Array]:
    """`leaves` are the parameters' leaves; `last_token` (max_slots,) has each slot's last sample.
    The layers' caches (slots, 2, K, H), key before value, are donated: they are written in place.
    Returns them, the residual stream (T, D) of the tokens in `logit_rows`, and for each token
    whether its residual stream is finite after the last layer.
    """
    model, tree, attention, block_size, mesh = program
    params = jax.tree.unflatten(tree, leaves)
    step = step_layout(bucket).views(packed, {"tables": bucket.table_width})
    token_ids, positions = step["token_ids"], step["positions"]
    token_ids = jnp.where(token_ids >= 0, token_ids, last_token[step["slots"]])
    window, scale = model.config.sliding_window, model.config.attention_scale
    shape = AttentionShape(bucket.tile, block_size, window, scale)
    items = (step[name] for name in ("token", "length", "row"))
    work = Work(positions, step["tables"], *items, *step["num_items"])
    write = partial(write_and_attend, attention, shape)
    if mesh is not None:
        heads, pages = P(None, AXIS), CACHE_SPEC
        given, made = (heads, heads, heads, pages, P(), P()), (heads, pages)
        write = jax.shard_map(write, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)

    def attend(q: Array, k: Array, v: Array, cache: Array) -> tuple[Array, Array]:
        return write(q, k, v, cache, step["write_slots"], work)

    states, caches = decode(model, params, token_ids, positions, attend, caches)
    finite = jnp.isfinite(states[-1].sum(axis=-1, dtype=jnp.float32))
    return caches, states[-1][step["logit_rows"]], finite


def write_and_attend(
    attention: AttentionBackend,
    shape: AttentionShape,
    q: Array,
    k: Array,
    v: Array,
    cache: Array,
    write_slots: Array,
    work: Work,
) -> tuple[Array, Array]:
    """Writes and attends in one layer, over the heads that a device holds."""
    cache = cache.at[write_slots].set(jnp.stack((k, v), axis=1), mode="promise_in_bounds")
    return attention(q, cache, work, shape), cache
