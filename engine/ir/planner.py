"""Turns a graph into an execution plan: fuses nodes, lowers them to plan steps, assigns memory,
chooses kernels and splits the work among threads.

There are plans for several sizes of engine steps. A step runs with the plan of the smallest size
that is large enough.
"""

from bisect import bisect_left
from collections.abc import Callable

from engine.ir.fusion import fuse
from engine.ir.graph import Graph, GraphError, verify
from engine.ir.liveness import assign_places, lives
from engine.ir.lowering import LayoutOf, Lowering
from engine.ir.plan import Buffer, Capacity, ExecutionPlan, Machine, Precision
from engine.ir.steps import weights_of

_AS_STORED = Precision()
_SMALL = (1, 8, 64, 512)
_GROWTH = 4


def _floats(name: str) -> str:
    return "F32"


def plan(
    graph: Graph,
    capacity: Capacity,
    machine: Machine,
    layout_of: LayoutOf = _floats,
    precision: Precision = _AS_STORED,
) -> ExecutionPlan:
    """A plan for engine steps of up to `capacity` tokens and logits.

    `layout_of` returns the layout of a weight. Weights of different layouts are never packed into
    one matrix.
    """
    verify(graph)
    return _plan_fused(fuse(graph), capacity, machine, layout_of, precision)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The step sizes for which plans are made, in tokens: 1, 8, 64, 512, then each size four times
    the previous size. The last size is `max_tokens`.
    """
    if max_tokens < 1:
        raise ValueError(f"a step has at least one token, found {max_tokens}")
    sizes = [size for size in _SMALL if size < max_tokens]
    size = _SMALL[-1] * _GROWTH
    while size < max_tokens:
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, max_tokens)


class PlanCache:
    """The plans for all sizes of engine steps. A plan is created when it is first used."""

    def __init__(
        self, make: Callable[[Capacity], ExecutionPlan], max_tokens: int, max_logits: int
    ) -> None:
        self._make = make
        self._buckets = token_buckets(max_tokens)
        self._max_logits = max_logits
        self._plans: dict[int, ExecutionPlan] = {}

    def capacities(self) -> tuple[Capacity, ...]:
        return tuple(Capacity(size, min(size, self._max_logits)) for size in self._buckets)

    def get(self, tokens: int, logits: int) -> ExecutionPlan:
        """The plan of the smallest size that is large enough for a step of this many tokens."""
        most = self._buckets[-1]
        if not 1 <= tokens <= most or not 0 <= logits <= min(tokens, self._max_logits):
            raise ValueError(
                f"a step of {tokens} tokens and {logits} logits is not within "
                f"{most} tokens and {self._max_logits} logits"
            )
        index = bisect_left(self._buckets, tokens)
        if index not in self._plans:
            self._plans[index] = self._make(self.capacities()[index])
        return self._plans[index]


def plan_cache(
    graph: Graph,
    machine: Machine,
    max_tokens: int,
    max_logits: int,
    layout_of: LayoutOf = _floats,
    precision: Precision = _AS_STORED,
) -> PlanCache:
    """The plans for all engine steps of up to `max_tokens` tokens, of which up to `max_logits` need
    logits.
    """
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
