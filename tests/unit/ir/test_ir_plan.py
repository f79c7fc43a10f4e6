"""Plans: steps, places, split matrices, buckets, costs, and their executor."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np
import pytest

from engine.architectures.base import ModelConfig
from engine.ir.cost import PlanCost
from engine.ir.execute import ReferenceBatch, State, run_graph, run_plan
from engine.ir.graph import Graph, GraphError
from engine.ir.liveness import ArenaPlace, Life, assign_places, lives, touched
from engine.ir.models.decoder import build_graph
from engine.ir.plan import (
    AttentionStep,
    Capacity,
    ExecutionPlan,
    GatherStep,
    LinearStep,
    Machine,
    RopeWriteStep,
)
from engine.ir.planner import plan, plan_cache, token_buckets
from engine.ir.reference import F32
from engine.ir.types import Counts
from tests.support.references.ir_driver import (
    CONFIGS,
    Driver,
    Forward,
    new_state,
    random_weights,
    text,
)

CAPACITY = Capacity(tokens=64, logits=64)
TWO = Machine(threads=2)
TOLERANCE = 1e-4
LENGTHS = (19, 3, 1, 8)


def planned(config: ModelConfig, layout_of: Callable[[str], str]) -> ExecutionPlan:
    return plan(build_graph(config), CAPACITY, TWO, layout_of)


def one_layout(name: str) -> str:
    return "F32"


def runner(config: ModelConfig, made: ExecutionPlan | None = None) -> Forward:
    """The plan's executor, or the graph's when there is no plan."""
    graph = build_graph(config)
    weights = random_weights(graph)

    def forward(batch: ReferenceBatch, state: State) -> F32:
        if made is None:
            return run_graph(graph, weights, batch, state)
        return run_plan(made, weights, batch, state)

    return forward


def whole_logits(forward: Forward, config: ModelConfig, tokens: list[int]) -> F32:
    driver = Driver(forward, new_state(config))
    return driver.step([(driver.add(tokens), len(tokens))], every_token=True)


def linears(made: ExecutionPlan) -> list[LinearStep]:
    return [step for step in made.steps if isinstance(step, LinearStep)]


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def test_plan_logits_equal_graph_logits(config: ModelConfig) -> None:
    tokens = text(23)
    expected = whole_logits(runner(config), config, tokens)
    found = whole_logits(runner(config, planned(config, one_layout)), config, tokens)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunked_prefill_equals_whole_prefill(config: ModelConfig, chunk: int) -> None:
    forward, tokens = runner(config, planned(config, one_layout)), text(23)
    expected = whole_logits(forward, config, tokens)
    driver = Driver(forward, new_state(config))
    track = driver.add(tokens)
    while track.num_computed < len(tokens):
        count = min(chunk, len(tokens) - track.num_computed)
        logits = driver.step([(track, count)])
        np.testing.assert_allclose(logits[0], expected[track.num_computed - 1], atol=TOLERANCE)


def test_a_mixed_batch_equals_each_sequence_alone(config: ModelConfig) -> None:
    forward = runner(config, planned(config, one_layout))
    driver = Driver(forward, new_state(config))
    texts = [text(length, seed) for seed, length in enumerate(LENGTHS)]
    tracks = [driver.add(each) for each in texts]
    driver.step([(tracks[3], 7), (tracks[0], 11)])
    logits = driver.step([(tracks[1], 3), (tracks[3], 1), (tracks[2], 1), (tracks[0], 8)])
    for row, index in enumerate((1, 3, 2, 0)):
        alone = whole_logits(forward, config, texts[index])[-1]
        np.testing.assert_allclose(logits[row], alone, atol=TOLERANCE)


def test_a_decoder_layer_is_six_plan_steps() -> None:
    made = planned(CONFIGS["qwen3"], one_layout)
    kinds = [type(step).__name__.removesuffix("Step") for step in made.steps]
    attention, rest = ["Linear", "RopeWrite", "Attention"], ["Linear", "Linear", "Linear"]
    wanted = ["Gather", "Gather"]  # heads and stream
    assert kinds == ["Embed", *attention, *rest, *attention, *wanted, *rest, "Linear"]
    qkv, out, gate_up, down = linears(made)[:4]
    assert qkv.norm is not None and qkv.norm.weight == "layers.0.attn_norm.weight"
    assert out.residual and down.residual and out.out == down.out == 0
    assert gate_up.gated and gate_up.activation == "silu"
    rope = made.steps[2]
    assert isinstance(rope, RopeWriteStep) and rope.q_norm == "layers.0.attn.q_norm.weight"
    assert isinstance(made.steps[3], AttentionStep) and made.steps[3].qkv == qkv.out


def test_the_plan_lists_every_weight(config: ModelConfig) -> None:
    graph = build_graph(config)
    made = planned(config, one_layout)
    assert sorted(made.weights) == sorted(graph.weights)
    parts = [name for matrix in made.matrices for name in (*matrix.parts, *matrix.biases)]
    assert sorted([*parts, *made.vectors]) == sorted(graph.weights), "each in one place"
    for matrix in made.matrices:
        shapes = [graph.weights[part].shape for part in matrix.parts]
        assert matrix.rows == sum(int(shape[0]) for shape in shapes)
        assert {shape[1] for shape in shapes} == {matrix.columns}
        assert len(matrix.biases) in (0, len(matrix.parts))


def test_a_tied_lm_head_shares_the_embedding_matrix() -> None:
    made = planned(CONFIGS["llama"], one_layout)
    assert linears(made)[-1].matrix == "embed.weight"
    assert [matrix.name for matrix in made.matrices].count("embed.weight") == 1


def layout_by_name(*odd: str) -> Callable[[str], str]:
    return lambda name: "odd" if any(each in name for each in odd) else "even"


@pytest.mark.parametrize(
    ("odd", "matrices"),
    [
        (("attn.v",), ["q_k", "v"]),
        (("attn.q",), ["q", "k_v"]),
        (("attn.k",), ["q", "k", "v"]),
    ],
)
def test_q_k_v_of_different_layouts_get_separate_steps(
    odd: tuple[str, ...], matrices: list[str]
) -> None:
    config = CONFIGS["qwen2"]
    made = planned(config, layout_by_name(*odd))
    first = [step for step in linears(made) if step.out == linears(made)[0].out]
    assert [step.matrix for step in first] == [f"layers.0.attn.{name}.weight" for name in matrices]
    widths = {"q": 48, "k": 24, "v": 24}
    starts = [sum(widths[p] for m in matrices[:i] for p in m.split("_")) for i in range(len(first))]
    assert [step.column for step in first] == starts
    assert all(step.has_bias and step.norm == first[0].norm for step in first)
    tokens = text(9)
    expected = whole_logits(runner(config), config, tokens)
    found = whole_logits(runner(config, made), config, tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_gate_and_up_of_different_layouts_get_separate_steps() -> None:
    config = CONFIGS["mistral"]
    made = planned(config, layout_by_name("mlp.up"))
    first_layer = ("layers.0.mlp.gate", "layers.0.mlp.up")
    gate, up = (step for step in linears(made) if step.matrix.startswith(first_layer))
    assert (gate.activation, gate.multiply, gate.gated) == ("silu", False, False)
    assert (up.activation, up.multiply, up.gated) == ("none", True, False)
    assert gate.out == up.out and gate.has_bias and up.has_bias
    tokens = text(9)
    expected = whole_logits(runner(config), config, tokens)
    found = whole_logits(runner(config, made), config, tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_no_two_live_buffers_share_arena_memory(config: ModelConfig) -> None:
    made = planned(config, layout_by_name("attn.v", "mlp.up"))
    alive = [
        [i for i, step in enumerate(made.steps) if number in touched(step)]
        for number in range(len(made.buffers))
    ]
    alive[made.output].append(len(made.steps))
    for (one, first), (other, second) in combinations(enumerate(made.buffers), 2):
        if first.place == second.place:
            assert first.per == second.per
            assert max(alive[one]) < min(alive[other]) or max(alive[other]) < min(alive[one])
    for buffer in made.buffers:
        assert buffer.width <= made.places[buffer.place]


@pytest.mark.parametrize(
    ("other", "meets"),
    [((0, 3), False), ((0, 4), True), ((5, 6), True), ((8, 9), True), ((9, 9), False)],
)
def test_buffer_lifetimes_that_meet_in_one_step_overlap(
    other: tuple[int, int], meets: bool
) -> None:
    life = Life(4, 8)
    assert life.overlaps(Life(*other)) == Life(*other).overlaps(life) == meets


def test_the_output_buffer_lives_until_the_last_step() -> None:
    steps = (GatherStep((), source=0, out=1), GatherStep((), source=0, out=2))
    assert lives(steps, 3, output=1) == (Life(0, 1), Life(0, 1), Life(1, 1))


def test_the_arena_is_as_small_as_the_live_buffers_allow() -> None:
    """The hidden state, the wider of qkv and the feed-forward values, and the heads' outputs."""
    config = CONFIGS["llama"]
    made = planned(config, one_layout)
    widest = max(config.intermediate_size, 8 * config.head_dim)
    heads = config.num_heads * config.head_dim
    assert made.floats_per("token") == config.hidden_size + widest + heads
    assert made.floats_per("logit") == config.hidden_size + config.vocab_size
    assert made.arena_floats == 64 * (made.floats_per("token") + made.floats_per("logit"))
    deep = planned(replace(config, num_layers=7), one_layout)
    assert deep.places == made.places


