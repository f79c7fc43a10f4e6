"""Names for the steps of a plan, the same in every layer, for tables of what takes how long."""

import re
from collections.abc import Mapping

from engine.backends.custom.ir import plan as ir

_LAYER = re.compile(r"layers\.(\d+)\.")
_KINDS: Mapping[type, str] = {
    ir.EmbedStep: "embed",
    ir.LinearStep: "linear",
    ir.RopeWriteStep: "rope + write",
    ir.AttentionStep: "attention",
    ir.GatherStep: "gather",
}


def step_kind(step: ir.Step) -> str:
    return _KINDS[type(step)]


def step_label(step: ir.Step) -> str:
    """linear attn.q_k_v, attention, ..."""
    kind = step_kind(step)
    if not isinstance(step, ir.LinearStep):
        return kind
    inside = _LAYER.match(step.matrix)
    name = step.matrix[inside.end() :].removesuffix(".weight") if inside else step.nodes[-1]
    return f"{kind} {name}"


def layer_of(name: str) -> int | None:
    """The layer that a node or a weight belongs to."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None
