"""Shape inference. For each op, a function returns the shape and dtype of the op's result. It
raises `ShapeError` if the inputs or weights do not fit the op.
"""

from collections.abc import Sequence

from engine.ir.attributes import (
    AttentionAttributes,
    Columns,
    Experts,
    HeadLinear,
    HeadNorm,
    KvWrite,
    LatentWrite,
    Lookup,
    NoAttributes,
    Normalize,
    Projection,
    Rope,
    RopeWrite,
    Scale,
    Softcap,
)
from engine.ir.plan import Routing
from engine.ir.types import Dim, ShapeError, Value

Values = Sequence[Value]


def embed(_: Lookup | NoAttributes, inputs: Values, weights: Values) -> Value:
    (ids,), (table,) = _take(inputs, 1), _take(weights, 1, "weights")
    _need_integers(ids, 1, "ids")
    return Value((ids.shape[0], _table_width(table)))


def embed_positions(_: Lookup, inputs: Values, weights: Values) -> Value:
    """The shape of the sum of rows from two or three tables, by the ids of each."""
    if len(inputs) not in (2, 3):
        raise ShapeError(f"takes ids for 2 or 3 embedding tables, found {len(inputs)}")
    tables = _take(weights, len(inputs), "weights")
    first, *more = (
        embed(NoAttributes(), (ids,), (table,)) for ids, table in zip(inputs, tables, strict=True)
    )
    for each in more:
        _need_same(first, each)
    return first


def same(_: NoAttributes | Scale | Softcap, inputs: Values, weights: Values) -> Value:
    (value,) = _take(inputs, 1)
    _take(weights, 0, "weights")
    _rows(value)
    return value


def pair(_: NoAttributes, inputs: Values, weights: Values) -> Value:
    first, second = _take(inputs, 2)
    _take(weights, 0, "weights")
    _rows(first)
    _need_same(first, second)
    return first


def linear(_: NoAttributes, inputs: Values, weights: Values) -> Value:
    (source,) = _take(inputs, 1)
    if len(weights) not in (1, 2):
        raise ShapeError(f"takes a matrix and perhaps a bias, found {len(weights)} weights")
    rows, width = _rows(source)
    out = _matrix(weights[0], width)
    for bias in weights[1:]:
        _need_vector(bias, out, "bias")
    return Value((rows, out))


def normalize(_: Normalize, inputs: Values, weights: Values) -> Value:
    """The shape after an RMS norm or a layer norm. An RMS norm has one weight. A layer norm may
    also have a bias.
    """
    (source,) = _take(inputs, 1)
    if len(weights) not in (1, 2):
        raise ShapeError(f"takes a weight and perhaps a bias, found {len(weights)} weights")
    for weight in weights:
        _need_vector(weight, _rows(source)[1], "norm")
    return source


def rms_norm(attributes: Normalize, inputs: Values, weights: Values) -> Value:
    _take(weights, 1, "weights")
    return normalize(attributes, inputs, weights)


def add_norm(attributes: Normalize, inputs: Values, weights: Values) -> Value:
    source, stream = _take(inputs, 2)
    _need_same(source, stream)
    return rms_norm(attributes, (source,), weights)


def head_norm(attributes: HeadNorm, inputs: Values, weights: Values) -> Value:
    (source,), (weight,) = _take(inputs, 1), _take(weights, 1, "weights")
    _need_width(source, attributes.heads * attributes.head_dim, "heads")
    _need_vector(weight, attributes.head_dim, "norm")
    return source


def rope(attributes: Rope, inputs: Values, weights: Values) -> Value:
    source, cosines, sines = _take(inputs, 3)
    _take(weights, 0, "weights")
    _need_width(source, attributes.heads * attributes.head_dim, "heads")
    _need_rotations(source, cosines, sines, attributes.dim, attributes.head_dim)
    return source


def columns(attributes: Columns, inputs: Values, weights: Values) -> Value:
    (source,) = _take(inputs, 1)
    _take(weights, 0, "weights")
    rows, width = _rows(source)
    if not 0 <= attributes.start < attributes.stop <= width:
        raise ShapeError(f"columns [{attributes.start}, {attributes.stop}) are not within {width}")
    return Value((rows, attributes.stop - attributes.start))


def kv_write(attributes: KvWrite, inputs: Values, weights: Values) -> Value:
    cache, keys, values, slots = _take(inputs, 4)
    _take(weights, 0, "weights")
    _need_cache(cache, attributes.kv_heads, attributes.head_dim)
    _need_width(keys, attributes.kv_heads * attributes.head_dim, "kv heads")
    _need_same(keys, values)
    _need_slots(slots, keys)
    return cache