@pytest.mark.parametrize("seed", range(30))
def test_random_buffer_lifetimes_never_collide(seed: int) -> None:
    rng = np.random.default_rng(seed)
    firsts = rng.integers(0, 30, 25)
    spans = [Life(int(f), int(f + n)) for f, n in zip(firsts, rng.integers(0, 9, 25), strict=True)]
    rooms = [
        ArenaPlace(int(width), "token" if kind else "logit")
        for width, kind in zip(rng.integers(1, 50, 25), rng.integers(0, 2, 25), strict=True)
    ]
    chosen, widths = assign_places(rooms, spans)
    for one, other in combinations(range(25), 2):
        if chosen[one] == chosen[other]:
            assert not spans[one].overlaps(spans[other])
            assert rooms[one].per == rooms[other].per
    assert all(room.width <= widths[place] for room, place in zip(rooms, chosen, strict=True))
    for kind in ("token", "logit"):
        mine = [life for life, room in zip(spans, rooms, strict=True) if room.per == kind]
        most = max(sum(life.first <= at <= life.last for life in mine) for at in range(40))
        places = {place for place, room in zip(chosen, rooms, strict=True) if room.per == kind}
        assert len(places) == most, "as many places as buffers that are alive at once"


def test_an_unsupported_node_is_named_by_the_planner() -> None:
    graph = build_graph(CONFIGS["llama"])
    broken = _with_extra_activation(graph)
    with pytest.raises(GraphError, match="odd: silu: is part of no fusion"):
        plan(broken, CAPACITY, TWO)


