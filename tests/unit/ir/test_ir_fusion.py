"""Each fusion happens where it should, not where it must not, and leaves results unchanged."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from engine.architectures.base import ModelConfig
from engine.ir import fusion
from engine.ir.attributes import NoAttributes, Normalize
from engine.ir.execute import ReferenceBatch, State, run_graph
from engine.ir.graph import Graph, GraphBuilder, verify
from engine.ir.models.decoder import build_graph
from engine.ir.ops import OPS
from engine.ir.reference import F32
from tests.support.references.ir_driver import CONFIGS, Driver, new_state, random_weights, text

Pass = Callable[[Graph], Graph]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def passes_before(last: Pass, graph: Graph) -> Graph:
    for each in fusion.PASSES:
        if each is last:
            return graph
        graph = each(graph)
    raise AssertionError(f"{last} is not a pass")


def logits(graph: Graph, config: ModelConfig) -> F32:
    """Of a step with two prompts and of a second one that goes on with both."""
    weights = random_weights(graph)

    def forward(batch: ReferenceBatch, state: State) -> F32:
        return run_graph(graph, weights, batch, state)

    driver = Driver(forward, new_state(config))
    tracks = [driver.add(text(9, seed=1)), driver.add(text(14, seed=2))]
    first = driver.step([(tracks[0], 8), (tracks[1], 5)])
    return np.concatenate((first, driver.step([(tracks[1], 9), (tracks[0], 1)])))


@pytest.mark.parametrize("each", fusion.PASSES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_fusion_pass_keeps_the_results(each: Pass, name: str) -> None:
    config = CONFIGS[name]
    before = passes_before(each, build_graph(config))
    after = each(before)
    verify(after)
    expected = logits(before, config)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits(after, config), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("each", "name", "gone", "made"),
    [
        (fusion.fuse_positions, "gpt2", {"embed": 1, "position_embed": 1, "add": 1}, 1),
        # 2 layers: 3 + 2 products behind the norms of each, and the head
        (fusion.fuse_norms, "llama", {"rms_norm": 5, "linear": 11}, 11),
        (fusion.fuse_norms, "gpt2", {"layer_norm": 5, "linear": 9}, 9),
        (fusion.fuse_qkv, "qwen2", {"projection": 6}, 2 + 6),  # and a part for each of the three
        (fusion.fuse_activations, "gpt2", {"gelu_tanh": 2, "projection": 2}, 2),
        (fusion.fuse_gates, "llama", {"mul": 2, "projection": 4}, 2),
        (fusion.fuse_rope_writes, "qwen3", {"rope": 4, "head_norm": 4, "kv_write": 2}, 2),
        (fusion.fuse_rope_writes, "olmo2", {"rope": 4, "rms_norm": 4, "kv_write": 2}, 2),
        (fusion.fuse_scales, "granite", {"scale": 5, "linear": 4, "projection": 1}, 5),
        (fusion.fuse_output_norms, "olmo2", {"add": 4, "rms_norm": 4}, 4),
        (fusion.fuse_rope_writes, "gpt2", {"columns": 6, "kv_write": 2}, 2),
        (fusion.fuse_residuals, "llama", {"add": 4, "linear": 4}, 4),
    ],
)
def test_each_fusion_pass_replaces_the_expected_nodes(
    each: Pass, name: str, gone: dict[str, int], made: int
) -> None:
    before = passes_before(each, build_graph(CONFIGS[name]))
    after = each(before)
    old = {node.name: node for node in before.nodes}
    new = [node for node in after.nodes if old.get(node.name) != node and node.op != "attention"]
    assert len(new) == made
    kept = {id(node) for node in after.nodes}
    lost = [node.op for node in before.nodes if id(node) not in kept]
    for op, count in gone.items():
        assert lost.count(op) == count, op


@pytest.mark.parametrize("name", CONFIGS)
def test_every_graph_node_is_computed_by_exactly_one_fused_node(name: str) -> None:
    graph = build_graph(CONFIGS[name])
    fused = fusion.fuse(graph)
    assert set(ops(fused)) <= {
        *("embed", "embed_positions", "projection", "rope_write", "attention", "gather_rows"),
        *("linear", "add_norm"),
    }
    norms = {node.name for node in graph.nodes if node.op.endswith("_norm")}
    done = [each for node in fused.nodes for each in node.origin if each not in norms]
    assert sorted(done) == sorted(node.name for node in graph.nodes if node.name not in norms)
    assert norms <= {each for node in fused.nodes for each in node.origin}


def test_a_norm_with_other_readers_is_not_fused() -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 8))
    builder.weight("n", 8)
    builder.weight("w", 8, 8)
    normed = builder.add("rms_norm", "normed", ["x"], ["n"], Normalize(1e-5))
    product = builder.add("linear", "product", [normed], ["w"])
    graph = builder.build(builder.add("mul", "out", [product, normed]))
    assert fusion.fuse_norms(graph) == graph


def test_a_residual_that_is_read_later_is_not_overwritten() -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 8))
    builder.weight("w", 8, 8)
    kept = builder.add("silu", "kept", ["x"])
    product = builder.add("linear", "product", [kept], ["w"])
    total = builder.add("add", "total", [kept, product])
    graph = builder.build(builder.add("mul", "out", [total, kept]))
    assert fusion.fuse_residuals(graph) == graph
    safe = builder.build(total)
    safe = Graph(safe.inputs, safe.weights, safe.nodes[:3], ("total",))
    assert ops(fusion.fuse_residuals(safe)) == ["silu", "projection"]


def test_a_graph_input_is_not_overwritten() -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 8))
    builder.weight("w", 8, 8)
    product = builder.add("linear", "product", ["x"], ["w"])
    graph = builder.build(builder.add("add", "total", ["x", product]))
    assert fusion.fuse_residuals(graph) == graph


def test_a_matmul_with_other_readers_is_not_fused() -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 8))
    builder.weight("w", 8, 8)
    product = builder.add("linear", "product", ["x"], ["w"])
    active = builder.add("silu", "active", [product])
    graph = builder.build(builder.add("add", "total", [product, active]))
    assert fusion.fuse(graph) == graph


def test_rotated_values_do_not_match_the_rope_write_fusion() -> None:
    """Values that are turned like keys: no family has them, so the pattern must not match."""
    graph = passes_before(fusion.fuse_rope_writes, build_graph(CONFIGS["llama"]))
    rotation = graph.node("layers.0.attn.k_rope")
    extra = replace(rotation, name="turned", inputs=("layers.0.attn.v", *rotation.inputs[1:]))
    nodes = []
    for node in graph.nodes:
        if node.name == "layers.0.attn.kv":
            cache, keys, _, slots = node.inputs
            nodes += [extra, replace(node, inputs=(cache, keys, "turned", slots))]
        else:
            nodes.append(node)
    odd = replace(graph, nodes=tuple(nodes))
    verify(odd)
    assert ops(fusion.fuse_rope_writes(odd)).count("rope_write") == 1, "the other layer's alone"


@pytest.mark.parametrize("name", ["layers.0.attn.k_norm", "layers.0.attn.k_rope"])
def test_queries_and_keys_with_different_rope_are_not_fused(name: str) -> None:
    """A rope write has one epsilon and one number of turned values."""
    graph = passes_before(fusion.fuse_rope_writes, build_graph(CONFIGS["qwen3"]))
    node = graph.node(name)
    change = {"eps": 0.5} if node.op == "head_norm" else {"dim": node.attributes.dim - 2}
    other = replace(node, attributes=replace(node.attributes, **change))
    odd = replace(graph, nodes=tuple(other if each is node else each for each in graph.nodes))
    writes = ops(fusion.fuse_rope_writes(odd)).count("rope_write")
    assert writes == ops(fusion.fuse_rope_writes(graph)).count("rope_write") - 1


@pytest.mark.parametrize("swapped", [False, True])
def test_a_gate_is_fused_on_either_side_of_the_product(swapped: bool) -> None:
    builder = GraphBuilder()
    builder.input("x", ("T", 8))
    for name in ("gate", "up"):
        builder.weight(f"{name}.weight", 6, 8)
        builder.add("linear", name, ["x"], [f"{name}.weight"])
    builder.add("gelu", "act", ["gate"])
    sides = ["up", "act"] if swapped else ["act", "up"]
    graph = builder.build(builder.add("mul", "out", sides))
    (node,) = fusion.fuse(graph).nodes
    assert node.weights == ("gate.weight", "up.weight")
    assert node.attributes.gated and node.attributes.activation == "gelu"
    rng = np.random.default_rng(0)
    x, gate, up = (rng.normal(size=size).astype(np.float32) for size in ((3, 8), (6, 8), (6, 8)))
    expected = OPS["gelu"].reference(NoAttributes(), [x @ gate.T], []) * (x @ up.T)
    found = OPS[node.op].reference(node.attributes, [x], [gate, up])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_matmuls_of_different_inputs_are_not_stacked() -> None:
    """Gate and up read different values here, so one pass over the rows cannot serve both."""
    builder = GraphBuilder()
    for name in ("x", "y"):
        builder.input(name, ("T", 8))
    builder.weight("gate.weight", 6, 8)
    builder.weight("up.weight", 6, 8)
    builder.add("linear", "gate", ["x"], ["gate.weight"])
    builder.add("linear", "up", ["y"], ["up.weight"])
    builder.add("silu", "act", ["gate"])
    graph = builder.build(builder.add("mul", "out", ["act", "up"]))
    assert "mul" in ops(fusion.fuse(graph))


def test_joined_name_merges_the_last_parts() -> None:
    assert fusion.joined_name(["layers.0.mlp.gate", "layers.0.mlp.up"]) == "layers.0.mlp.gate_up"
    assert fusion.joined_name(["a", "b.c"]) == "a_b.c"
    assert fusion.joined_name(["only.one"]) == "only.one"
