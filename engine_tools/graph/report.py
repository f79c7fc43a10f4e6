"""Collects the data of `engine inspect --graph`: a model's graph, its execution plan and its costs.

The result is plain data about every layer. The other modules of this folder merge identical layers
and show the data. No framework is loaded unless the plan is to be timed. The weight layouts come
from the native kernels, if these are built.
"""

from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.errors import ConfigError, ModelFormatError
from engine.ir import plan as ir
from engine.ir.cost import PlanCost
from engine.ir.graph import Graph, Node
from engine.ir.liveness import touched
from engine.ir.models.decoder import build_graph
from engine.ir.planner import plan
from engine.ir.steps import layer_of, step_kind, step_label
from engine.ir.types import Counts
from engine.native.compiled import kernels
from engine.native.execution import allocation, build
from engine.native.execution.timing import (
    Timing,
    runner_config,
    time_steps,
)
from engine.native.machine import default_threads
from engine_tools.graph.facts import (
    KindFacts,
    NodeFacts,
    PlaceFacts,
    Report,
    StepFacts,
    StepSize,
    WeightFacts,
)

if TYPE_CHECKING:
    from engine.weights.model import ModelSource

_FLOAT = 4
_KV_TYPE = "bfloat16"  # the server's default storage type of keys and values


def describe_graph(source: "ModelSource", size: StepSize, timed: bool = False) -> Report:
    """Describe the graph and the plan of an opened model, for an engine step of this size. If
    `timed` is true, the model is also loaded and each plan step is measured.
    """
    graph = _graph(source)
    _check(source, size)
    counts = size.counts
    config = runner_config(size.tokens, counts.sequences, size.context)
    native = kernels() if timed else _kernels_if_built()
    threads = default_threads()
    if native is not None:
        plans = build.plans_for(source, config, build.machine_with(threads))
        chosen = next(each for each in plans if each.capacity.tokens >= size.tokens)
    else:
        machine, capacity = ir.Machine(threads), ir.Capacity(size.tokens, counts.logits)
        chosen = plan(graph, capacity, machine, lambda name: source.weights[name].tensor.dtype)
    timing = time_steps(source, config, size.tokens, size.is_prompt) if timed else None
    facts = _Facts(source, graph, chosen, native)
    steps = facts.steps(counts, timing)
    rows = {"token": counts.tokens, "logit": counts.logits}
    kinds = {buffer.place: buffer.per for buffer in chosen.buffers}
    places = tuple(
        PlaceFacts(floats, kinds[place], _FLOAT * floats * rows[kinds[place]])
        for place, floats in enumerate(chosen.places)
    )
    return Report(
        path=str(source.path),
        family=source.config.family,
        layers=source.config.num_layers,
        step=size,
        sequences=counts.sequences,
        logits=counts.logits,
        threads=threads,
        instruction_set=None if native is None else native.instruction_sets()[-1],
        kv_type=_KV_TYPE,
        inputs={name: str(value) for name, value in graph.inputs.items()},
        nodes=tuple(map(facts.node, graph.nodes)),
        outputs=graph.outputs,
        capacity=chosen.capacity,
        steps=steps,
        places=places,
        arena_bytes=sum(place.bytes for place in places),
        capacity_bytes=_FLOAT * chosen.arena_floats,
        totals=_totals(steps),
        kinds=_by_kind(steps),
        forward_seconds=timing.forward if timing else None,
        forwards=timing.forwards if timing else None,
    )


def _kernels_if_built() -> Any:
    with suppress(ConfigError):
        return kernels()
    return None


def _graph(source: "ModelSource") -> Graph:
    if source.config.encoder is not None:
        raise ConfigError(
            f"{source.path.name} is a text encoder, and graphs are of models that write text; "
            "leave out --graph to see what is in it"
        )
    try:
        return build_graph(source.config)
    except ModelFormatError as error:
        raise ModelFormatError(f"{error}; leave out --graph to see what is in it") from error


def _check(source: "ModelSource", size: StepSize) -> None:
    if size.context > source.config.max_position:
        raise ConfigError(
            f"a sequence of {size.context} tokens is beyond the model's "
            f"{source.config.max_position} positions; lower --context or --tokens"
        )
    if size.is_prompt and size.tokens > size.context:
        raise ConfigError(
            f"--context {size.context} has no room for a prompt of {size.tokens} tokens; "
            "raise it or lower --tokens"
        )


