"""Passes a plan to the C++ executor, which knows weights by number and types by code."""

import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.ir import plan as ir

# The index of each name is its code in csrc/base/kernels.h or csrc/executor/program.h.
NUMERICS = ("f32", "int8", "bf16", "int8_outliers")
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
NORMS = ("none", "rms", "layer")
SCORINGS = ("softmax", "softmax_chosen", "sigmoid")
MIXERS = ("conv", "mamba2", "delta")
# The weights of a layer that keeps a state, in the order of `RecurrentWeights` in recurrent.h.
RECURRENT_WEIGHTS = ("conv.weight", "conv.bias", "dt_bias", "decay", "skip", "norm.weight")


class Numbered(msgspec.Struct, frozen=True):
    """The numbers that the C++ executor assigned to the weights, by the weights' names."""

    matrices: Mapping[str, int]
    vectors: Mapping[str, int]
    biases: Mapping[str, int]  # matrix name -> index of its bias
    # Copies of matrices in int8 with a scale per row, for steps of many tokens. By matrix name.
    per_channel: Mapping[str, int]
    # For each layer: the number of its KV cache, and its index among the layers of that cache.
    caches: tuple[tuple[int, int], ...]
    slopes: int = -1  # index of the ALiBi slopes; -1: the model has none
    # For each layer that keeps a state: floats before its part in the state of a sequence.
    state_offsets: tuple[int, ...] = ()

    def vector(self, name: str | None) -> int:
        return -1 if name is None else self.vectors[name]


def add_program(model: Any, plan: ir.ExecutionPlan, weights: Numbered) -> None:
    """Passes a plan to the C++ executor, which knows weights by number and types by code."""
    model.begin_program(plan.capacity.tokens)
    sites = itertools.count()
    for step in plan.steps:
        match step:
            case ir.EmbedStep():
                table, positions = weights.matrices[step.table], weights.vector(step.positions)
                types = weights.vector(step.types)
                model.embed(step.out, table, positions, step.scale, types, step.num_types)
            case ir.LinearStep():
                _add_linear(model, plan, step, weights, next(sites))
            case ir.RopeWriteStep():
                _add_rope_write(model, step, weights)
            case ir.LatentWriteStep():
                _add_latent_write(model, step, weights)
            case ir.HeadLinearStep():
                _add_head_linear(model, plan, step, weights)
            case ir.AttentionStep():
                _add_attention(model, step, weights)
            case ir.NormStep():
                _add_norm(model, plan, step, weights)
            case ir.RouteStep():
                _add_route(model, plan, step, weights)
            case ir.ExpertsStep():
                _add_experts(model, plan, step, weights)
            case ir.RecurrentStep():
                _add_recurrent(model, step, weights)
            case ir.GateRowsStep():
                model.gate_rows(step.source, step.out, _over_logits(plan, step.out))
            case ir.GatherStep():
                model.gather(step.source, step.out)
            case ir.MeanStep():
                model.mean(step.source, step.out)
    model.end_program()


def _add_recurrent(model: Any, step: ir.RecurrentStep, weights: Numbered) -> None:
    recurrence, state = step.recurrence, step.recurrence.state
    named = dict(zip(recurrence.weight_shapes, step.weights, strict=True))
    model.recurrent(
        source=step.source,
        out=step.out,
        mixer=MIXERS.index(recurrence.mixer),
        sizes=[
            recurrence.sizes.channels,
            state.conv_size,
            state.heads,
            state.head_dim,
            state.groups,
            state.state_size,
            state.norm_groups,
        ],
        eps=recurrence.eps,
        state_offset=weights.state_offsets[recurrence.layer],
        weights=[weights.vector(named.get(name)) for name in RECURRENT_WEIGHTS],
    )


def _over_logits(plan: ir.ExecutionPlan, buffer: int) -> bool:
    return plan.buffers[buffer].per == "logit"


def _add_rope_write(model: Any, step: ir.RopeWriteStep, weights: Numbered) -> None:
    cache, layer = weights.caches[step.layer]
    model.rope_write(
        qkv=step.qkv,
        cache=cache,
        layer=layer,
        heads=step.heads,
        kv_heads=step.kv_heads,
        head_dim=step.head_dim,
        rope=step.table,
        rope_dim=step.rope_dim,
        query_norm=weights.vector(step.q_norm),
        key_norm=weights.vector(step.k_norm),
        eps=step.eps,
        whole_norm=step.whole_norm,
    )


