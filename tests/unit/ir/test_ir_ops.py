"""The op table: every row's examples, shapes, reference, tolerances and costs agree."""

from collections.abc import Iterator

import numpy as np
import pytest

from engine.ir import reference
from engine.ir.attributes import attribute_fault
from engine.ir.ops import OPS
from engine.ir.types import Array, Counts, Op, OpExample, OpTolerance, Value

KINDS = {"float32": "f32", "int32": "i32", "int64": "i64"}
PROMISED = {
    *("embed", "position_embed", "add", "linear", "rms_norm", "layer_norm", "head_norm", "rope"),
    *("kv_write", "attention", "silu", "gelu", "gelu_tanh", "mul", "gather_rows"),
    *("scale", "add_norm", "relu2", "softcap", "route", "experts", "gate_rows"),
    *("head_linear", "latent_write"),
}


def examples(op: Op, seed: int = 0) -> Iterator[OpExample]:
    return op.examples(np.random.default_rng(seed))


def value(array: Array) -> Value:
    return Value(array.shape, KINDS[array.dtype.name])


def test_the_op_table_has_every_op() -> None:
    assert OPS.keys() >= PROMISED
    assert all(name == op.name for name, op in OPS.items())


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_inferred_shapes_equal_the_reference_results(op: Op) -> None:
    seen = set()
    for example in examples(op):
        assert attribute_fault(example.attributes, op.attributes) is None
        inferred = op.infer(
            example.attributes,
            [value(each) for each in example.inputs],
            [value(each) for each in example.weights],
        )
        result = op.reference(example.attributes, example.inputs, example.weights)
        assert value(result) == inferred
        assert np.isfinite(result).all()
        seen.add(result.shape)
    assert len(seen) > 1, "one shape tells little"


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_op_examples_are_reproducible_by_seed(op: Op) -> None:
    for first, second in zip(examples(op, 7), examples(op, 7), strict=True):
        assert first.attributes == second.attributes
        pairs = zip(first.inputs + first.weights, second.inputs + second.weights, strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_tolerances_reject_a_relevant_error(op: Op) -> None:
    """A tenth of the values' size is refused by every numerics of every op."""
    rng = np.random.default_rng(3)
    for example in examples(op):
        result = op.reference(example.attributes, example.inputs, example.weights)
        wrong = result.copy()
        flat = wrong.reshape(-1)
        flat[rng.integers(flat.size)] += 0.1 * np.sqrt(np.mean(np.square(result)))
        for tolerance in op.tolerances.values():
            assert tolerance.accepts(result, result)
            assert not tolerance.accepts(wrong, result)


def test_tolerance_rejects_nonfinite_values() -> None:
    expected = np.ones((2, 3), np.float32)
    for bad in (np.nan, np.inf):
        wrong = expected.copy()
        wrong[1, 2] = bad
        assert not OpTolerance(1e6).accepts(wrong, expected)
    assert not OpTolerance(1.0).accepts(expected[:1], expected)


def test_linear_costs_two_flops_per_weight_and_token() -> None:
    op = OPS["linear"]
    values = [Value(("T", 64))], [Value((128, 64)), Value((128,))]
    cost = op.cost(None, *values, Counts(tokens=5, logits=1))
    assert cost.flops == 2 * 5 * 64 * 128
    assert cost.bytes == 4 * (5 * 64 + 128 * 64 + 128 + 5 * 128)


def test_embedding_cost_counts_only_the_rows_read() -> None:
    cost = OPS["embed"].cost(
        None, [Value(("T",), "i32")], [Value((10_000, 64))], Counts(tokens=3, logits=1)
    )
    assert (cost.flops, cost.bytes) == (0, 4 * 2 * 3 * 64)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_op_cost_grows_with_tokens(op: Op) -> None:
    """Generated values have numbers for T, so the letter is put back first."""
    example = next(examples(op))
    rows = len(example.inputs[0]) if op.name != "kv_write" else len(example.inputs[1])

    def lettered(array: Array) -> Value:
        plain = value(array)
        if array.ndim <= 2 and len(array) == rows:
            return Value(("T", *plain.shape[1:]), plain.dtype)
        return plain

    inputs = [lettered(each) for each in example.inputs]
    if op.name == "gather_rows":
        inputs[1] = Value(("R",), "i32")
    weights = [value(each) for each in example.weights]
    costs = [
        op.cost(example.attributes, inputs, weights, Counts(n, n, context=100)) for n in (1, 50)
    ]
    assert costs[0].bytes < costs[1].bytes
    assert costs[0].flops <= costs[1].flops


def test_reference_attention_matches_a_hand_computed_example() -> None:
    """Two keys, one query head: softmax of two scores; the window hides the older key."""
    q = np.array([[[1.0, 0.0]]], np.float32)
    k = np.array([[[2.0, 0.0]], [[0.0, 5.0]]], np.float32)
    v = np.array([[[10.0, 0.0]], [[0.0, 10.0]]], np.float32)
    at = np.array([1], np.int32)
    out = reference.attention(q, k, v, at, scale=0.5)
    share = np.e / (np.e + 1)
    np.testing.assert_allclose(out[0, 0], [10 * share, 10 * (1 - share)], rtol=1e-6)
    out = reference.attention(q, k, v, at, scale=0.5, window=1)
    np.testing.assert_allclose(out[0, 0], [0, 10], rtol=1e-6)


def test_paged_attention_equals_attention_of_each_sequence_alone() -> None:
    for example in examples(OPS["attention"]):
        attributes = example.attributes
        queries, cache, positions, row_of, tables, *ends = example.inputs
        together = OPS["attention"].reference(attributes, example.inputs, example.weights)
        rules = reference.ScoreRules(centered=attributes.centered)
        if attributes.sinks:
            slopes = reference.alibi_slopes(attributes.heads, attributes.alibi_bias)
            rules = reference.ScoreRules(attributes.softcap, slopes, example.weights[0])
        for row in range(len(tables)):
            mine = row_of == row
            length = positions[mine].max() + 1
            known = cache[tables[row]].reshape(-1, *cache.shape[2:])[:length]
            alone = reference.attention(
                queries[mine].reshape(mine.sum(), attributes.heads, -1),
                *(known[:, 0], known[:, -1, :, : attributes.value_dim], positions[mine]),
                *(attributes.scale, attributes.window, rules),
                *(each[mine] for each in ends),
            )
            np.testing.assert_array_equal(together[mine], alone.reshape(mine.sum(), -1))


def test_rope_keeps_vector_lengths_and_depends_only_on_distance() -> None:
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 1, 16)).astype(np.float32)
    frequencies = 0.3 ** np.arange(8)

    def turned(x: Array, position: int) -> Array:
        angles = position * frequencies[None]
        return reference.rope(x, np.cos(angles), np.sin(angles))[0, 0]

    assert np.linalg.norm(turned(q, 9)) == pytest.approx(np.linalg.norm(q), rel=1e-6)
    near = turned(q, 7) @ turned(k, 3)
    far = turned(q, 107) @ turned(k, 103)
    assert near == pytest.approx(far, rel=1e-5)
    assert abs(near - turned(q, 7) @ turned(k, 4)) > 1e-3