class _Facts:
    """Builds the report's nodes and plan steps. It combines the graph and the plan with the weights
    in the file and the layouts in which the kernels read them.
    """

    def __init__(
        self, source: "ModelSource", graph: Graph, chosen: ir.ExecutionPlan, native: Any
    ) -> None:
        self._source = source
        self._plan = chosen
        self._native = native
        self._matrices = {matrix.name: matrix for matrix in chosen.matrices}
        self._cost = PlanCost(chosen, self._read_bytes, _kv_value_bytes(source))
        self._weights = {
            name: WeightFacts(
                name,
                tuple(int(dim) for dim in value.shape),
                source.weights[name].tensor.dtype,
                source.weights[name].nbytes,
            )
            for name, value in graph.weights.items()
        }

    def node(self, node: Node) -> NodeFacts:
        return NodeFacts(
            node.name,
            node.op,
            layer_of(node.name),
            node.inputs,
            tuple(self._weights[name] for name in node.weights),
            msgspec.structs.asdict(node.attributes),
            node.value.shape,
            node.value.dtype,
        )

    def steps(self, counts: Counts, timing: Timing | None) -> tuple[StepFacts, ...]:
        seconds = timing.steps if timing else [None] * len(self._plan.steps)
        return tuple(
            self._step(step, counts, spent)
            for step, spent in zip(self._plan.steps, seconds, strict=True)
        )

    def _step(self, step: ir.Step, counts: Counts, seconds: float | None) -> StepFacts:
        cost = self._cost.step(step, counts)
        weights = tuple(self._weights[name] for name in self._cost.weights(step))
        layout, generated, prompt = self._kernel(step)
        return StepFacts(
            kind=step_kind(step),
            label=step_label(step),
            layer=layer_of(step.nodes[0]),
            nodes=step.nodes,
            layout=layout,
            generated=generated,
            prompt=prompt,
            weights=weights,
            stored_bytes=sum(weight.bytes for weight in weights),
            flops=cost.flops,
            weight_bytes=cost.weight_bytes,
            activation_bytes=cost.activation_bytes,
            kv_bytes=cost.kv_bytes,
            bytes=cost.bytes,
            places=tuple(self._plan.buffers[each].place for each in touched(step)),
            split=step.split if isinstance(step, ir.LinearStep) else None,
            seconds=seconds,
        )

    def _kernel(self, step: ir.Step) -> tuple[str | None, str | None, str | None]:
        """The layout of the plan step's weight matrix, and the number formats in which decode and
        prefill are computed. All are None if no kernels are built. The layout is also None if the
        plan step has no matrix.
        """
        if self._native is None:
            return None, None, None
        match step:
            case ir.LinearStep() | ir.HeadLinearStep():
                layout = self._matrices[step.matrix].layout
                return layout, step.kernel.decode, step.kernel.prefill
            case ir.ExpertsStep():
                layout = self._matrices[step.up].layout
                return layout, step.up_kernel.decode, step.up_kernel.prefill
            case ir.AttentionStep():
                return None, step.kernel.decode, step.kernel.prefill
            case ir.EmbedStep():
                return self._matrices[step.table].layout, "f32", "f32"
        return None, "f32", "f32"

    def _read_bytes(self, name: str) -> int:
        """Bytes that a kernel reads for a weight. If no kernels are built: its size in the file."""
        weight = self._source.weights[name]
        shape = weight.spec.shape
        if self._native is None:
            return weight.nbytes
        if len(shape) - weight.spec.of_experts == 1 or name in self._plan.vectors:
            return _FLOAT * prod(shape)
        layout = self._native.layout_of(weight.kernel_dtype)
        panel = self._native.panel_bytes(layout, shape[-1])
        return prod(shape[:-1]) * panel // ir.PANEL_ROWS


def _kv_value_bytes(source: "ModelSource") -> float:
    """Bytes of one number in a cached key or value, including its share of padding."""
    token_bytes = allocation.kv_token_bytes(source.config, _KV_TYPE)
    return token_bytes / source.config.kv_bytes_per_token(1)


def _totals(steps: tuple[StepFacts, ...]) -> dict[str, int]:
    """Costs summed over the plan steps. A weight that two plan steps read counts twice, except in
    `stored_bytes`.
    """
    keys = ("flops", "weight_bytes", "activation_bytes", "kv_bytes", "bytes")
    stored = {weight.name: weight.bytes for step in steps for weight in step.weights}
    totals = {key: sum(getattr(step, key) for step in steps) for key in keys}
    return totals | {"stored_bytes": sum(stored.values())}


def _by_kind(steps: tuple[StepFacts, ...]) -> tuple[KindFacts, ...]:
    """Costs and times of the plan steps, summed by label, slowest first. Empty if the plan was not
    timed.
    """
    groups: dict[str, list[StepFacts]] = {}
    for step in steps:
        if step.seconds is not None:
            groups.setdefault(step.label, []).append(step)
    total = sum(step.seconds or 0.0 for step in steps)
    kinds = []
    for label, group in groups.items():
        flops, moved = (sum(getattr(each, key) for each in group) for key in ("flops", "bytes"))
        seconds = sum(each.seconds or 0.0 for each in group)
        rates = moved / seconds / 1e9, flops / seconds / 1e9
        kinds.append(KindFacts(label, len(group), flops, moved, seconds, seconds / total, *rates))
    return tuple(sorted(kinds, key=lambda kind: -kind.seconds))