def attention(attributes: AttentionAttributes, inputs: Values, weights: Values) -> Value:
    """The shape of attention's output. In the first input, the first heads * head_dim columns are
    the queries, and all further columns are ignored.
    """
    if len(inputs) not in (5, 6):
        raise ShapeError(f"takes 5 inputs, or 6 with visible ends, found {len(inputs)}")
    queries, cache, positions, row_of, tables, *ends = inputs
    for sinks in _take(weights, int(attributes.sinks), "weights"):
        _need_vector(sinks, attributes.heads, "sinks")
    rows, width = _rows(queries)
    needed = attributes.heads * attributes.head_dim
    if attributes.latent and (attributes.kv_heads != 1 or attributes.latent > attributes.head_dim):
        raise ShapeError(f"no latent of {attributes.latent} values is part of the keys")
    if width < needed:
        raise ShapeError(f"{attributes.heads} heads need {needed} columns, found {queries}")
    if attributes.heads % attributes.kv_heads:
        raise ShapeError(f"{attributes.kv_heads} kv heads do not divide {attributes.heads} heads")
    _need_cache(cache, attributes.kv_heads, attributes.head_dim, 1 if attributes.latent else 2)
    for each, what in (
        (positions, "positions"),
        (row_of, "sequences"),
        *((e, "ends") for e in ends),
    ):
        _need_integers(each, 1, what)
        if each.shape[0] != rows:
            raise ShapeError(f"{what} {each} are not one for each row of {queries}")
    _need_integers(tables, 2, "block tables")
    return Value((rows, attributes.heads * attributes.value_dim))


def head_linear(attributes: HeadLinear, inputs: Values, weights: Values) -> Value:
    heads, rope_dim = attributes.heads, attributes.rope_dim
    source, *rotations = _take(inputs, 3 if rope_dim else 1)
    (matrix,) = _take(weights, 1, "weights")
    rows, width = _rows(source)
    if len(matrix.shape) != 3 or matrix.shape[0] != heads or matrix.dtype != "f32":
        raise ShapeError(f"the matrix {matrix} does not have {heads} heads")
    out, size = matrix.shape[1:]
    if not isinstance(out, int) or not isinstance(size, int) or width != heads * (size + rope_dim):
        raise ShapeError(f"the matrix {matrix} does not take heads of {source}")
    if rope_dim:
        _need_rotations(source, rotations[0], rotations[1], rope_dim, size + rope_dim)
    return Value((rows, heads * (out + rope_dim)))


def latent_write(attributes: LatentWrite, inputs: Values, weights: Values) -> Value:
    source, cosines, sines, cache, slots = _take(inputs, 5)
    (norm,) = _take(weights, 1, "weights")
    width = attributes.rank + attributes.rope_dim
    _need_width(source, width, "latent and key")
    _need_vector(norm, attributes.rank, "norm")
    _need_rotations(source, cosines, sines, attributes.rope_dim, width)
    _need_cache(cache, 1, width, 1)
    _need_slots(slots, source)
    return cache


def gather_rows(_: NoAttributes, inputs: Values, weights: Values) -> Value:
    source, rows = _take(inputs, 2)
    _take(weights, 0, "weights")
    _need_integers(rows, 1, "row numbers")
    return Value((rows.shape[0], _rows(source)[1]))


def projection(attributes: Projection, inputs: Values, weights: Values) -> Value:
    inputs = _take(inputs, 1 + attributes.residual)
    parts, norms = attributes.parts, attributes.norm_weights
    weights = _take(weights, norms + parts * (1 + attributes.has_bias), "weights")
    rows, width = _rows(inputs[0])
    for weight in weights[:norms]:
        _need_vector(weight, width, "norm")
    matrices, biases = weights[norms : norms + parts], weights[norms + parts :]
    sizes = [_matrix(matrix, width) for matrix in matrices]
    for bias, size in zip(biases, sizes, strict=False):
        _need_vector(bias, size, "bias")
    if attributes.gated and (parts != 2 or sizes[0] != sizes[1]):
        raise ShapeError(f"gate and up must be two matrices of one size, found {sizes} rows")
    out = Value((rows, sizes[0] if attributes.gated else sum(sizes)))
    if attributes.residual:
        _need_same(out, inputs[1])
    return out


def rope_write(attributes: RopeWrite, inputs: Values, weights: Values) -> Value:
    inputs = _take(inputs, 5 if attributes.rope_dim else 3)
    weights = _take(weights, attributes.q_norm + attributes.k_norm, "weights")
    qkv, cache, slots = inputs[0], inputs[-2], inputs[-1]
    width = (attributes.heads + 2 * attributes.kv_heads) * attributes.head_dim
    _need_width(qkv, width, "heads of q, k and v")
    _need_cache(cache, attributes.kv_heads, attributes.head_dim)
    _need_slots(slots, qkv)
    if attributes.rope_dim:
        _need_rotations(qkv, inputs[1], inputs[2], attributes.rope_dim, attributes.head_dim)
    counts = [attributes.heads] * attributes.q_norm + [attributes.kv_heads] * attributes.k_norm
    for weight, heads in zip(weights, counts, strict=True):
        together = heads if attributes.whole_norm else 1
        _need_vector(weight, together * attributes.head_dim, "norm")
    return qkv


