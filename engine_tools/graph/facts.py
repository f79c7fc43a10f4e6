"""The data classes of `engine inspect --graph`: graph nodes, plan steps, memory ranges of the
activation arena, and times.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import msgspec

from engine.ir.models.inputs import cache_name, state_name
from engine.ir.plan import Capacity, Split
from engine.ir.types import Counts, Dim


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of the engine step that the report describes. The step decodes one token per
    sequence or, if `is_prompt` is true, prefills the last chunk of one prompt.
    """

    tokens: int
    context: int  # length of each sequence, including the step's tokens
    is_prompt: bool

    @property
    def counts(self) -> Counts:
        if self.is_prompt:
            return Counts(self.tokens, 1, context=self.context - (self.tokens - 1) // 2)
        return Counts(self.tokens, self.tokens, self.context, sequences=self.tokens)


@dataclass(frozen=True, slots=True)
class WeightFacts:
    name: str
    shape: tuple[int, ...]
    type: str  # storage type in the file, such as Q4_K
    bytes: int  # size in the file


@dataclass(frozen=True, slots=True)
class NodeFacts:
    name: str
    op: str
    layer: int | None
    inputs: tuple[str, ...]
    weights: tuple[WeightFacts, ...]
    attributes: dict[str, Any]
    shape: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One plan step, which is one kernel call of the execution plan. `generated` names the number
    format in which decode tokens are computed, and `prompt` the format for prefill tokens. Both are
    None if the native kernels are not built.
    """

    kind: str
    label: str  # name of the plan step, the same in every layer
    layer: int | None
    nodes: tuple[str, ...]
    layout: str | None  # layout in which the kernels read the weights
    generated: str | None
    prompt: str | None
    weights: tuple[WeightFacts, ...]
    stored_bytes: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    bytes: int
    places: tuple[int, ...]  # indices of the arena places that the plan step reads and writes
    # For a matmul: the number of work units, and how many of them a thread claims at once.
    split: Split | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A memory range of the activation arena. Buffers that are not in use at the same time share
    one. It holds `floats` numbers for each token, or for each token whose logits are computed;
    `per` says which.
    """

    floats: int
    per: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Costs and measured time of all plan steps with one label, summed over the layers."""

    label: str
    steps: int
    flops: int
    bytes: int
    seconds: float
    share: float  # share in the total time of all plan steps, 0 to 1
    gb_per_s: float
    gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    path: str
    family: str
    layers: int
    step: StepSize
    sequences: int
    logits: int
    threads: int
    instruction_set: str | None  # None: the kernels are not built
    kv_type: str
    inputs: dict[str, str]
    nodes: tuple[NodeFacts, ...]
    outputs: tuple[str, ...]
    capacity: Capacity  # the largest step that the plan supports
    steps: tuple[StepFacts, ...]
    places: tuple[PlaceFacts, ...]
    # Arena size that the described step needs. `capacity_bytes` is the size for the largest step
    # that the plan supports.
    arena_bytes: int
    capacity_bytes: int
    totals: dict[str, int]
    kinds: tuple[KindFacts, ...]  # empty if the plan was not timed
    forward_seconds: float | None
    forwards: int | None

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(self)
        return facts


# An input with this name is a value from the preceding section of the graph, for example from the
# preceding layer.
BEFORE = "(before)"


@dataclass(frozen=True, slots=True)
class GraphSection:
    """A section of the graph after identical layers were merged. It has either nodes outside the
    layers, or the nodes of a group of identical layers. Names have no `layers.N.` prefix.
    """

    layers: tuple[int, ...]  # layer numbers; empty for nodes outside the layers
    nodes: tuple[NodeFacts, ...]  # the nodes of the first layer of the group
    # The plan steps of the first layer. Their `seconds` are the mean over all layers of the group.
    steps: tuple[StepFacts, ...]

    @property
    def title(self) -> str:
        """The section's title, for example "layers 0 to 3, 6: x 5"."""
        if not self.layers:
            return ""
        word = "layer" if len(self.layers) == 1 else "layers"
        return f"{word} {', '.join(_ranges(self.layers))}: x {len(self.layers)}"


@dataclass(frozen=True, slots=True)
class _Part:
    layer: int | None
    nodes: tuple[NodeFacts, ...]
    steps: tuple[StepFacts, ...]

    @property
    def form(self) -> str:
        """A key for grouping: it is equal for layers that differ only in their number and time."""
        timeless = tuple(replace(step, seconds=None) for step in self.steps)
        return repr((self.layer is None, self.nodes, timeless))


def fold(report: Report) -> list[GraphSection]:
    """Merge identical layers into sections. A section takes the place of its first layer."""
    forms: dict[str, list[_Part]] = {}
    for part in _parts(report):
        forms.setdefault(part.form, []).append(part)
    return [_section(alike) for alike in forms.values()]


def by_nodes(section: GraphSection) -> list[tuple[list[NodeFacts], list[StepFacts]]]:
    """Group the section's nodes by the plan steps that compute them. Each group comes with its plan
    steps.
    """
    groups: list[tuple[list[NodeFacts], list[StepFacts]]] = []
    seen: set[str] = set()
    for step in section.steps:
        mine = [node for node in section.nodes if node.name in set(step.nodes) - seen]
        seen.update(step.nodes)
        if mine or not groups:
            groups.append((mine, []))
        groups[-1][1].append(step)
    return groups


def _section(alike: list[_Part]) -> GraphSection:
    layers = tuple(part.layer for part in alike if part.layer is not None)
    steps = []
    for same in zip(*(part.steps for part in alike), strict=True):
        spent = [step.seconds for step in same if step.seconds is not None]
        steps.append(replace(same[0], seconds=sum(spent) / len(spent) if spent else None))
    return GraphSection(layers, alike[0].nodes, tuple(steps))


def _parts(report: Report) -> Iterator[_Part]:
    """Yields the parts of the graph with their plan steps: the nodes before the layers, then each
    layer, then the nodes after the layers.
    """
    groups = [list(group) for _, group in groupby(report.nodes, key=lambda node: node.layer)]
    part_of = {node.name: index for index, group in enumerate(groups) for node in group}
    for index, group in enumerate(groups):
        layer = group[0].layer
        known = {name: BEFORE for name, part in part_of.items() if part == index - 1}
        nodes = tuple(
            replace(
                node,
                name=_inside(node.name, layer),
                layer=None,
                inputs=tuple(known.get(each) or _inside(each, layer) for each in node.inputs),
                weights=_weights(node.weights, layer),
                attributes={key: node.attributes[key] for key in node.attributes if key != "layer"},
            )
            for node in group
        )
        steps = tuple(
            replace(
                step,
                layer=None,
                nodes=tuple(_inside(name, layer) for name in step.nodes),
                weights=_weights(step.weights, layer),
            )
            for step in report.steps
            if part_of[step.nodes[0]] == index
        )
        yield _Part(layer, nodes, steps)


def _weights(weights: Sequence[WeightFacts], layer: int | None) -> tuple[WeightFacts, ...]:
    return tuple(replace(each, name=_inside(each.name, layer)) for each in weights)


def _inside(name: str, layer: int | None) -> str:
    if layer is None:
        return name
    if name in (cache_name(layer), state_name(layer)):
        return name.partition(".")[0]
    return name.removeprefix(f"layers.{layer}.")


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yields runs of consecutive numbers as text, for example 0, 1, 2, 5 -> "0 to 2", "5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs:
        yield str(first) if first == last else f"{first} to {last}"
