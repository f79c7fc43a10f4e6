"""From a graph to what an executor runs: fusion, steps, places, kernels, thread split."""

from engine.backends.custom.ir.buckets import PlanCache
from engine.backends.custom.ir.fusion import fuse
from engine.backends.custom.ir.graph import Graph, GraphError
from engine.backends.custom.ir.liveness import assign_places, lives
from engine.backends.custom.ir.lowering import LayoutOf, Lowering
from engine.backends.custom.ir.plan import (
    Buffer,
    Capacity,
    ExecutionPlan,
    Machine,
    Precision,
    weights_of,
)
from engine.backends.custom.ir.verify import verify

_AS_STORED = Precision()


def _floats(name: str) -> str:
    return "F32"


def plan(
    graph: Graph,
    capacity: Capacity,
    machine: Machine,
    layout_of: LayoutOf = _floats,
    precision: Precision = _AS_STORED,
) -> ExecutionPlan:
    """A plan for up to `capacity` rows. Weights of different layouts are never one matrix."""
    verify(graph)
    return _plan_fused(fuse(graph), capacity, machine, layout_of, precision)


def plan_cache(
    graph: Graph,
    machine: Machine,
    max_tokens: int,
    max_logits: int,
    layout_of: LayoutOf = _floats,
    precision: Precision = _AS_STORED,
) -> PlanCache:
    """Plans for steps of every size up to these."""
    verify(graph)
    fused = fuse(graph)

    def make(capacity: Capacity) -> ExecutionPlan:
        return _plan_fused(fused, capacity, machine, layout_of, precision)

    return PlanCache(make, max_tokens, max_logits)


def _plan_fused(
    graph: Graph,
    capacity: Capacity,
    machine: Machine,
    layout_of: LayoutOf,
    precision: Precision,
) -> ExecutionPlan:
    if len(graph.outputs) != 1:
        raise GraphError("graph", f"must have one output, found {len(graph.outputs)}")
    lowered = Lowering(graph, capacity, machine, precision, layout_of)
    lowered.run()
    output = lowered.buffer_of[graph.outputs[0]]
    spans = lives(lowered.steps, len(lowered.names), output)
    chosen, widths = assign_places(lowered.rooms, spans)
    buffers = tuple(
        Buffer(name, room.width, room.per, place)
        for name, room, place in zip(lowered.names, lowered.rooms, chosen, strict=True)
    )
    order = (name for step in lowered.steps for name in weights_of(step, lowered.matrices))
    return ExecutionPlan(
        steps=tuple(lowered.steps),
        buffers=buffers,
        places=widths,
        matrices=tuple(lowered.matrices.values()),
        vectors=tuple(lowered.vectors),
        output=output,
        capacity=capacity,
        machine=machine,
        precision=precision,
        weights=tuple(dict.fromkeys(order)),
    )