def _with_extra_activation(graph: Graph) -> Graph:
    """An activation on the hidden state, which no family has."""
    wanted = graph.node("layers.1.wanted")
    odd = msgspec.structs.replace(
        wanted, name="odd", op="silu", inputs=(wanted.inputs[0],), value=graph.node("embed").value
    )
    changed = msgspec.structs.replace(wanted, inputs=("odd", wanted.inputs[1]))
    nodes = [
        each for node in graph.nodes for each in ((odd, changed) if node is wanted else (node,))
    ]
    return msgspec.structs.replace(graph, nodes=tuple(nodes))


def test_a_step_beyond_the_capacity_is_refused() -> None:
    config = CONFIGS["llama"]
    forward = runner(config, plan(build_graph(config), Capacity(8, 1), TWO))
    driver = Driver(forward, new_state(config))
    with pytest.raises(ValueError, match="exceeds"):
        driver.step([(driver.add(text(9)), 9)])


def test_token_buckets_grow_by_a_factor_of_eight() -> None:
    assert token_buckets(1) == (1,)
    assert token_buckets(8) == (1, 8)
    assert token_buckets(300) == (1, 8, 64, 300)
    assert token_buckets(2048) == (1, 8, 64, 512, 2048)
    assert token_buckets(9000) == (1, 8, 64, 512, 2048, 8192, 9000)


