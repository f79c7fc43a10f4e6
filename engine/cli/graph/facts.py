"""The facts of `engine inspect --graph` as plain data: nodes, steps, places of buffers, times."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from engine.backends.custom.ir.decoder import cache_name
from engine.backends.custom.ir.plan import Capacity, Split
from engine.backends.custom.ir.types import Counts, Dim


@dataclass(frozen=True, slots=True)
class StepSize:
    """What is priced and timed: a generated token of each sequence, or the last of a prompt."""

    tokens: int
    context: int  # length of each sequence, these tokens included
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
    type: str  # as the file stores it
    bytes: int  # in the file


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
    """`generated` and `prompt` are the arithmetic for such tokens; None: no kernels are built."""

    kind: str
    label: str  # the same for the same step of every layer
    layer: int | None
    nodes: tuple[str, ...]
    layout: str | None  # of a matrix, as the kernels read it
    generated: str | None
    prompt: str | None
    weights: tuple[WeightFacts, ...]
    stored_bytes: int
    flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    bytes: int
    places: tuple[int, ...]  # of the buffers that are read and written
    split: Split | None  # of a product: its units, and how many a thread claims at once
    seconds: float | None


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """A part of the arena: so many floats for each row, where rows are tokens or wanted logits."""

    floats: int
    per: str
    bytes: int


@dataclass(frozen=True, slots=True)
class KindFacts:
    """The same step of every layer, all together."""

    label: str
    steps: int
    flops: int
    bytes: int
    seconds: float
    share: float  # of the time of all steps
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
    capacity: Capacity  # the most that the plan serves
    steps: tuple[StepFacts, ...]
    places: tuple[PlaceFacts, ...]
    arena_bytes: int  # for this step; `capacity_bytes` for the largest that the plan serves
    capacity_bytes: int
    totals: dict[str, int]
    kinds: tuple[KindFacts, ...]  # only when timed
    forward_seconds: float | None
    forwards: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


BEFORE = "(before)"  # the value that the part before ends with


@dataclass(frozen=True, slots=True)
class Section:
    """What lies outside of the layers, or layers of one form; names are those inside a layer."""

    layers: tuple[int, ...]  # empty: outside
    nodes: tuple[NodeFacts, ...]  # of the first layer
    steps: tuple[StepFacts, ...]  # of the first layer; `seconds` is the mean over the layers

    @property
    def title(self) -> str:
        """layers 0 to 3, 6: x 5"""
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
        """The same for layers that differ in nothing but their number and their time."""
        timeless = tuple(replace(step, seconds=None) for step in self.steps)
        return repr((self.layer is None, self.nodes, timeless))


def fold(report: Report) -> list[Section]:
    """Sections in the order in which the first of their layers comes."""
    forms: dict[str, list[_Part]] = {}
    for part in _parts(report):
        forms.setdefault(part.form, []).append(part)
    return [_section(alike) for alike in forms.values()]


def by_nodes(section: Section) -> list[tuple[list[NodeFacts], list[StepFacts]]]:
    """The section's nodes in groups, each with the steps that do its work."""
    groups: list[tuple[list[NodeFacts], list[StepFacts]]] = []
    seen: set[str] = set()
    for step in section.steps:
        mine = [node for node in section.nodes if node.name in set(step.nodes) - seen]
        seen.update(step.nodes)
        if mine or not groups:
            groups.append((mine, []))
        groups[-1][1].append(step)
    return groups


def _section(alike: list[_Part]) -> Section:
    layers = tuple(part.layer for part in alike if part.layer is not None)
    steps = []
    for same in zip(*(part.steps for part in alike), strict=True):
        spent = [step.seconds for step in same if step.seconds is not None]
        steps.append(replace(same[0], seconds=sum(spent) / len(spent) if spent else None))
    return Section(layers, alike[0].nodes, tuple(steps))


def _parts(report: Report) -> Iterator[_Part]:
    """The nodes before the layers, of each layer and after them, with the steps that do them."""
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
    return "cache" if name == cache_name(layer) else name.removeprefix(f"layers.{layer}.")


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """0, 1, 2, 5 -> 0 to 2, 5"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs:
        yield str(first) if first == last else f"{first} to {last}"
