"""Generates test arguments for each op. They cover one token and many tokens, odd sizes, and
sequences of different lengths.
"""

from collections.abc import Iterator

import numpy as np

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
from engine.ir.plan import Activation, Routing
from engine.ir.reference import F32
from engine.ir.types import Array, Examples, OpExample

ROWS = (1, 3, 17)
WIDTHS = (32, 40, 129)
# (heads, kv heads, head size)
HEADS = ((4, 2, 16), (9, 3, 24), (5, 5, 64))
# (heads, size of the latent, rotated values) of latent attention
LATENTS = ((4, 24, 8), (9, 40, 16), (5, 64, 32))
BLOCK = 16


def embed(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        ids = rng.integers(0, 50, rows).astype(np.int32)
        for scale in (1.0, 0.3):
            yield OpExample(Lookup(scale), (ids,), (_normal(rng, 50, width),))


def position_embed(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        ids = rng.integers(0, 50, rows).astype(np.int32)
        yield OpExample(NoAttributes(), (ids,), (_normal(rng, 50, width),))


def embed_positions(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        ids = rng.integers(0, 50, (2, rows)).astype(np.int32)
        tables = (_normal(rng, 50, width), _normal(rng, 60, width))
        for scale in (1.0, 0.3):
            yield OpExample(Lookup(scale), (ids[0], ids[1]), tables)
        yield OpExample(Lookup(types=True), (*ids, ids[0]), (*tables, _normal(rng, 50, width)))


def elementwise(inputs: int) -> Examples:
    def examples(rng: "np.random.Generator") -> Iterator[OpExample]:
        for rows, width in zip(ROWS, WIDTHS, strict=True):
            values = tuple(_normal(rng, rows, width, spread=3.0) for _ in range(inputs))
            yield OpExample(NoAttributes(), values)

    return examples


def scale(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        yield OpExample(Scale(0.22), (_normal(rng, rows, width),))


def softcap(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        yield OpExample(Softcap(2.5), (_normal(rng, rows, width, spread=3.0),))


def linear(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows in ROWS:
        for out, width in ((16, 32), (33, 70), (100, 64)):
            matrix = _normal(rng, out, width, spread=0.1)
            yield OpExample(NoAttributes(), (_normal(rng, rows, width),), (matrix,))
            yield OpExample(
                NoAttributes(), (_normal(rng, rows, width),), (matrix, _normal(rng, out))
            )


def rms_norm(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        yield OpExample(Normalize(1e-5), (_normal(rng, rows, width),), (_normal(rng, width),))


def add_norm(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        pair = (_normal(rng, rows, width), _normal(rng, rows, width))
        yield OpExample(Normalize(1e-5), pair, (_normal(rng, width),))


def layer_norm(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        for count in (1, 2):
            weights = tuple(_normal(rng, width) for _ in range(count))
            yield OpExample(Normalize(1e-5), (_normal(rng, rows, width) + 2,), weights)


def head_norm(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (heads, _, size) in zip(ROWS, HEADS, strict=True):
        yield OpExample(
            HeadNorm(heads, size, 1e-6), (_normal(rng, rows, heads * size),), (_normal(rng, size),)
        )


def rope(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (heads, _, size) in zip(ROWS, HEADS, strict=True):
        for dim in (size, size // 2):
            x = _normal(rng, rows, heads * size)
            yield OpExample(Rope(heads, size, dim), (x, *_rotations(rng, rows, dim)))


def columns(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        yield OpExample(Columns(width // 4, width // 2), (_normal(rng, rows, width),))


def gather_rows(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        picked = np.arange(0, rows, 2, dtype=np.int32)
        yield OpExample(NoAttributes(), (_normal(rng, rows, width), picked))


def kv_write(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (_, kv_heads, size) in zip(ROWS, HEADS, strict=True):
        cache = np.zeros((4, BLOCK, 2, kv_heads, size), np.float32)
        keys, values = (_normal(rng, rows, kv_heads * size) for _ in range(2))
        yield OpExample(KvWrite(0, kv_heads, size), (cache, keys, values, _slots(rng, rows)))


def attention(rng: "np.random.Generator") -> Iterator[OpExample]:
    """Batches of three sequences. The first sequence has a decode token, the second a whole prompt,
    and the third a later chunk of a prompt.
    """
    for heads, kv_heads, size in HEADS:
        for window in (None, 7):
            positions = np.concatenate(([40], np.arange(19), np.arange(20, 33))).astype(np.int32)
            row_of = np.repeat(np.arange(3, dtype=np.int32), (1, 19, 13))
            cache = _normal(rng, 9, BLOCK, 2, kv_heads, size)
            tables = rng.permutation(9).astype(np.int32).reshape(3, 3)
            queries = _normal(rng, len(positions), heads * size)
            yield OpExample(
                AttentionAttributes(0, heads, kv_heads, size, size**-0.5, window),
                (queries, cache, positions, row_of, tables),
            )
            # What only some families have: a soft cap, ALiBi, sinks.
            rules = AttentionAttributes(
                0, heads, kv_heads, size, size**-0.5, window, 1.5, alibi_bias=8.0, sinks=True
            )
            arrays = (queries, cache, positions, row_of, tables)
            yield OpExample(rules, arrays, (_normal(rng, heads),))
            # Encoders: each token attends to its whole text.
            ends = np.repeat(np.array([41, 19, 33], np.int32), (1, 19, 13))
            both_sides = AttentionAttributes(
                0, heads, kv_heads, size, size**-0.5, window, centered=window is not None
            )
            yield OpExample(both_sides, (*arrays, ends))
    yield from latent_attention(rng)


def latent_attention(rng: "np.random.Generator") -> Iterator[OpExample]:
    """The batches of `attention`, over a cache without values."""
    for heads, latent, rope_dim in LATENTS:
        positions = np.concatenate(([40], np.arange(19), np.arange(20, 33))).astype(np.int32)
        row_of = np.repeat(np.arange(3, dtype=np.int32), (1, 19, 13))
        size = latent + rope_dim
        yield OpExample(
            AttentionAttributes(0, heads, 1, size, size**-0.5, None, latent=latent),
            (
                _normal(rng, len(positions), heads * size),
                _normal(rng, 9, BLOCK, 1, 1, size),
                positions,
                row_of,
                rng.permutation(9).astype(np.int32).reshape(3, 3),
            ),
        )


def head_linear(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (heads, size, rope_dim) in zip(ROWS, LATENTS, strict=True):
        for out in (8, 33):
            matrix = _normal(rng, heads, out, size, spread=0.1)
            x = _normal(rng, rows, heads * size)
            yield OpExample(HeadLinear(heads), (x,), (matrix,))
            x = _normal(rng, rows, heads * (size + rope_dim))
            rotations = _rotations(rng, rows, rope_dim)
            yield OpExample(HeadLinear(heads, rope_dim), (x, *rotations), (matrix,))


def latent_write(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (_, latent, rope_dim) in zip(ROWS, LATENTS, strict=True):
        size = latent + rope_dim
        x, cache = _normal(rng, rows, size), np.zeros((4, BLOCK, 1, 1, size), np.float32)
        rotations = _rotations(rng, rows, rope_dim)
        attributes = LatentWrite(0, latent, rope_dim, 1e-6)
        arrays = (x, *rotations, cache, _slots(rng, rows))
        yield OpExample(attributes, arrays, (_normal(rng, latent),))


def mean_rows(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        last = np.array([0, rows // 2, rows - 1] if rows > 2 else [rows - 1], np.int32)
        yield OpExample(NoAttributes(), (_normal(rng, rows, width), last))


def projection(rng: "np.random.Generator") -> Iterator[OpExample]:
    plain, gate = Projection(), Projection(parts=2, activation="silu", gated=True)
    everything = Projection(3, "layer", norm_bias=True, eps=1e-5, has_bias=True, residual=True)
    for attributes, sizes in (
        (plain, (33,)),
        (gate, (24, 24)),
        (everything, (16, 8, 8)),
        (Projection(scale=0.22, residual=True), (40,)),
        (Projection(scale=0.22, softcap=1.5), (40,)),
        (Projection(activation="relu2"), (40,)),
        (Projection(parts=2, activation="swiglu_oai", gated=True), (24, 24)),
        (Projection(norm="rms", eps=1e-6, activation="gelu_tanh"), (40,)),
    ):
        for rows in ROWS:
            width, out = 48, sizes[0] if attributes.gated else sum(sizes)
            inputs: tuple[Array, ...] = (_normal(rng, rows, width),)
            if attributes.residual:
                inputs += (_normal(rng, rows, out),)
            weights = [_normal(rng, width) for _ in range(attributes.norm_weights)]
            weights += [_normal(rng, size, width, spread=0.1) for size in sizes]
            weights += [_normal(rng, size) for size in sizes if attributes.has_bias]
            yield OpExample(attributes, inputs, tuple(weights))


def rope_write(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, (heads, kv_heads, size) in zip(ROWS, HEADS, strict=True):
        for dim, normed, whole in (
            (size, True, False),
            (size, True, True),
            (size // 2, False, False),
            (0, False, False),
        ):
            qkv = _normal(rng, rows, (heads + 2 * kv_heads) * size)
            cache = np.zeros((4, BLOCK, 2, kv_heads, size), np.float32)
            rotations = _rotations(rng, rows, dim) if dim else ()
            sizes = (heads * size, kv_heads * size) if whole else (size, size)
            norms = tuple(_normal(rng, each) for each in sizes if normed)
            attributes = RopeWrite(0, heads, kv_heads, size, dim, normed, normed, 1e-6, whole)
            yield OpExample(attributes, (qkv, *rotations, cache, _slots(rng, rows)), norms)


# (experts, routing)
ROUTINGS = (
    (8, Routing(2, "softmax", False, 1.0, 1, 1, "best")),
    (6, Routing(3, "softmax_chosen", False, 1.0, 1, 1, "best")),
    (16, Routing(4, "sigmoid", True, 2.5, 4, 2, "best_two")),
    (8, Routing(2, "softmax", True, 1.0, 4, 2, "best")),
)


def route(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows in ROWS:
        for count, routing in ROUTINGS:
            logits = _normal(rng, rows, count)
            yield OpExample(routing, (logits,))
            yield OpExample(routing, (logits,), (_normal(rng, count, spread=0.1),))


def experts(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows in ROWS:
        for (count, routing), has_bias in zip(ROUTINGS, (False, True, False, True), strict=True):
            width, inner = 48, 40
            activation: Activation = "swiglu_oai" if has_bias else "silu"
            x, stream = _normal(rng, rows, width), _normal(rng, rows, width)
            weights = np.zeros((rows, count), np.float32)
            for row in weights:
                row[rng.permutation(count)[: routing.per_token]] = rng.uniform(0.1, 1)
            shapes = ((count, inner, width), (count, inner, width), (count, width, inner))
            matrices = tuple(_normal(rng, *shape, spread=0.2) for shape in shapes)
            biases = tuple(_normal(rng, *shape[:2]) for shape in shapes if has_bias)
            plain = Experts(routing.per_token, activation, has_bias)
            added = Experts(routing.per_token, activation, has_bias, residual=True, scale=0.3)
            yield OpExample(plain, (x, weights), matrices + biases)
            yield OpExample(added, (x, weights, stream), matrices + biases)


def gate_rows(rng: "np.random.Generator") -> Iterator[OpExample]:
    for rows, width in zip(ROWS, WIDTHS, strict=True):
        for gates in (1, width):
            yield OpExample(NoAttributes(), (_normal(rng, rows, width), _normal(rng, rows, gates)))


def _normal(rng: "np.random.Generator", *shape: int, spread: float = 1.0) -> F32:
    return rng.normal(0, spread, shape).astype(np.float32)


def _rotations(rng: "np.random.Generator", rows: int, dim: int) -> tuple[F32, F32]:
    angles = rng.uniform(0, 300, (rows, dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _slots(rng: "np.random.Generator", rows: int) -> Array:
    return rng.permutation(4 * BLOCK)[:rows].astype(np.int64)
