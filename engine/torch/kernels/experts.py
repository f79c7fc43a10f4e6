"""A mixture of experts: `route` chooses the experts of each token, `experts_mlp` computes them.

A pair is a token and one of its experts. On a GPU, the pairs are sorted by expert, and a grouped
GEMM computes them in blocks of pairs with the same expert. The host never learns how many pairs an
expert has: it launches enough programs for the worst case, and superfluous programs end at once.
"""

from collections.abc import Iterator
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.architectures.base import ExpertsConfig
from engine.torch.kernels.activation import gated_halves
from engine.torch.kernels.base import SUMMED, Example, Inputs, Shape, op, size_of
from engine.torch.kernels.quantized import (
    LAYOUTS,
    GroupedWeight,
    dequantize,
    random_weight,
)

Matrix = TypeVar("Matrix", Tensor, GroupedWeight)
_TINIEST_SUM = 1e-20  # is added to a sum of shares before the division


def route(
    logits: Tensor, correction: Tensor | None, experts: ExpertsConfig
) -> tuple[Tensor, Tensor]:
    """The router's logits (T, E) -> the shares of each token's chosen experts (T, k) float32, and
    their ids (T, k) int32.
    """
    if experts.groups > 1 or correction is not None:  # the kernel has neither
        return _route.reference(logits, correction, experts)
    return _route(logits, None, experts)


@op("experts:route")
def _route(
    logits: Tensor, correction: Tensor | None, experts: ExpertsConfig
) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if experts.scoring == "softmax":
        scores = logits.softmax(dim=-1)
    elif experts.scoring == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = logits
    ranked = scores if correction is None else scores + correction
    if experts.groups > 1:
        ranked = _in_best_groups(ranked, experts)
    ids = ranked.topk(experts.per_token, dim=-1).indices
    shares = scores.gather(1, ids)
    if experts.scoring == "softmax_chosen":
        shares = shares.softmax(dim=-1)
    if experts.renormalizes:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + _TINIEST_SUM)
    if experts.scale != 1:
        shares = shares * experts.scale
    return shares, ids.int()


def _in_best_groups(ranked: Tensor, experts: ExpertsConfig) -> Tensor:
    """The scores (T, E), with -inf for experts of all but a token's best groups."""
    groups = ranked.unflatten(1, (experts.groups, -1))  # (T, G, E / G)
    if experts.group_score == "best":
        score = groups.amax(dim=-1)
    else:
        score = groups.topk(2, dim=-1).values.sum(dim=-1)
    best = score.topk(experts.groups_per_token, dim=-1).indices
    is_best = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~is_best[..., None], float("-inf")).flatten(1)


class ExpertMatrices(NamedTuple, Generic[Matrix]):
    """The matrices of all experts: `gate_up` is (E, 2 X, D) with the rows of gate before those of
    up, `down` is (E, D, X). Of quantized matrices, the rows of all experts form one matrix:
    (E * 2 X, D) and (E * D, X).
    """

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None  # (E, 2 X)
    down_bias: Tensor | None  # (E, D)
    kind: str  # the gated activation


@op("experts:experts_mlp")
def experts_mlp(x: Tensor, shares: Tensor, ids: Tensor, experts: ExpertMatrices[Tensor]) -> Tensor:
    """The sum of each token's experts, multiplied by their shares: x (T, D) -> (T, D). `shares`
    and `ids` are (T, k).
    """
    gate_up, down, gate_up_bias, down_bias, kind = experts
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(down)):
        tokens, places = torch.where(ids == expert)
        if not len(tokens):
            continue
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = gated_halves(F.linear(x[tokens], gate_up[expert], bias), kind)
        bias = None if down_bias is None else down_bias[expert]
        y = F.linear(hidden, down[expert], bias).float()
        total = total.index_add(0, tokens, y * shares[tokens, places, None])
    return total.to(x.dtype)


@op("grouped_experts:grouped_experts_mlp")
def grouped_experts_mlp(
    x: Tensor, shares: Tensor, ids: Tensor, experts: ExpertMatrices[GroupedWeight], count: int
) -> Tensor:
    """As `experts_mlp`, with the quantized matrices of `count` experts."""
    gate_up, down = (dequantize(each, x.dtype).unflatten(0, (count, -1)) for each in experts[:2])
    dense = ExpertMatrices(gate_up, down, *experts[2:])
    return experts_mlp.reference(x, shares, ids, dense)


