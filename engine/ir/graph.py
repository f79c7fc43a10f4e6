"""A model as a graph of nodes, listed in execution order. Each node produces one value. This module
also verifies graphs (`verify`) and replaces nodes (`Rewrite`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from engine.ir.attributes import NoAttributes, attribute_fault
from engine.ir.ops import OPS
from engine.ir.types import Dim, DType, ShapeError, Value


class GraphError(ValueError):
    """A graph breaks a rule. `node` is the name of the node or value that breaks it."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(f"{node}: {message}")
        self.node = node


class Node(msgspec.Struct, frozen=True):
    """One operation of a graph. Other nodes refer to its result by the node's name."""

    name: str
    op: str
    inputs: tuple[str, ...]  # names of graph inputs and of earlier nodes
    weights: tuple[str, ...]
    attributes: Any  # an instance of the op's attributes class
    value: Value
    # Names of the original nodes that a fusion replaced by this node. None if the node is itself
    # original.
    fused: tuple[str, ...] | None = None

    @property
    def origin(self) -> tuple[str, ...]:
        return (self.name,) if self.fused is None else self.fused


class Graph(msgspec.Struct, frozen=True):
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
    """Builds a graph node by node. The shape and dtype of each node are inferred."""

    def __init__(self) -> None:
        self._inputs: dict[str, Value] = {}
        self._weights: dict[str, Value] = {}
        self._nodes: list[Node] = []
        self._known: dict[str, Value] = {}  # values of inputs, weights and nodes, by name

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
        """Appends a node and returns its name."""
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
    """A new node. Its shape and dtype are inferred from those of its inputs and weights, which are
    in `values` by name.
    """
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


def verify(graph: Graph) -> None:
    """Checks names, attributes, shapes and uses of all nodes. Raises `GraphError` for the first
    error.
    """
    values: dict[str, Value] = dict(graph.inputs)
    names = {node.name for node in graph.nodes}
    for node in graph.nodes:
        if node.name in values or node.name in graph.weights:
            raise GraphError(node.name, "the name is taken already")
        _check_op(node)
        _check_uses(node, graph, values, names)
        _check_shape(node, graph, values)
        values[node.name] = node.value
    _check_outputs(graph, values)
    _check_used(graph)


def _check_op(node: Node) -> None:
    if node.op not in OPS:
        raise GraphError(node.name, f"unknown op '{node.op}' (known: {', '.join(OPS)})")
    fault = attribute_fault(node.attributes, OPS[node.op].attributes)
    if fault is not None:
        raise GraphError(node.name, f"{node.op}: {fault}")


def _check_uses(node: Node, graph: Graph, values: dict[str, Value], names: set[str]) -> None:
    for name in node.inputs:
        if name in values:
            continue
        when = "used before its definition" if name in names else "not defined anywhere"
        raise GraphError(node.name, f"{node.op}: the value '{name}' is {when}")
    for name in node.weights:
        if name not in graph.weights:
            raise GraphError(node.name, f"{node.op}: there is no weight '{name}'")


def _check_shape(node: Node, graph: Graph, values: dict[str, Value]) -> None:
    inputs = [values[name] for name in node.inputs]
    weights = [graph.weights[name] for name in node.weights]
    try:
        inferred = OPS[node.op].infer(node.attributes, inputs, weights)
    except ShapeError as error:
        raise GraphError(node.name, f"{node.op}: {error}") from error
    if inferred != node.value:
        raise GraphError(node.name, f"{node.op}: makes {inferred}, but is said to be {node.value}")


def _check_outputs(graph: Graph, values: dict[str, Value]) -> None:
    if not graph.outputs:
        raise GraphError("graph", "has no output")
    for name in graph.outputs:
        if name not in values:
            raise GraphError(name, "is an output that no node makes")


def _check_used(graph: Graph) -> None:
    used = {name for node in graph.nodes for name in (*node.inputs, *node.weights)}
    used.update(graph.outputs)
    for node in graph.nodes:
        if node.name not in used:
            raise GraphError(node.name, f"{node.op}: nothing uses its value")
    for name in (*graph.inputs, *graph.weights):
        if name not in used:
            raise GraphError(name, "is declared but nothing uses it")


class Rewrite:
    """Collects changes to a graph. `done()` returns a new graph with these changes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made_by = {node.name: node for node in graph.nodes}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in node.inputs:
                self.users.setdefault(name, []).append(node)
        self._order = {node.name: index for index, node in enumerate(graph.nodes)}
        self._dropped: set[str] = set()
        self._added: dict[str, list[Node]] = {}
        self._values: dict[str, Value] = {**graph.inputs, **graph.weights}
        self._values.update((node.name, node.value) for node in graph.nodes)

    def maker(self, name: str, *ops: str) -> Node | None:
        """The node that produces the value `name`, or None if its op is not one of `ops`."""
        node = self.made_by.get(name)
        return node if node is not None and node.op in ops else None

    def private(self, name: str) -> bool:
        """Whether exactly one node uses the value `name` and the value is no graph output."""
        return len(self.users.get(name, ())) == 1 and name not in self.graph.outputs

    def last_user(self, name: str) -> Node | None:
        """The last node that uses the value `name`. None if no node uses the value, or if it is a
        graph output.
        """
        if name in self.graph.outputs or name not in self.users:
            return None
        return max(self.users[name], key=lambda node: self._order[node.name])

    def node(
        self,
        op: str,
        name: str,
        inputs: Iterable[str],
        weights: Iterable[str],
        attributes: object,
        replaces: Iterable[Node],
    ) -> Node:
        """Makes a node that stands for the nodes in `replaces`. The caller adds the new node to the
        graph with `put`.
        """
        ordered = sorted(replaces, key=lambda each: self._order.get(each.name, -1))
        origin = tuple(dict.fromkeys(name for each in ordered for name in each.origin))
        node = make_node(op, name, list(inputs), list(weights), attributes, self._values, origin)
        self._values[name] = node.value
        return node

    def drop(self, nodes: Iterable[Node]) -> None:
        self._dropped.update(node.name for node in nodes)

    def put(self, at: Node, *nodes: Node) -> None:
        """Puts new nodes in the place of `at` and removes `at`."""
        self._dropped.add(at.name)
        self._added[at.name] = list(nodes)

    def first(self, nodes: Iterable[Node]) -> Node:
        return min(nodes, key=lambda node: self._order[node.name])

    def done(self) -> Graph:
        kept: list[Node] = []
        for node in self.graph.nodes:
            kept.extend(self._added.get(node.name, ()))
            if node.name not in self._dropped:
                kept.append(node)
        used = {name for node in kept for name in node.inputs}
        kept_inputs = {name: value for name, value in self.graph.inputs.items() if name in used}
        return Graph(kept_inputs, self.graph.weights, tuple(kept), self.graph.outputs)


def joined_name(names: Sequence[str]) -> str:
    """A name for several fused nodes. For layers.0.attn.q and layers.0.attn.k, it is
    layers.0.attn.q_k.
    """
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(each) > common + 1 and each[common] == parts[0][common] for each in parts):
        common += 1
    return ".".join((*parts[0][:common], "_".join(".".join(each[common:]) for each in parts)))
