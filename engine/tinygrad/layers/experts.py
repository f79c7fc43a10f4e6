"""Mixture of experts: a router chooses a few experts for each token and weights their outputs.

Letters: C chosen experts per token, E experts, G groups of experts.
"""

from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.architectures.base import ExpertsConfig
from engine.tinygrad.kernels.launch import (
    index,
    launch,
    loop,
    reduction,
)
from engine.tinygrad.kernels.rows import take_rows
from engine.tinygrad.layers.linear import Params, linear
from engine.tinygrad.layers.mlp import gated, gated_mlp


def mixture(params: Params, config: ExpertsConfig, activation: str, x: Tensor) -> Tensor:
    """The output of a layer's experts, (T, D). `params` are all parameters of the layer."""
    x = x.contiguous()
    experts = params["experts"]
    weights, chosen = route(experts, config, x)
    gate, up = (_chosen_linear(experts[name], x.unsqueeze(1), chosen) for name in ("gate", "up"))
    mixed = _chosen_linear(experts["down"], gated(activation, gate, up).contiguous(), chosen)
    out = (mixed * weights.unsqueeze(-1)).sum(axis=1).cast(x.dtype)
    if not config.shared_size:
        return out
    shared = gated_mlp(params["shared"], x, activation)
    if config.shared_gate:
        shared = linear(params["shared"]["router"], x).sigmoid() * shared
    return out + shared


def route(params: Params, config: ExpertsConfig, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (T, C) float32 and the numbers (T, C) of each token's experts, best first."""
    logits = linear(params["router"], x).float().contiguous()
    scores = logits  # softmax_chosen ranks experts by their logits
    if config.scoring != "softmax_chosen":
        scores = logits.softmax(axis=-1) if config.scoring == "softmax" else logits.sigmoid()
        scores = scores.contiguous()
    ranked = scores + params["correction"].float() if config.correction else scores
    ranks = _ranks(_in_best_groups(config, ranked.contiguous()))
    places = Tensor.arange(config.per_token).reshape(1, -1, 1)
    is_place = ranks.unsqueeze(1) == places  # (T, C, E)
    chosen = is_place.where(Tensor.arange(config.count), 0).sum(axis=-1)
    weights = is_place.where(scores.unsqueeze(1), 0.0).sum(axis=-1)
    if config.scoring == "softmax_chosen":
        weights = weights.softmax(axis=-1)
    if config.renormalizes:
        weights = weights / weights.sum(axis=-1, keepdim=True)
    return (weights * config.scale).contiguous(), chosen.cast(dtypes.int32).contiguous()


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value along the last axis; 0 is the highest. Of equal values, the first has
    the higher rank.
    """
    count = values.shape[-1]
    own, other = values.unsqueeze(-1), values.unsqueeze(-2)
    numbers = Tensor.arange(count)
    is_before = numbers.unsqueeze(0) < numbers.unsqueeze(1)
    return ((other > own) | ((other == own) & is_before)).sum(axis=-1).contiguous()


def _in_best_groups(config: ExpertsConfig, ranked: Tensor) -> Tensor:
    """The scores (T, E), with -inf for all experts outside of each token's best groups."""
    if config.groups == 1:
        return ranked
    grouped = ranked.reshape(ranked.shape[0], config.groups, -1)  # (T, G, E / G)
    considered = 1 if config.group_score == "best" else 2
    rank = (_ranks(grouped) < considered).where(grouped, 0.0).sum(axis=-1).contiguous()
    is_best = (_ranks(rank) < config.groups_per_token).unsqueeze(-1)
    return is_best.where(grouped, -float("inf")).reshape(ranked.shape).contiguous()


def _chosen_linear(params: Params, x: Tensor, chosen: Tensor) -> Tensor:
    """Matmuls with the matrices of chosen experts: x (T, C or 1, I) -> (T, C, O) float32. If the
    middle axis of x has size 1, all chosen experts of a token read the same values.
    """
    weight = params["weight"]  # (E, O, I)
    shape = (*chosen.shape, weight.shape[1])
    out = Tensor.empty(*shape, dtype=dtypes.float32, device=x.device)
    y, *_ = launch("experts", _products, out, x, weight, chosen)
    if "bias" not in params:
        return y
    return y + take_rows(params["bias"], chosen.reshape(-1)).reshape(shape)


def _products(out: UOp, x: UOp, weight: UOp, chosen: UOp) -> tuple[UOp, tuple[UOp, ...]]:
    t, c, o = (loop(size, number) for number, size in enumerate(out.shape))
    i = reduction(weight.shape[2], 3)
    own = x[t, c if x.shape[1] > 1 else 0, i].load()
    product = own.cast(dtypes.float32) * weight[index(chosen[t, c]), o, i].load()
    return out[t, c, o].store(product.cast(dtypes.float32).reduce(i, arg=Ops.ADD)), (t, c, o)
