"""The rules of a graph. What breaks one is named by its node."""

from engine.backends.custom.ir.attributes import attribute_fault
from engine.backends.custom.ir.graph import Graph, GraphError, Node
from engine.backends.custom.ir.ops import OPS
from engine.backends.custom.ir.types import ShapeError, Value


def verify(graph: Graph) -> None:
    """Raises `GraphError` for the first rule that does not hold."""
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
