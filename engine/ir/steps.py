"""Facts about single plan steps: their labels, their layers, and the weights that they read."""

import re
from collections.abc import Mapping

from engine.ir import plan as ir

_LAYER = re.compile(r"layers\.(\d+)\.")
_KINDS: Mapping[type, str] = {
    ir.EmbedStep: "embed",
    ir.LinearStep: "linear",
    ir.RopeWriteStep: "rope + write",
    ir.LatentWriteStep: "rope + write",
    ir.HeadLinearStep: "linear",
    ir.AttentionStep: "attention",
    ir.NormStep: "norm",
    ir.RouteStep: "route",
    ir.ExpertsStep: "experts",
    ir.RecurrentStep: "recurrent",
    ir.GateRowsStep: "gate",
    ir.GatherStep: "gather",
    ir.MeanStep: "mean",
}


def weights_of(step: ir.Step, matrices: Mapping[str, ir.PackedMatrix]) -> tuple[str, ...]:
    """Names of the weights that a plan step reads. `matrices` are the matrices of the plan, by
    name.
    """
    names: list[str | None] = []
    match step:
        case ir.EmbedStep():
            names = [*matrices[step.table].parts, step.positions, step.types]
        case ir.LinearStep():
            matrix = matrices[step.matrix]
            norm = [step.norm.weight, step.norm.bias] if step.norm else []
            names = [*norm, *matrix.parts, *matrix.biases]
        case ir.RopeWriteStep():
            names = [step.q_norm, step.k_norm]
        case ir.LatentWriteStep():
            names = [step.norm]
        case ir.HeadLinearStep():
            names = list(matrices[step.matrix].parts)
        case ir.AttentionStep():
            names = [step.sinks]
        case ir.RecurrentStep():
            names = list(step.weights)
        case ir.NormStep():
            names = [step.norm.weight, step.norm.bias]
        case ir.RouteStep():
            names = [step.correction]
        case ir.ExpertsStep():
            both = (matrices[step.up], matrices[step.down])
            names = [name for matrix in both for name in (*matrix.parts, *matrix.biases)]
    return tuple(name for name in names if name is not None)


def step_kind(step: ir.Step) -> str:
    return _KINDS[type(step)]


def step_label(step: ir.Step) -> str:
    """A label for timing tables, such as "linear attn.q_k_v". It is the same in every layer."""
    if not isinstance(step, ir.LinearStep | ir.HeadLinearStep):
        return step_kind(step)
    inside = _LAYER.match(step.matrix)
    name = step.matrix[inside.end() :].removesuffix(".weight") if inside else step.nodes[-1]
    return f"{step_kind(step)} {name}"


def layer_of(name: str) -> int | None:
    """The layer number in the name of a node or weight. None if the name belongs to no layer."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None
