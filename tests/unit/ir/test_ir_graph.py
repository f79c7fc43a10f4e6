"""Graphs: what a builder infers, and one broken rule after the other, named by its node."""

from typing import Any

import pytest
from msgspec.structs import replace

from engine.architectures.base import ModelConfig
from engine.ir.attributes import HeadNorm, NoAttributes, Normalize
from engine.ir.graph import Graph, GraphBuilder, GraphError, Node, verify
from engine.ir.models.decoder import build_graph
from engine.ir.types import Value
from tests.support.references.ir_driver import CONFIGS, VOCAB

BROKEN = "layers.1.mlp.down"


@pytest.fixture
def graph() -> Graph:
    return build_graph(CONFIGS["llama"])


def changed(graph: Graph, node_name: str, **changes: Any) -> Graph:
    nodes = [replace(node, **changes) if node.name == node_name else node for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def refusal(graph: Graph) -> GraphError:
    with pytest.raises(GraphError) as caught:
        verify(graph)
    assert str(caught.value).startswith(caught.value.node)
    return caught.value


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_family_builds_a_valid_graph(config: ModelConfig) -> None:
    graph = build_graph(config)
    verify(graph)
    assert graph.node(graph.outputs[0]).value == Value(("R", VOCAB))


def test_graph_shapes_follow_the_config(graph: Graph) -> None:
    config = CONFIGS["llama"]
    assert graph.node("embed").value == Value(("T", config.hidden_size))
    assert graph.node("layers.0.attn.q_rope").value == Value(("T", 48))
    assert graph.node("layers.0.attn.kv").value == Value(("C", "P", 2, 2, 12))
    assert graph.node("layers.0.mlp.gated").value == Value(("T", config.intermediate_size))
    assert graph.node("layers.1.wanted").value == Value(("R", config.hidden_size))
    assert graph.node("layers.1.mlp.gated").value == Value(("R", config.intermediate_size))


def test_an_unknown_op_is_refused(graph: Graph) -> None:
    error = refusal(changed(graph, BROKEN, op="matmul"))
    assert error.node == BROKEN and "unknown op 'matmul'" in str(error)


def test_attributes_of_another_op_are_refused(graph: Graph) -> None:
    error = refusal(changed(graph, BROKEN, attributes=Normalize(1e-5)))
    assert error.node == BROKEN and "must be NoAttributes, found Normalize" in str(error)


@pytest.mark.parametrize("eps", ["1e-5", 1, None, True])
def test_an_attribute_of_the_wrong_type_is_refused(graph: Graph, eps: Any) -> None:
    error = refusal(changed(graph, "layers.0.mlp_norm", attributes=Normalize(eps)))
    assert error.node == "layers.0.mlp_norm" and "'eps' must be float" in str(error)


def test_optional_attributes_accept_none_or_their_type() -> None:
    graph = build_graph(CONFIGS["mistral"])
    name = "layers.0.attn.heads"
    attributes = graph.node(name).attributes
    verify(changed(graph, name, attributes=replace(attributes, window=None)))
    error = refusal(changed(graph, name, attributes=replace(attributes, window=5.0)))
    assert error.node == name and "'window'" in str(error)


def test_inputs_that_do_not_fit_are_refused(graph: Graph) -> None:
    error = refusal(changed(graph, BROKEN, inputs=("layers.1.mlp_norm",)))
    assert error.node == BROKEN and "does not take rows of 40" in str(error)


def test_too_many_inputs_are_refused(graph: Graph) -> None:
    node = graph.node(BROKEN)
    error = refusal(changed(graph, BROKEN, inputs=node.inputs * 2))
    assert error.node == BROKEN and "takes 1 inputs, found 2" in str(error)


def test_a_declared_value_that_differs_from_the_inferred_one_is_refused(graph: Graph) -> None:
    error = refusal(changed(graph, BROKEN, value=Value(("T", 41))))
    assert error.node == BROKEN and "f32[R, 40]" in str(error) and "f32[T, 41]" in str(error)


def test_a_weight_of_another_shape_is_refused(graph: Graph) -> None:
    weights = {**graph.weights, f"{BROKEN}.weight": Value((40, 55))}
    error = refusal(replace(graph, weights=weights))
    assert error.node == BROKEN and "[40, 55]" in str(error)


def test_a_value_used_before_its_definition_is_refused(graph: Graph) -> None:
    error = refusal(replace(graph, nodes=graph.nodes[::-1]))
    assert error.node == "logits" and "'norm' is used before its definition" in str(error)


def test_an_undefined_value_is_refused(graph: Graph) -> None:
    error = refusal(changed(graph, BROKEN, inputs=("layers.9.mlp.gated",)))
    assert error.node == BROKEN and "not defined anywhere" in str(error)


def test_a_missing_weight_is_refused(graph: Graph) -> None:
    weights = {name: each for name, each in graph.weights.items() if name != f"{BROKEN}.weight"}
    error = refusal(replace(graph, weights=weights))
    assert error.node == BROKEN and f"no weight '{BROKEN}.weight'" in str(error)


@pytest.mark.parametrize("name", ["layers.0.mlp.down", "token_ids", "norm.weight"])
def test_a_duplicate_node_name_is_refused(graph: Graph, name: str) -> None:
    error = refusal(changed(graph, BROKEN, name=name))
    assert error.node == name and "taken" in str(error)


def test_an_unused_value_is_refused(graph: Graph) -> None:
    extra = Node("lonely", "silu", ("embed",), (), NoAttributes(), graph.node("embed").value)
    error = refusal(replace(graph, nodes=(*graph.nodes, extra)))
    assert error.node == "lonely" and "nothing uses" in str(error)


@pytest.mark.parametrize("part", ["inputs", "weights"])
def test_unused_inputs_and_weights_are_refused(graph: Graph, part: str) -> None:
    error = refusal(replace(graph, **{part: {**getattr(graph, part), "spare": Value((40,))}}))
    assert error.node == "spare"


def test_a_graph_without_output_is_refused(graph: Graph) -> None:
    assert "has no output" in str(refusal(replace(graph, outputs=())))


def test_an_undefined_output_is_refused(graph: Graph) -> None:
    assert refusal(replace(graph, outputs=("logits", "states"))).node == "states"


def test_the_graph_builder_refuses_invalid_nodes_at_once() -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 24))
    builder.weight("norm", 12)
    builder.add("head_norm", "good", ["x"], ["norm"], HeadNorm(2, 12, 1e-6))
    with pytest.raises(GraphError, match="bad: head_norm: heads need 36 columns"):
        builder.add("head_norm", "bad", ["good"], ["norm"], HeadNorm(3, 12, 1e-6))
    with pytest.raises(GraphError, match="worse: unknown op"):
        builder.add("tanh", "worse", ["good"])
    with pytest.raises(GraphError, match=r"worst: unknown \['y'\]"):
        builder.add("silu", "worst", ["y"])
