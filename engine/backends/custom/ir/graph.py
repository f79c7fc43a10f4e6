"""A model as a graph: nodes in the order of their computation, each the one value that it makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.backends.custom.ir.attributes import NoAttributes
from engine.backends.custom.ir.ops import OPS
from engine.backends.custom.ir.types import Dim, DType, ShapeError, Value


class GraphError(ValueError):
    """A graph that breaks a rule; `node` names where."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(f"{node}: {message}")
        self.node = node


@dataclass(frozen=True, slots=True)
class Node:
    """An operation; others refer to its value by its name."""

    name: str
    op: str
    inputs: tuple[str, ...]  # names of graph inputs and of earlier nodes
    weights: tuple[str, ...]
    attributes: Any  # of the op's type
    value: Value
    fused: tuple[str, ...] | None = None  # the nodes that it does the work of, if not its own

    @property
    def origin(self) -> tuple[str, ...]:
        return (self.name,) if self.fused is None else self.fused


@dataclass(frozen=True, slots=True)
class Graph:
    inputs: Mapping[str, Value]
    weights: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(name, "there is no such node")


class GraphBuilder:
    """Adds nodes one by one; each gets the shape that its op infers."""

    def __init__(self) -> None:
        self._inputs: dict[str, Value] = {}
        self._weights: dict[str, Value] = {}
        self._nodes: list[Node] = []
        self._known: dict[str, Value] = {}  # of inputs, weights and nodes

    def input(self, name: str, shape: tuple[Dim, ...], dtype: DType = "f32") -> str:
        self._inputs[name] = self._known[name] = Value(shape, dtype)
        return name

    def weight(self, name: str, *shape: int) -> str:
        self._weights[name] = self._known[name] = Value(shape)
        return name

    def add(
        self,
        op: str,
        name: str,
        inputs: Sequence[str],
        weights: Sequence[str] = (),
        attributes: Any = None,
    ) -> str:
        """Appends a node and gives its name, which stands for its value."""
        node = make_node(
            op,
            name,
            inputs,
            weights,
            NoAttributes() if attributes is None else attributes,
            self._known,
        )
        self._nodes.append(node)
        self._known[name] = node.value
        return name

    def build(self, *outputs: str) -> Graph:
        return Graph(self._inputs, self._weights, tuple(self._nodes), outputs)


def make_node(
    op: str,
    name: str,
    inputs: Sequence[str],
    weights: Sequence[str],
    attributes: Any,
    values: Mapping[str, Value],
    fused: tuple[str, ...] | None = None,
) -> Node:
    """A node whose value is inferred from `values`, those of its inputs and weights by name."""
    unknown = [each for each in (*inputs, *weights) if each not in values]
    if op not in OPS or unknown:
        raise GraphError(name, f"unknown op '{op}'" if op not in OPS else f"unknown {unknown}")
    try:
        value = OPS[op].infer(
            attributes, [values[each] for each in inputs], [values[each] for each in weights]
        )
    except ShapeError as error:
        raise GraphError(name, f"{op}: {error}") from error
    return Node(name, op, tuple(inputs), tuple(weights), attributes, value, fused)
