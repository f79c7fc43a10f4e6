"""Hands an execution plan to the compiled executor: names become numbers, types become codes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.custom.ir.plan import (
    AttentionStep,
    EmbedStep,
    ExecutionPlan,
    GatherStep,
    LinearStep,
    RopeWriteStep,
)

# Codes of csrc/layout.h and csrc/kernels.h.
LAYOUTS = ("Q4", "Q4G16", "Q8", "Q8M", "Q8G16", "F16", "BF16", "F32")
F32, INT8, BF16 = range(3)
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
NORMS = ("none", "rms", "layer")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How products are computed: for tokens that a model generated, and for those of prompts."""

    exact: bool  # float activations everywhere
    has_bf16: bool

    def of(self, layout: int) -> tuple[int, int]:
        """For generated tokens and for prompts, by the layout of the weights.

        A file of float32 weights is computed in float32. Other prompts go through bfloat16 where
        the CPU has it, being many rows at once; a generated token is rounded to 8 bits in groups,
        which reads quantized weights as they are.
        """
        name = LAYOUTS[layout]
        if self.exact or name == "F32":
            return F32, F32
        generated = F32 if name in ("F16", "BF16") else INT8
        return generated, BF16 if self.has_bf16 else generated


@dataclass(frozen=True, slots=True)
class Numbered:
    """Weights that a model has been given, by name."""

    matrices: Mapping[str, int]
    layouts: Mapping[str, int]
    vectors: Mapping[str, int]
    biases: Mapping[str, int]  # by matrix

    def vector(self, name: str | None) -> int:
        return -1 if name is None else self.vectors[name]


def add_program(model: Any, plan: ExecutionPlan, weights: Numbered, arithmetic: Arithmetic) -> None:
    model.begin_program(plan.capacity.tokens)
    for step in plan.steps:
        if isinstance(step, EmbedStep):
            model.embed(step.out, weights.matrices[step.table], weights.vector(step.positions))
        elif isinstance(step, LinearStep):
            _add_linear(model, plan, step, weights, arithmetic)
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
        else:
            assert isinstance(step, GatherStep)
            model.gather(step.source, step.out)
    model.end_program()


def _add_linear(
    model: Any, plan: ExecutionPlan, step: LinearStep, weights: Numbered, arithmetic: Arithmetic
) -> None:
    generated, prompt = arithmetic.of(weights.layouts[step.matrix])
    norm = step.norm
    model.linear(
        source=step.source,
        out=step.out,
        matrix=weights.matrices[step.matrix],
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
        grain=step.grain,
        generated=generated,
        prompt=prompt,
    )