def test_plans_are_made_once_per_bucket() -> None:
    graph = build_graph(CONFIGS["llama"])
    made = []

    def layout_of(name: str) -> str:
        made.append(name)
        return one_layout(name)

    plans = plan_cache(graph, TWO, max_tokens=512, max_logits=32, layout_of=layout_of)
    assert not made, "nothing is planned before it is asked for"
    small = plans.get(2, 1)
    assert small == plan(graph, Capacity(8, 8), TWO)
    asked = len(made)
    assert plans.get(8, 8) is small and len(made) == asked
    assert plans.get(9, 1) is plans.get(64, 32)
    assert plans.get(9, 1).capacity == Capacity(64, 32)
    assert plans.get(1, 0).capacity == Capacity(1, 1)
    assert plans.get(512, 32).capacity == Capacity(512, 32)
    for tokens, logits in ((0, 0), (513, 1), (64, 33), (4, 5)):
        with pytest.raises(ValueError, match="not within"):
            plans.get(tokens, logits)


def test_costs_of_a_decode_step_follow_the_weights_and_context() -> None:
    config = CONFIGS["qwen2"]
    graph, made = build_graph(config), planned(config, one_layout)
    sizes = {name: int(np.prod(value.shape)) for name, value in graph.weights.items()}
    cost = PlanCost(made, lambda name: sizes[name], kv_value_bytes=2)
    total = cost.total(Counts(tokens=1, logits=1, context=50))
    rows = config.hidden_size  # of the embedding, one
    assert total.weight_bytes == sum(sizes.values()) - sizes["embed.weight"] + rows
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert total.kv_bytes == 2 * kv * 50 + 2 * kv
    matrices = sum(m.rows * m.columns for m in made.matrices if m.name != "embed.weight")
    attention = 4 * 50 * config.num_layers * config.num_heads * config.head_dim
    rope = 3 * config.num_layers * (config.num_heads + config.num_kv_heads) * config.head_dim
    assert total.flops == 2 * matrices + attention + rope
    assert total.bytes == total.weight_bytes + total.kv_bytes + total.activation_bytes
    steps = cost.steps(Counts(tokens=1, logits=1, context=50))
    assert sum(step.flops for step in steps) == total.flops


def test_plan_costs_grow_with_rows_while_weights_are_read_once() -> None:
    made = planned(CONFIGS["mistral"], one_layout)
    cost = PlanCost(made, lambda name: 1000, kv_value_bytes=4)
    one = cost.total(Counts(1, 1, context=3))
    many = cost.total(Counts(16, 16, context=3, sequences=16))
    embedding = cost.step(made.steps[0], Counts(16, 16)).weight_bytes
    first = cost.step(made.steps[0], Counts(1, 1)).weight_bytes
    assert many.weight_bytes - embedding == one.weight_bytes - first
    assert many.flops == 16 * one.flops
    assert many.activation_bytes == 16 * one.activation_bytes
    assert many.kv_bytes == 16 * one.kv_bytes
    window = CONFIGS["mistral"].sliding_window
    assert window is not None
    assert cost.total(Counts(1, 1, context=window)) == cost.total(Counts(1, 1, context=10 * window))
    assert cost.total(Counts(4, 0)).weight_bytes < cost.total(Counts(4, 1)).weight_bytes