def _add_attention(model: Any, step: ir.AttentionStep, weights: Numbered) -> None:
    cache, layer = weights.caches[step.layer]
    model.attention(
        qkv=step.qkv,
        out=step.out,
        cache=cache,
        layer=layer,
        heads=step.heads,
        kv_heads=step.kv_heads,
        head_dim=step.head_dim,
        scale=step.scale,
        window=step.window or 0,
        softcap=step.softcap or 0.0,
        slopes=-1 if step.alibi_bias is None else weights.slopes,
        sinks=weights.vector(step.sinks),
        centered=step.centered,
        latent=step.latent,
    )


def _add_latent_write(model: Any, step: ir.LatentWriteStep, weights: Numbered) -> None:
    rope = (step.table, step.rope_dim)
    model.latent_write(step.source, step.layer, rope, weights.vector(step.norm), step.eps)


def _add_head_linear(
    model: Any, plan: ir.ExecutionPlan, step: ir.HeadLinearStep, weights: Numbered
) -> None:
    decode, prefill = NUMERICS.index(step.kernel.decode), NUMERICS.index(step.kernel.prefill)
    model.head_linear(
        source=step.source,
        out=step.out,
        heads=step.heads,
        matrices=(weights.matrices[step.matrix], -1, decode, prefill),
        rope=(step.table, step.rope_dim),
        over_logits=_over_logits(plan, step.out),
    )


def _add_norm(model: Any, plan: ir.ExecutionPlan, step: ir.NormStep, weights: Numbered) -> None:
    model.norm(
        source=step.source,
        out=step.out,
        kind=NORMS.index(step.norm.kind),
        weight=weights.vector(step.norm.weight),
        bias=weights.vector(step.norm.bias),
        eps=step.norm.eps,
        residual=step.residual,
        over_logits=_over_logits(plan, step.out),
    )


def _add_route(model: Any, plan: ir.ExecutionPlan, step: ir.RouteStep, weights: Numbered) -> None:
    routing = step.routing
    model.route(
        source=step.source,
        out=step.out,
        num_experts=step.num_experts,
        per_token=routing.per_token,
        scoring=SCORINGS.index(routing.scoring),
        renormalizes=routing.renormalizes,
        scale=routing.scale,
        groups=routing.groups,
        groups_per_token=routing.groups_per_token,
        best_two=routing.group_score == "best_two",
        correction=weights.vector(step.correction),
        over_logits=_over_logits(plan, step.out),
    )


def _add_experts(
    model: Any, plan: ir.ExecutionPlan, step: ir.ExpertsStep, weights: Numbered
) -> None:
    def numbers(matrix: str, kernel: ir.Kernel) -> tuple[int, int, int, int]:
        bias = weights.biases[matrix] if step.has_bias else -1
        decode, prefill = NUMERICS.index(kernel.decode), NUMERICS.index(kernel.prefill)
        return weights.matrices[matrix], bias, decode, prefill

    model.experts(
        source=step.source,
        weights=step.weights,
        out=step.out,
        num_experts=step.num_experts,
        per_token=step.per_token,
        activation=ACTIVATIONS.index(step.activation),
        up=numbers(step.up, step.up_kernel),
        down=numbers(step.down, step.down_kernel),
        scale=step.scale,
        residual=step.residual,
        over_logits=_over_logits(plan, step.out),
    )


def _add_linear(
    model: Any, plan: ir.ExecutionPlan, step: ir.LinearStep, weights: Numbered, site: int
) -> None:
    """`site` numbers the matmuls of a plan, for adapters."""
    norm = step.norm
    model.linear(
        source=step.source,
        out=step.out,
        matrix=weights.matrices[step.matrix],
        per_channel=weights.per_channel.get(step.matrix, -1),
        norm=0 if norm is None else NORMS.index(norm.kind),
        norm_weight=-1 if norm is None else weights.vector(norm.weight),
        norm_bias=-1 if norm is None else weights.vector(norm.bias),
        eps=0.0 if norm is None else norm.eps,
        bias=weights.biases[step.matrix] if step.has_bias else -1,
        activation=ACTIVATIONS.index(step.activation),
        gated=step.gated,
        residual=step.residual,
        multiply=step.multiply,
        over_logits=_over_logits(plan, step.out),
        column=step.column,
        grain=step.split.grain,
        decode=NUMERICS.index(step.kernel.decode),
        prefill=NUMERICS.index(step.kernel.prefill),
        scale=step.scale,
        softcap=step.softcap or 0.0,
        site=site,
    )
