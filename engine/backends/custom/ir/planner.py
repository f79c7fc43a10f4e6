"""From a graph to what an executor runs: fusion, steps, places of buffers, thread split."""

from collections.abc import Sequence

from engine.backends.custom.ir.buckets import PlanCache
from engine.backends.custom.ir.fusion import fuse
from engine.backends.custom.ir.graph import Graph, GraphError
from engine.backends.custom.ir.liveness import assign_places, lives
from engine.backends.custom.ir.lowering import LayoutOf, Lowering
from engine.backends.custom.ir.plan import (
    Buffer,
    Capacity,
    EmbedStep,
    ExecutionPlan,
    LinearStep,
    Machine,
    PackedMatrix,
    RopeWriteStep,
    Step,
)
from engine.backends.custom.ir.verify import verify


def _one_layout(name: str) -> str:
    return "any"


def plan(
    graph: Graph, capacity: Capacity, machine: Machine, layout_of: LayoutOf = _one_layout
) -> ExecutionPlan:
    """A plan for up to `capacity` rows. Weights of different layouts are never one matrix."""
    verify(graph)
    return _plan_fused(fuse(graph), capacity, machine, layout_of)


def plan_cache(
    graph: Graph,
    machine: Machine,
    max_tokens: int,
    max_logits: int,
    layout_of: LayoutOf = _one_layout,
) -> PlanCache:
    """Plans for steps of every size up to these."""
    verify(graph)
    fused = fuse(graph)

    def make(capacity: Capacity) -> ExecutionPlan:
        return _plan_fused(fused, capacity, machine, layout_of)

    return PlanCache(make, max_tokens, max_logits)


def _plan_fused(
    graph: Graph, capacity: Capacity, machine: Machine, layout_of: LayoutOf
) -> ExecutionPlan:
    if len(graph.outputs) != 1:
        raise GraphError("graph", f"must have one output, found {len(graph.outputs)}")
    lowered = Lowering(graph, capacity, machine, layout_of)
    lowered.run()
    output = lowered.buffer_of[graph.outputs[0]]
    spans = lives(lowered.steps, len(lowered.names), output)
    chosen, widths = assign_places(lowered.rooms, spans)
    buffers = tuple(
        Buffer(name, room.width, room.per, place)
        for name, room, place in zip(lowered.names, lowered.rooms, chosen, strict=True)
    )
    matrices = tuple(lowered.matrices.values())
    return ExecutionPlan(
        steps=tuple(lowered.steps),
        buffers=buffers,
        places=widths,
        matrices=matrices,
        vectors=tuple(lowered.vectors),
        output=output,
        capacity=capacity,
        machine=machine,
        weights=_weights(lowered.steps, {matrix.name: matrix for matrix in matrices}),
    )


def _weights(steps: Sequence[Step], matrices: dict[str, PackedMatrix]) -> tuple[str, ...]:
    """Every weight in the order of first use."""
    order: dict[str, None] = {}
    for step in steps:
        names: list[str | None] = []
        match step:
            case EmbedStep():
                names = [*matrices[step.table].parts, step.positions]
            case LinearStep():
                matrix = matrices[step.matrix]
                norm = [step.norm.weight, step.norm.bias] if step.norm else []
                names = [*norm, *matrix.parts, *matrix.biases]
            case RopeWriteStep():
                names = [step.q_norm, step.k_norm]
        order.update((name, None) for name in names if name is not None)
    return tuple(order)
