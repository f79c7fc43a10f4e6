"""Rewriting a graph: who uses what, and replacing some nodes by others in one sweep."""

from collections.abc import Iterable

from engine.backends.custom.ir.graph import Graph, Node, make_node
from engine.backends.custom.ir.types import Value


class Rewrite:
    """A graph and the changes to it; `done()` gives the new graph."""

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
        """The node that makes the value, if it is one of `ops`."""
        node = self.made_by.get(name)
        return node if node is not None and node.op in ops else None

    def private(self, name: str) -> bool:
        """Whether one node alone uses the value."""
        return len(self.users.get(name, ())) == 1 and name not in self.graph.outputs

    def last_user(self, name: str) -> Node | None:
        """The last node that uses the value, unless the value is an output."""
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
        """A new node that does the work of others."""
        ordered = sorted(replaces, key=lambda each: self._order.get(each.name, -1))
        origin = tuple(dict.fromkeys(name for each in ordered for name in each.origin))
        node = make_node(op, name, list(inputs), list(weights), attributes, self._values, origin)
        self._values[name] = node.value
        return node

    def drop(self, nodes: Iterable[Node]) -> None:
        self._dropped.update(node.name for node in nodes)

    def put(self, at: Node, *nodes: Node) -> None:
        """New nodes in the place of `at`, which goes."""
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
