"""Mixture of experts: a router chooses a few experts for each token and weights their outputs.

Letters: C chosen experts per token, E experts, G groups of experts, M tokens sorted by expert
(one per chosen expert of each token of the step).
"""

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.architectures.base import ExpertsConfig
from engine.jax.kernels.matmul import einsum, precision
from engine.jax.layers.linear import Params, linear
from engine.jax.layers.mlp import gated, gated_mlp

# `ragged_dot_general` for tokens (M, in) and matrices (E, out, in). Experts divide the tokens.
BY_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)
MIN_RUN, MAX_RUN = 8, 32  # tokens of one expert that are computed together on a CPU


def mixture(params: Params, config: ExpertsConfig, activation: str, x: Array) -> Array:
    """The output of a layer's experts, (T, D). `params` are all parameters of the layer."""
    weights, chosen = route(params["experts"], config, x)
    experts = chosen.reshape(-1)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=config.count)
    matrices = {name: params["experts"][name] for name in ("gate", "up", "down")}
    mixed = expert_backend()(matrices, activation, x[order // config.per_token], sizes)
    unsorted = mixed[jnp.argsort(order)].reshape(*chosen.shape, -1)  # (T, C, D)
    out = jnp.sum(unsorted * weights[..., None], axis=1).astype(x.dtype)
    if not config.shared_size:
        return out
    shared = gated_mlp(params["shared"], x, activation)
    if config.shared_gate:
        shared = jax.nn.sigmoid(linear(params["shared"]["router"], x)) * shared
    return out + shared


def route(params: Params, config: ExpertsConfig, x: Array) -> tuple[Array, Array]:
    """The weights (T, C) float32 and the numbers (T, C) of each token's experts, best first."""
    logits = einsum("ti,ei->te", x, params["router"]["weight"])
    if config.router_bias:
        logits = logits + params["router"]["bias"]
    scores = logits  # softmax_chosen ranks experts by their logits
    if config.scoring != "softmax_chosen":
        scores = (jax.nn.softmax if config.scoring == "softmax" else jax.nn.sigmoid)(logits)
    ranked = scores + params["correction"] if config.correction else scores
    _, chosen = lax.top_k(_in_best_groups(config, ranked), config.per_token)
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if config.scoring == "softmax_chosen":
        weights = jax.nn.softmax(weights)
    if config.renormalizes:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return weights if config.scale == 1 else weights * config.scale, chosen


def _in_best_groups(config: ExpertsConfig, ranked: Array) -> Array:
    """The scores (T, E), with -inf for all experts outside of each token's best groups."""
    if config.groups == 1:
        return ranked
    grouped = ranked.reshape(len(ranked), config.groups, -1)  # (T, G, E / G)
    considered = 1 if config.group_score == "best" else 2
    rank = lax.top_k(grouped, considered)[0].sum(axis=-1)
    _, best = lax.top_k(rank, config.groups_per_token)
    is_best = jax.nn.one_hot(best, config.groups, dtype=bool).any(axis=1)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(ranked.shape)


class ExpertBackend(Protocol):
    def __call__(self, params: Params, activation: str, x: Array, sizes: Array) -> Array:
        """x (M, D) -> (M, D). The first sizes[0] tokens belong to expert 0, the next sizes[1]
        tokens to expert 1, and so on. A token's result does not depend on other tokens.
        """
        ...


def ragged_experts(params: Params, activation: str, x: Array, sizes: Array) -> Array:
    """Ragged dots: each is one call for all experts. GPUs and TPUs have kernels for them."""
    of_token = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(x))

    def dot(name: str, x: Array) -> Array:
        weight = params[name]["weight"]
        y = lax.ragged_dot_general(x, weight, sizes, BY_EXPERT, precision=precision(x.dtype))
        return y + params[name]["bias"][of_token] if "bias" in params[name] else y

    return dot("down", gated(activation, dot("gate", x), dot("up", x)))


def looped_experts(params: Params, activation: str, x: Array, sizes: Array) -> Array:
    """A loop over runs of at most `size` tokens of one expert. On a CPU, XLA computes a ragged dot
    as if every token had chosen every expert; this loop reads only the chosen experts.
    """
    size = min(MAX_RUN, max(MIN_RUN, len(x) // len(sizes)))
    ends = jnp.cumsum(sizes)
    run_counts = (sizes + size - 1) // size
    run_ends = jnp.cumsum(run_counts)
    padded = jnp.pad(x, ((0, size), (0, 0)))

    def one_run(run: Array, out: Array) -> Array:
        expert = jnp.searchsorted(run_ends, run, side="right")
        own = jax.tree.map(lambda each: each[expert], params)
        earlier = run - (run_ends - run_counts)[expert]  # runs of the same expert
        start = (ends - sizes)[expert] + earlier * size

        def dot(name: str, x: Array) -> Array:
            y = jnp.dot(x, own[name]["weight"].T, precision=precision(x.dtype))
            return y + own[name]["bias"] if "bias" in own[name] else y

        read = lax.dynamic_slice_in_dim(padded, start, size)
        y = dot("down", gated(activation, dot("gate", read), dot("up", read)))
        # A run may reach into the tokens of the next run, which then writes its own results there.
        return lax.dynamic_update_slice_in_dim(out, y, start, 0)

    return lax.fori_loop(0, run_ends[-1], one_run, jnp.zeros_like(padded))[: len(x)]


def expert_backend() -> ExpertBackend:
    return looped_experts if jax.default_backend() == "cpu" else ragged_experts
