"""Facts about single plan steps: their labels, their layers, and the weights that they read."""

import re
from collections.abc import Mapping

from engine.ir.plan import (
    AttentionStep,
    EmbedStep,
    ExpertsStep,
    GateRowsStep,
    GatherStep,
    HeadLinearStep,
    LatentWriteStep,
    LinearStep,
    MeanStep,
    NormStep,
    PackedMatrix,
    RecurrentStep,
    RopeWriteStep,
    RouteStep,
    Step,
)

_LAYER = re.compile(r"layers\.(\d+)\.")
_KINDS: Mapping[type, str] = {
    EmbedStep: "embed",
    LinearStep: "linear",
    RopeWriteStep: "rope + write",
    LatentWriteStep: "rope + write",
    HeadLinearStep: "linear",
    AttentionStep: "attention",
    NormStep: "norm",
    RouteStep: "route",
    ExpertsStep: "experts",
    RecurrentStep: "recurrent",
    GateRowsStep: "gate",
    GatherStep: "gather",
    MeanStep: "mean",
}


def weights_of(step: Step, matrices: Mapping[str, PackedMatrix]) -> tuple[str, ...]:
    """Names of the weights that a plan step reads. `matrices` are the matrices of the plan, by
    name.
    """
    names: list[str | None] = []
    match step:
        case EmbedStep():
            names = [*matrices[step.table].parts, step.positions, step.types]
        case LinearStep():
            matrix = matrices[step.matrix]
            norm = [step.norm.weight, step.norm.bias] if step.norm else []
            names = [*norm, *matrix.parts, *matrix.biases]
        case RopeWriteStep():
            names = [step.q_norm, step.k_norm]
        case LatentWriteStep():
            names = [step.norm]
        case HeadLinearStep():
            names = list(matrices[step.matrix].parts)
        case AttentionStep():
            names = [step.sinks]
        case RecurrentStep():
            names = list(step.weights)
        case NormStep():
            names = [step.norm.weight, step.norm.bias]
        case RouteStep():
            names = [step.correction]
        case ExpertsStep():
            both = (matrices[step.up], matrices[step.down])
            names = [name for matrix in both for name in (*matrix.parts, *matrix.biases)]
    return tuple(name for name in names if name is not None)


def step_kind(step: Step) -> str:
    return _KINDS[type(step)]


def step_label(step: Step) -> str:
    """A label for timing tables, such as "linear attn.q_k_v". It is the same in every layer."""
    if not isinstance(step, LinearStep | HeadLinearStep):
        return step_kind(step)
    inside = _LAYER.match(step.matrix)
    name = step.matrix[inside.end() :].removesuffix(".weight") if inside else step.nodes[-1]
    return f"{step_kind(step)} {name}"


def layer_of(name: str) -> int | None:
    """The layer number in the name of a node or weight. None if the name belongs to no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None
