"""Mixture of experts: a router chooses a few experts for each token and weights their outputs.

Letters: C chosen experts per token, E experts, G groups of experts.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from engine.architectures.base import ExpertsConfig
from engine.jax.kernels.experts import expert_backend
from engine.jax.layers.linear import Params, einsum, linear
from engine.jax.layers.mlp import gated_mlp


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
