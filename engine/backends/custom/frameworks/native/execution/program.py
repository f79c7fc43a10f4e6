"""Gives an execution plan to the compiled executor, with names as numbers and types as codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.custom.ir.plan import (
    AddNormStep,
    AttentionStep,
    EmbedStep,
    ExecutionPlan,
    GatherStep,
    LinearStep,
    RopeWriteStep,
)

# Codes of csrc/base/layout.h and csrc/base/kernels.h.
LAYOUTS = ("Q4", "Q4G16", "Q8", "Q8M", "Q8G16", "F16", "BF16", "F32")
NUMERICS = ("f32", "int8", "bf16")
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
NORMS = ("none", "rms", "layer")


@dataclass(frozen=True, slots=True)
class Numbered:
    """The numbers of weights that were given to the executor, by name."""

    matrices: Mapping[str, int]
    vectors: Mapping[str, int]
    biases: Mapping[str, int]  # by the name of their matrix
    per_channel: Mapping[str, int]  # per-channel int8 weights, for steps of many rows

    def vector(self, name: str | None) -> int:
        return -1 if name is None else self.vectors[name]


def add_program(model: Any, plan: ExecutionPlan, weights: Numbered) -> None:
    model.begin_program(plan.capacity.tokens)
    for step in plan.steps:
        if isinstance(step, EmbedStep):
            table, positions = weights.matrices[step.table], weights.vector(step.positions)
            model.embed(step.out, table, positions, step.scale)
        elif isinstance(step, LinearStep):
            _add_linear(model, plan, step, weights)
        elif isinstance(step, RopeWriteStep):
            model.rope_write(
                qkv=step.qkv,
                layer=step.layer,
                heads=step.heads,
                kv_heads=step.kv_heads,
                head_dim=step.head_dim,
                rope_dim=step.rope_dim,
                query_norm=weights.vector(step.q_norm),
                key_norm=weights.vector(step.k_norm),
                eps=step.eps,
                whole_norm=step.whole_norm,
            )
        elif isinstance(step, AttentionStep):
            model.attention(
                qkv=step.qkv,
                out=step.out,
                layer=step.layer,
                heads=step.heads,
                kv_heads=step.kv_heads,
                head_dim=step.head_dim,
                scale=step.scale,
                window=step.window or 0,
            )
        elif isinstance(step, AddNormStep):
            model.add_norm(
                source=step.source,
                out=step.out,
                weight=weights.vector(step.weight),
                eps=step.eps,
                over_logits=plan.buffers[step.out].per == "logit",
            )
        else:
            assert isinstance(step, GatherStep)
            model.gather(step.source, step.out)
    model.end_program()


def _add_linear(model: Any, plan: ExecutionPlan, step: LinearStep, weights: Numbered) -> None:
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
        over_logits=plan.buffers[step.out].per == "logit",
        column=step.column,
        grain=step.split.grain,
        decode=NUMERICS.index(step.kernel.decode),
        prefill=NUMERICS.index(step.kernel.prefill),
        scale=step.scale,
    )