def _settings(shape: Shape) -> ExpertsConfig:
    return ExpertsConfig(shape.num_experts, shape.experts_per_token, shape.expert_size)


def _route_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    count, chosen, size = shape.num_experts, shape.experts_per_token, shape.expert_size
    rules = [
        ExpertsConfig(count, chosen, size),
        ExpertsConfig(count, chosen, size, "softmax", renormalizes=True, scale=2.5),
        ExpertsConfig(count, chosen, size, "softmax_chosen"),
        ExpertsConfig(count, chosen, size, "sigmoid", renormalizes=True),
    ]
    for rows in shape.rows:
        for rule in rules:
            # No two logits are equal, because the order of equal ones is not defined.
            logits = torch.stack([inputs.permutation(count) for _ in range(rows)])
            logits = ((logits - count / 2) * (8 / count)).to(dtype)
            yield Example(f"{rule.scoring} {rows}x{count}", (logits, None, rule))


def _mlp_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    count, size, inner = shape.num_experts, shape.hidden_size, shape.expert_size
    gate_up = inputs.normal(count, 2 * inner, size, scale=size**-0.5)
    down = inputs.normal(count, size, inner, scale=inner**-0.5)
    biases = inputs.normal(count, 2 * inner), inputs.normal(count, size)
    for rows in shape.rows:
        x, logits = inputs.normal(rows, size), inputs.normal(rows, count)
        routed = _route.reference(logits, None, _settings(shape))
        label = f"{rows}x{size}x{inner}, {shape.experts_per_token} of {count}"
        plain = ExpertMatrices(gate_up, down, None, None, "silu")
        yield Example(label, (x, *routed, plain))
        if rows <= 16:
            biased = ExpertMatrices(gate_up, down, *biases, "swiglu_oai")
            yield Example(f"{label}, biases", (x, *routed, biased))


def _grouped_examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
    inputs = Inputs(device, dtype)
    count, size = shape.num_experts, shape.hidden_size
    inner = -(-shape.expert_size // 32) * 32  # whole groups
    biases = inputs.normal(count, 2 * inner), inputs.normal(count, size)
    for name, rows in (("int4 minima", 1), ("int8", 3), ("int4/16", 2), *_many(shape)):
        gate_up = random_weight(inputs, count * 2 * inner, size, *LAYOUTS[name])
        down = random_weight(inputs, count * size, inner, *LAYOUTS[name])
        x, logits = inputs.normal(rows, size), inputs.normal(rows, count)
        routed = _route.reference(logits, None, _settings(shape))
        label = f"{name} {rows}x{size}x{inner}, {shape.experts_per_token} of {count}"
        if name == "int8":
            biased = ExpertMatrices(gate_up, down, *biases, "swiglu_oai")
            yield Example(f"{label}, biases", (x, *routed, biased, count))
        else:
            plain = ExpertMatrices(gate_up, down, None, None, "silu")
            yield Example(label, (x, *routed, plain, count))


def _many(shape: Shape) -> Iterator[tuple[str, int]]:
    return (("int4 minima", rows) for rows in shape.rows if rows >= 64)


def _grouped_bytes(
    x: Tensor, shares: Tensor, ids: Tensor, experts: ExpertMatrices[GroupedWeight], count: int
) -> int:
    used = len(torch.unique(ids))
    return size_of(x, x) + (experts.gate_up.nbytes + experts.down.nbytes) * used // count


def _mlp_bytes(x: Tensor, shares: Tensor, ids: Tensor, experts: ExpertMatrices[Tensor]) -> int:
    """Each expert that a token has chosen is read once."""
    used = len(torch.unique(ids))
    return size_of(x, x) + size_of(*experts[:4]) * used // len(experts.gate_up)


_route.specify(
    _route_examples,
    lambda logits, correction, experts: size_of(logits) + 8 * len(logits) * experts.per_token,
)
experts_mlp.specify(
    _mlp_examples,
    _mlp_bytes,
    flops_of=lambda x, shares, ids, experts: (
        2 * ids.numel() * (experts.gate_up[0].numel() + experts.down[0].numel())
    ),
    tolerance=SUMMED,
)
grouped_experts_mlp.specify(
    _grouped_examples,
    _grouped_bytes,
    flops_of=lambda x, shares, ids, experts, count: (
        2 * ids.numel() * sum(prod(each.shape) for each in experts[:2]) // count
    ),
    tolerance=SUMMED,
)
