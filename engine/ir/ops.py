"""The table of ops, from which graphs are built. An entry has the op's shape inference, its numpy
reference, the tolerances of kernels, test examples, and the cost.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from engine.ir import attributes as attrs
from engine.ir import examples, recurrent, reference, shapes
from engine.ir.plan import Routing
from engine.ir.types import (
    Array,
    Cost,
    Counts,
    Examples,
    Infer,
    Numerics,
    Op,
    OpTolerance,
    Price,
    Reference,
    Value,
)

Arrays = Sequence[Array]
Values = Sequence[Value]

# Tolerances of ops that always compute in float32, whatever the storage type of weights and cache.
_FLOAT: Mapping[Numerics, OpTolerance] = {
    "f32": OpTolerance(2e-5),
    "int8": OpTolerance(2e-5),
    "bf16": OpTolerance(2e-5),
    "int8_outliers": OpTolerance(2e-5),
}
# Tolerances of matmuls. int8 kernels quantize activations in groups of 32 with one scale each. bf16
# kernels round both factors to 8 significant bits. int8_outliers kernels are int8 kernels that keep
# a value in float if it has more than half of its group's sum of squares.
_MATMUL: Mapping[Numerics, OpTolerance] = {
    "f32": OpTolerance(5e-5),
    "int8": OpTolerance(5e-2),
    "bf16": OpTolerance(2e-2),
    "int8_outliers": OpTolerance(5e-2),
}
# Tolerances of stored keys and values. Rounding changes an int8 value by at most 1/254 of the
# largest absolute value, and a bfloat16 value by at most 2 ** -9 of itself.
_STORED: Mapping[Numerics, OpTolerance] = {
    "f32": OpTolerance(0.0),
    "int8": OpTolerance(2e-2),
    "bf16": OpTolerance(2e-2),
}
_ATTENDED: Mapping[Numerics, OpTolerance] = {
    "f32": OpTolerance(5e-5),
    "int8": OpTolerance(8e-2),
    "bf16": OpTolerance(3e-2),
}


def _moved(inputs: Values, weights: Values, out: Value, counts: Counts) -> int:
    """Bytes that an op reads and writes, if all its tensors are float32."""
    return 4 * sum(map(counts.size, (*inputs, *weights, out)))


def _per_value(infer: Infer, flops: int) -> Price:
    """Cost of an op with a fixed number of FLOPs per element of its first input."""

    def cost(attributes: Any, inputs: Values, weights: Values, counts: Counts) -> Cost:
        out = infer(attributes, inputs, weights)
        return Cost(flops * counts.size(inputs[0]), _moved(inputs, weights, out, counts))

    return cost


def _lookup(infer: Infer) -> Price:
    """Cost of a table lookup. Only the requested rows of the table are read."""

    def cost(attributes: Any, inputs: Values, weights: Values, counts: Counts) -> Cost:
        out = infer(attributes, inputs, weights)
        size = counts.size(out)
        return Cost(
            (len(weights) - 1) * size if weights else 0, 4 * (max(1, len(weights)) + 1) * size
        )

    return cost


def _matmul(infer: Infer) -> Price:
    def cost(attributes: Any, inputs: Values, weights: Values, counts: Counts) -> Cost:
        out = infer(attributes, inputs, weights)
        matrices = [weight for weight in weights if len(weight.shape) == 2]
        flops = 2 * counts.size(Value(inputs[0].shape[:1])) * sum(map(counts.size, matrices))
        return Cost(flops, _moved(inputs, weights, out, counts))

    return cost


def _by_heads(
    attributes: attrs.HeadLinear, inputs: Values, weights: Values, counts: Counts
) -> Cost:
    out = shapes.head_linear(attributes, inputs, weights)
    flops = 2 * counts.size(Value(inputs[0].shape[:1])) * counts.size(weights[0])
    return Cost(flops, _moved((inputs[0],), weights, out, counts))


def _latent_written(attributes: attrs.LatentWrite, _: Values, __: Values, counts: Counts) -> Cost:
    width = attributes.rank + attributes.rope_dim
    flops = 4 * attributes.rank + 3 * attributes.rope_dim
    return Cost(counts.tokens * flops, 8 * counts.tokens * width)


def _written(attributes: attrs.KvWrite, _: Values, __: Values, counts: Counts) -> Cost:
    return Cost(0, 16 * counts.tokens * attributes.kv_heads * attributes.head_dim)


def _rope_written(attributes: attrs.RopeWrite, _: Values, __: Values, counts: Counts) -> Cost:
    width = (attributes.heads + attributes.kv_heads) * attributes.head_dim
    stored = 2 * attributes.kv_heads * attributes.head_dim
    flops = 3 * (attributes.heads + attributes.kv_heads) * attributes.rope_dim
    return Cost(counts.tokens * flops, 4 * counts.tokens * (2 * width + 2 * stored))


def _attended(attributes: attrs.AttentionAttributes, _: Values, __: Values, counts: Counts) -> Cost:
    width = attributes.heads * (attributes.head_dim + attributes.value_dim)
    seen = min(counts.context, attributes.window or counts.context)
    parts = 1 if attributes.latent else 2
    known = parts * counts.sequences * seen * attributes.kv_heads * attributes.head_dim
    return Cost(2 * counts.tokens * seen * width, 4 * (counts.tokens * width + known))


def _projected(attributes: attrs.Projection, inputs: Arrays, weights: Arrays) -> Array:
    norms, parts = attributes.norm_weights, attributes.parts
    x = inputs[0]
    if attributes.norm == "rms":
        x = reference.rms_norm(x, weights[0], attributes.eps)
    elif attributes.norm == "layer":
        bias = weights[1] if attributes.norm_bias else None
        x = reference.layer_norm(x, weights[0], bias, attributes.eps)
    matrices, biases = weights[norms : norms + parts], weights[norms + parts :]
    out = reference.projection(x, matrices, biases, attributes.activation, attributes.gated)
    out = out if attributes.scale == 1 else out * np.float32(attributes.scale)
    out = out if attributes.softcap is None else reference.softcap(out, attributes.softcap)
    return out + inputs[1] if attributes.residual else out


def _embedded(attributes: attrs.Lookup, inputs: Arrays, weights: Arrays) -> Array:
    rows = reference.embed(weights[0], inputs[0]) * np.float32(attributes.scale)
    for ids, table in zip(inputs[1:], weights[1:], strict=True):
        rows = rows + reference.embed(table, ids)
    return rows


def _rope_wrote(attributes: attrs.RopeWrite, inputs: Arrays, weights: Arrays) -> Array:
    norms = list(weights)
    q_norm = norms.pop(0) if attributes.q_norm else None
    k_norm = norms.pop(0) if attributes.k_norm else None
    rotations = (inputs[1], inputs[2]) if attributes.rope_dim else None
    cache, slots = inputs[-2:]
    return reference.rope_write(
        inputs[0], attributes.heads, cache, slots, rotations, (q_norm, k_norm), attributes.eps
    )


def _attend(attributes: attrs.AttentionAttributes, inputs: Arrays, weights: Arrays) -> Array:
    queries = inputs[0][:, : attributes.heads * attributes.head_dim]
    cache, positions, row_of, tables, *ends = inputs[1:]
    scale, window, exponent = attributes.scale, attributes.window, attributes.alibi_bias
    slopes = None if exponent is None else reference.alibi_slopes(attributes.heads, exponent)
    sinks = weights[0] if weights else None
    rules = reference.ScoreRules(attributes.softcap, slopes, sinks, attributes.centered)
    return reference.paged_attention(
        queries,
        cache,
        positions,
        row_of,
        tables,
        scale,
        window,
        rules,
        ends[0] if ends else None,
        attributes.latent,
    )


def _head_results(attributes: attrs.HeadLinear, inputs: Arrays, weights: Arrays) -> Array:
    rotations = (inputs[1], inputs[2]) if attributes.rope_dim else None
    return reference.head_linear(inputs[0], weights[0], rotations)


def _latent_wrote(attributes: attrs.LatentWrite, inputs: Arrays, weights: Arrays) -> Array:
    x, cosines, sines, cache, slots = inputs
    eps = attributes.eps
    return reference.latent_write(x, weights[0], eps, (cosines, sines), cache, slots)


def _expert_sum(attributes: attrs.Experts, inputs: Arrays, weights: Arrays) -> Array:
    x, chosen = inputs[:2]
    out = reference.experts(x, chosen, weights[:3], weights[3:], attributes.activation)
    out = out * np.float32(attributes.scale)
    return out + inputs[2] if attributes.residual else out


def _expert_cost(
    attributes: attrs.Experts, inputs: Values, weights: Values, counts: Counts
) -> Cost:
    """The cost of a mixture of experts. It reads the experts that at least one token chooses."""
    matrices, experts = sum(map(counts.size, weights[:3])), counts.size(Value(weights[0].shape[:1]))
    chosen = counts.size(Value(inputs[0].shape[:1])) * attributes.per_token
    read = matrices * min(chosen, experts) // experts
    moved = _moved(inputs, (), inputs[0], counts)
    return Cost(2 * chosen * matrices // experts, moved + 4 * read)


def _recurrent(mixer: Literal["conv", "mamba2", "delta"]) -> Op:
    name, generate = recurrent.OP_NAMES[mixer], recurrent.examples(mixer)
    kind = recurrent.Recurrence
    return Op(name, kind, recurrent.infer, recurrent.compute, _FLOAT, generate, recurrent.cost)


def _activation(name: str, flops: int) -> Op:
    apply = reference.ACTIVATIONS[name]
    return _plain(name, shapes.same, lambda _, x, w: apply(x[0]), examples.elementwise(1), flops)


def _plain(
    name: str,
    infer: Callable[[Any, Values, Values], Value],
    compute: Reference,
    generate: Examples,
    flops: int,
    kind: type = attrs.NoAttributes,
) -> Op:
    return Op(name, kind, infer, compute, _FLOAT, generate, _per_value(infer, flops))


def _row(
    name: str,
    infer: Callable[[Any, Values, Values], Value],
    compute: Reference,
    generate: Examples,
    price: Price,
    tolerances: Mapping[Numerics, OpTolerance] = _FLOAT,
    kind: type = attrs.NoAttributes,
) -> Op:
    return Op(name, kind, infer, compute, tolerances, generate, price)


# fmt: off
_ROWS = (
    _row("embed", shapes.embed, _embedded, examples.embed, _lookup(shapes.embed),
         kind=attrs.Lookup),
    _row("position_embed", shapes.embed, lambda _, x, w: reference.embed(w[0], x[0]),
         examples.position_embed, _lookup(shapes.embed)),
    _row("type_embed", shapes.embed, lambda _, x, w: reference.embed(w[0], x[0]),
         examples.position_embed, _lookup(shapes.embed)),
    _plain("add", shapes.pair, lambda _, x, w: x[0] + x[1], examples.elementwise(2), 1),
    _plain("mul", shapes.pair, lambda _, x, w: x[0] * x[1], examples.elementwise(2), 1),
    _plain("scale", shapes.same, lambda a, x, w: x[0] * np.float32(a.factor), examples.scale, 1,
           attrs.Scale),
    _activation("silu", 4),
    _activation("gelu", 4),
    _activation("gelu_tanh", 8),
    _activation("relu2", 2),
    _plain("softcap", shapes.same, lambda a, x, w: reference.softcap(x[0], a.cap),
           examples.softcap, 8, attrs.Softcap),
    _row("linear", shapes.linear, lambda _, x, w: reference.linear(x[0], *w),
         examples.linear, _matmul(shapes.linear), _MATMUL),
    _plain("rms_norm", shapes.rms_norm, lambda a, x, w: reference.rms_norm(x[0], w[0], a.eps),
           examples.rms_norm, 4, attrs.Normalize),
    _plain("layer_norm", shapes.normalize,
           lambda a, x, w: reference.layer_norm(x[0], w[0], w[1] if len(w) > 1 else None, a.eps),
           examples.layer_norm, 7, attrs.Normalize),
    _plain("head_norm", shapes.head_norm,
           lambda a, x, w: reference.head_norm(x[0], w[0], a.eps, a.head_dim),
           examples.head_norm, 4, attrs.HeadNorm),
    _plain("rope", shapes.rope, lambda a, x, w: reference.rope_rows(x[0], x[1], x[2], a.head_dim),
           examples.rope, 3, attrs.Rope),
    _plain("columns", shapes.columns, lambda a, x, w: x[0][:, a.start : a.stop],
           examples.columns, 0, attrs.Columns),
    _row("kv_write", shapes.kv_write, lambda a, x, w: reference.kv_write(*x),
         examples.kv_write, _written, _STORED, attrs.KvWrite),
    _row("attention", shapes.attention, _attend, examples.attention, _attended, _ATTENDED,
         attrs.AttentionAttributes),
    _row("head_linear", shapes.head_linear, _head_results, examples.head_linear, _by_heads, _MATMUL,
         attrs.HeadLinear),
    _row("latent_write", shapes.latent_write, _latent_wrote, examples.latent_write,
         _latent_written, kind=attrs.LatentWrite),
    _plain("route", shapes.route, lambda a, x, w: reference.route(x[0], a, *w), examples.route, 8,
           Routing),
    _row("experts", shapes.experts, _expert_sum, examples.experts, _expert_cost, _MATMUL,
         attrs.Experts),
    _plain("gate_rows", shapes.gate_rows, lambda _, x, w: x[0] * reference.sigmoid(x[1]),
           examples.gate_rows, 1),
    _recurrent("conv"),
    _recurrent("mamba2"),
    _recurrent("delta"),
    _row("gather_rows", shapes.gather_rows, lambda _, x, w: x[0][x[1]],
         examples.gather_rows, _lookup(shapes.gather_rows)),
    _plain("mean_rows", shapes.gather_rows, lambda _, x, w: reference.mean_rows(x[0], x[1]),
           examples.mean_rows, 1),
    # The ops below are not in a model's own graph. Only the passes of fusion.py create them.
    _row("embed_positions", shapes.embed_positions, _embedded, examples.embed_positions,
         _lookup(shapes.embed_positions), kind=attrs.Lookup),
    _row("projection", shapes.projection, _projected, examples.projection,
         _matmul(shapes.projection), _MATMUL, attrs.Projection),
    _plain("add_norm", shapes.add_norm,
           lambda a, x, w: x[1] + reference.rms_norm(x[0], w[0], a.eps),
           examples.add_norm, 5, attrs.Normalize),
    _row("rope_write", shapes.rope_write, _rope_wrote, examples.rope_write, _rope_written,
         kind=attrs.RopeWrite),
)
# fmt: on

OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _ROWS})