def route(attributes: Routing, inputs: Values, weights: Values) -> Value:
    (logits,) = _take(inputs, 1)
    experts = _rows(logits)[1]
    if len(weights) > 1:
        raise ShapeError(f"takes at most a correction, found {len(weights)} weights")
    for correction in weights:
        _need_vector(correction, experts, "correction")
    size = experts // attributes.groups
    if experts % attributes.groups or attributes.groups_per_token > attributes.groups:
        raise ShapeError(f"{experts} experts do not form the groups of {attributes}")
    if not 1 <= attributes.per_token <= size * attributes.groups_per_token:
        raise ShapeError(f"a token can't choose {attributes.per_token} of {experts} experts")
    return logits


def experts(attributes: Experts, inputs: Values, weights: Values) -> Value:
    source, routing, *rest = _take(inputs, 2 + attributes.residual)
    gate, up, down, *biases = _take(weights, 6 if attributes.has_bias else 3, "weights")
    (rows, hidden), (_, count) = _rows(source), _rows(routing)
    if len(gate.shape) != 3 or gate.shape != (count, gate.shape[1], hidden):
        raise ShapeError(f"the gate {gate} does not fit {source} and {count} experts")
    inner = gate.shape[1]
    wanted: list[tuple[Dim, ...]] = [(count, inner, hidden), (count, hidden, inner)]
    wanted += [(count, inner), (count, inner), (count, hidden)] if biases else []
    for weight, shape in zip((up, down, *biases), wanted, strict=True):
        if weight != Value(shape):
            raise ShapeError(f"an expert weight must be {Value(shape)}, found {weight}")
    for stream in rest:
        _need_same(source, stream)
    return Value((rows, hidden))


def gate_rows(_: NoAttributes, inputs: Values, weights: Values) -> Value:
    source, gate = _take(inputs, 2)
    _take(weights, 0, "weights")
    if gate not in (Value((source.shape[0], 1)), source):
        raise ShapeError(f"the gate {gate} has neither one value per row of {source}, nor as many")
    return source


def _take(values: Values, count: int, what: str = "inputs") -> Values:
    if len(values) != count:
        raise ShapeError(f"takes {count} {what}, found {len(values)}")
    return values


def _rows(value: Value) -> tuple[Dim, int]:
    """The number of rows and the width of a float matrix. Raises `ShapeError` if `value` is not a
    float matrix.
    """
    if len(value.shape) == 2 and value.dtype == "f32":
        rows, width = value.shape
        if isinstance(width, int):
            return rows, width
    raise ShapeError(f"needs float rows of a known width, found {value}")


def _matrix(weight: Value, columns: int) -> int:
    rows, found = _rows(weight)
    if found != columns or not isinstance(rows, int):
        raise ShapeError(f"the matrix {weight} does not take rows of {columns}")
    return rows


def _table_width(table: Value) -> int:
    return _rows(table)[1]


def _need_same(first: Value, second: Value) -> None:
    if first != second:
        raise ShapeError(f"{first} and {second} differ")


def _need_vector(weight: Value, size: int, what: str) -> None:
    if weight != Value((size,)):
        raise ShapeError(f"the {what} must be {Value((size,))}, found {weight}")


def _need_width(value: Value, width: int, what: str) -> None:
    if _rows(value)[1] != width:
        raise ShapeError(f"{what} need {width} columns, found {value}")


def _need_integers(value: Value, dims: int, what: str) -> None:
    if value.dtype not in ("i32", "i64") or len(value.shape) != dims:
        raise ShapeError(f"{what} must be integers of {dims} dimensions, found {value}")


def _need_slots(slots: Value, rows: Value) -> None:
    _need_integers(slots, 1, "slots")
    if slots.shape[0] != rows.shape[0]:
        raise ShapeError(f"slots {slots} are not one for each row of {rows}")


def _need_cache(cache: Value, kv_heads: int, head_dim: int, parts: int = 2) -> None:
    """Checks the cache's shape: (blocks, block size, parts, KV heads, head size). The parts are key
    and value, or the key alone.
    """
    shape = (parts, kv_heads, head_dim)
    if len(cache.shape) != 5 or cache.shape[2:] != shape or cache.dtype != "f32":
        raise ShapeError(f"the cache {cache} does not hold {kv_heads} kv heads of {head_dim}")


def _need_rotations(rows: Value, cosines: Value, sines: Value, dim: int, head_dim: int) -> None:
    if dim % 2 or not 0 < dim <= head_dim:
        raise ShapeError(f"cannot turn {dim} values of heads of {head_dim}")
    _need_same(cosines, sines)
    if cosines != Value((rows.shape[0], dim // 2)):
        raise ShapeError(f"cosines {cosines} do not fit {rows} and {dim} turned values")
