"""Paged attention against its definition, and bit-identical to itself in any batch."""

from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.ir import reference

F32 = NDArray[np.float32]
CACHE_TYPES = ("f32", "bf16", "int8")
CHUNK = 256

# Float arithmetic on the very numbers that the cache holds; relative to the largest output.
FLOAT_TOLERANCE = 1e-5
WHOLE_TOLERANCE = 5e-4  # queries of 15 bits, weights of 14
# Queries and weights of prompt tokens rounded to bfloat16 (eight bits).
BF16_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    rules: bool = False  # scores have a soft cap and ALiBi, and heads have sinks
    both_sides: bool = False  # as in encoders: a token attends to the tokens after it, too
    latent: int = 0  # above 0: the first values of a key are its value

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    @cached_property
    def score_rules(self) -> reference.ScoreRules:
        if not self.rules:
            return reference.ScoreRules(centered=self.both_sides)
        # Some sinks are above every score, some below, some between.
        sinks = np.linspace(-4, 12, self.heads, dtype=np.float32)
        return reference.ScoreRules(1.5, reference.alibi_slopes(self.heads, 8.0), sinks)


@dataclass(frozen=True)
class Row:
    """The last tokens of one sequence: those of a prompt, then generated ones."""

    length: int
    prompt: int = 0
    generated: int = 0
    shared: int = 0  # blocks held in common with the other rows that share
    seed: int | None = None  # of what is not shared; default: the row's place

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


LATENT_SHAPES = (Shape(9, 1, 40, latent=24), Shape(16, 1, 576, block_size=32, latent=512))
SHAPES = (
    Shape(9, 3, 64),
    Shape(9, 3, 64, block_size=64, window=100),
    Shape(2, 2, 8, block_size=32),
    Shape(16, 1, 80, block_size=48, window=300),
    Shape(5, 1, 128),
    Shape(4, 4, 40, window=7),
    Shape(2, 1, 256, block_size=32),
    *LATENT_SHAPES,
    Shape(9, 3, 64, window=300, rules=True),
    Shape(4, 2, 40, block_size=32, rules=True),
    Shape(4, 4, 32, both_sides=True),
    Shape(6, 3, 64, block_size=32, window=65, both_sides=True),
)
# Lengths at and beside the edges of tiles and chunks; a restored row with several generated tokens;
# a row with both kinds; rows that share one chunk and a bit.
ROWS = (
    Row(1, generated=1),
    Row(257, generated=1),
    Row(517, generated=3),
    Row(300, generated=1, shared=18),
    Row(420, generated=1, shared=18),
    Row(512, generated=2, shared=18),
    Row(270, prompt=3, generated=17),
    Row(40, prompt=40),
    Row(280, prompt=37),
    Row(256, prompt=1),
)


class World:
    """A cache that holds some rows' sequences, and queries for their last tokens."""

    def __init__(self, native: ModuleType, kind: str, shape: Shape, rows: tuple[Row, ...]) -> None:
        self.native, self.kind, self.shape, self.rows = native, kind, shape, rows
        rng = np.random.default_rng(7)
        size = shape.block_size
        needed = [-(-row.length // size) for row in rows]
        blocks = rng.permutation(sum(needed) + 3).astype(np.int32)
        self.tables = np.zeros((len(rows), max(needed)), np.int32)
        common: NDArray[np.int32] = blocks[:0]
        for i, (row, count) in enumerate(zip(rows, needed, strict=True)):
            own, blocks = blocks[:count], blocks[count:]
            shared = row.shared * 16 // size
            if shared > len(common):
                common = own[:shared]
            self.tables[i, :count] = np.concatenate((common[:shared], own[shared:]))
        self.cache = native.AttentionCache(
            kind, 2, shape.kv_heads, shape.head_dim, size, 3 + sum(needed), shape.latent
        )
        self.cache.fill(0x41)  # what is past a sequence's end is large, but finite
        self._clear_padding()
        self.held = [self._fill_row(i) for i in range(len(rows))]
        self.queries = [self._random(rng, (row.tokens, shape.heads)) * 2 for row in rows]

    def _random(self, rng: np.random.Generator, size: tuple[int, ...]) -> F32:
        return rng.normal(size=(*size, self.shape.head_dim)).astype(np.float32)

    def _clear_padding(self) -> None:
        """Columns past the head's size are zero from the start."""
        if self.shape.head_dim % 32:
            self.cache.fill(0)

    def slots(self, row: int) -> Any:
        at = np.arange(self.rows[row].length)
        size = self.shape.block_size
        return self.tables[row, at // size].astype(np.int64) * size + at % size

    def _fill_row(self, index: int) -> tuple[F32, F32]:
        row = self.rows[index]
        slots = self.slots(index)
        shared = row.shared * 16 // self.shape.block_size * self.shape.block_size
        common = np.random.default_rng(1)
        own = np.random.default_rng(100 + (index if row.seed is None else row.seed))
        heads = self.shape.kv_heads
        parts = [
            np.concatenate(
                (
                    self._random(common, (shared, heads)),
                    self._random(own, (row.length - shared, heads)),
                )
            )
            for _ in range(2)
        ]
        keys, values = (np.ascontiguousarray(part.reshape(row.length, -1)) for part in parts)
        self.cache.write("generic", 1, slots, keys, values)
        held = np.empty_like(keys), np.empty_like(values)
        self.cache.read(1, slots, *held)
        keys, values = (each.reshape(parts[0].shape) for each in held)
        return keys, keys[..., : self.shape.latent] if self.shape.latent else values

    def expected(self) -> list[F32]:
        scale, window = self.shape.head_dim**-0.5, self.shape.window or None
        return [
            reference.attention(
                q,
                k,
                v,
                np.arange(row.length - row.tokens, row.length, dtype=np.int32),
                scale,
                window,
                self.shape.score_rules,
                np.full(row.tokens, row.length, np.int32) if self.shape.both_sides else None,
            )
            for row, q, (k, v) in zip(self.rows, self.queries, self.held, strict=True)
        ]

    def attend(
        self,
        isa: str,
        pick: dict[int, range] | None = None,
        *,
        share: bool = True,
        threads: int = 1,
    ) -> dict[int, F32]:
        """Outputs of the picked tokens (all unless told) of the picked rows, in one step."""
        if pick is None:
            pick = {i: range(row.tokens) for i, row in enumerate(self.rows)}
        tokens = [(i, t, t < self.rows[i].prompt) for i, picked in pick.items() for t in picked]
        tokens.sort(key=lambda token: token[2])
        step = self.step(tokens, share)
        queries = np.stack([self.queries[i][t].ravel() for i, t, _ in tokens])
        sizes = (self.shape.heads, self.shape.value_dim)
        out = np.full((len(tokens), np.prod(sizes)), np.nan, np.float32)
        rules = self.shape.score_rules
        adjusted = {"softcap": rules.softcap or 0.0, "slopes": rules.slopes, "sinks": rules.sinks}
        step.run(isa, self.cache, 1, queries, out, threads, **adjusted)
        found = {i: np.empty((len(picked), *sizes), np.float32) for i, picked in pick.items()}
        for (i, t, _), result in zip(tokens, out, strict=True):
            found[i][t - pick[i].start] = result.reshape(sizes)
        return found

    def step(self, tokens: list[tuple[int, int, bool]], share: bool = True) -> Any:
        numbers = {row: n for n, row in enumerate(dict.fromkeys(i for i, _, _ in tokens))}
        groups = [0 if share and self.rows[i].shared else -1 for i in numbers]
        shared = [self.rows[i].shared * 16 // self.shape.block_size for i in numbers]
        at = [self.rows[i].length - self.rows[i].tokens + t for i, t, _ in tokens]
        ends = np.array([self.rows[i].length for i, _, _ in tokens], np.int32)
        both_sides = self.shape.both_sides
        return self.native.AttentionBatch(
            self.shape.heads,
            self.shape.head_dim**-0.5,
            self.shape.window,
            sum(not is_prompt for _, _, is_prompt in tokens),
            np.array(at, np.int32),
            np.array([numbers[i] for i, _, _ in tokens], np.int32),
            np.ascontiguousarray(self.tables[list(numbers)]),
            np.array(groups, np.int32),
            np.array([min((s for s in shared if s), default=0)], np.int32),
            visible_end=ends if both_sides else None,
            centered=both_sides,
        )


@cache
def world(native: ModuleType, kind: str, shape: Shape, rows: tuple[Row, ...] = ROWS) -> World:
    return World(native, kind, shape, rows)


@cache
def expected(native: ModuleType, kind: str, shape: Shape) -> list[F32]:
    return world(native, kind, shape).expected()


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_matches_the_definition(
    native: ModuleType, isa: str, kind: str, shape: Shape
) -> None:
    found = world(native, kind, shape).attend(isa)
    for i, (row, wanted) in enumerate(zip(ROWS, expected(native, kind, shape), strict=True)):
        error = np.abs(found[i] - wanted).max(axis=(1, 2)) / np.abs(wanted).max()
        rounds = isa == "amx" and kind == "bf16"
        is_int8 = kind == "int8" and native.has_int8_attention(isa)
        tolerance = WHOLE_TOLERANCE if is_int8 else FLOAT_TOLERANCE
        assert error[: row.prompt].max(initial=0) < (BF16_TOLERANCE if rounds else tolerance)
        assert error[row.prompt :].max(initial=0) < tolerance


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("shape", (*SHAPES[:4], LATENT_SHAPES[0], SHAPES[-2]), ids=str)
def test_attention_of_a_row_is_bit_identical_alone_and_batched(
    native: ModuleType, isa: str, kind: str, shape: Shape
) -> None:
    whole = world(native, kind, shape).attend(isa)
    for i, row in enumerate(ROWS):
        alone = world(native, kind, shape).attend(isa, {i: range(row.tokens)})
        np.testing.assert_array_equal(alone[i], whole[i])


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_chunked_prefill_changes_no_bit_of_attention(
    native: ModuleType, isa: str, kind: str, shape: Shape
) -> None:
    length = 600
    here = world(native, kind, shape, (Row(length, prompt=length), Row(300, generated=1)))
    whole = here.attend(isa)[0]
    begin = 0
    for size in (1, 17, 33, 5, 200, 31, length):
        piece = range(begin, min(begin + size, length))
        np.testing.assert_array_equal(
            here.attend(isa, {0: piece, 1: range(1)})[0], whole[piece.start : piece.stop]
        )
        begin = piece.stop


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("window", (0, 280))
def test_prefix_sharing_and_thread_count_change_no_bit_of_attention(
    native: ModuleType, isa: str, kind: str, window: int
) -> None:
    shape = Shape(6, 2, 32, window=window)
    rows = tuple(Row(530 + 37 * i, generated=1 + i % 2, shared=32) for i in range(19))
    here = world(native, kind, shape, (*rows, Row(700, prompt=40)))
    shared = here.attend(isa, threads=3)
    apart = here.attend(isa, share=False)
    for i, outputs in shared.items():
        np.testing.assert_array_equal(outputs, apart[i])


def test_equal_rows_give_equal_bits_in_different_blocks(native: ModuleType, isa: str) -> None:
    rows = tuple(Row(400, generated=1, seed=3) for _ in range(3))
    here = world(native, "bf16", Shape(3, 1, 64), rows)
    here.queries = [here.queries[0]] * 3
    found = here.attend(isa)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_nan_and_infinity_in_queries_affect_only_their_row(
    native: ModuleType, isa: str, kind: str
) -> None:
    rows = (Row(600, generated=1, shared=32), Row(610, generated=1, shared=32), Row(50, prompt=50))
    here = World(native, kind, Shape(4, 2, 64), rows)
    good = here.attend(isa)
    here.queries[0][0, 0, 5] = np.nan
    here.queries[2][7, 3, 1] = np.inf
    bad = here.attend(isa)
    assert np.isnan(bad[0][0, 0]).all() and np.isnan(bad[2][7, 3]).all()
    np.testing.assert_array_equal(bad[0][0, 1:], good[0][0, 1:])
    np.testing.assert_array_equal(bad[1], good[1])
    np.testing.assert_array_equal(np.delete(bad[2], 7, axis=0), np.delete(good[2], 7, axis=0))


@pytest.mark.parametrize("kind", CACHE_TYPES)
@pytest.mark.parametrize("head_dim", (8, 64, 72))
def test_the_kv_cache_returns_what_was_written_until_it_is_erased(
    native: ModuleType, isa: str, kind: str, head_dim: int
) -> None:
    cache = native.AttentionCache(kind, 2, 3, head_dim, 32, 4)
    rng = np.random.default_rng(0)
    slots = rng.permutation(128)[:50].astype(np.int64)
    keys, values = rng.normal(size=(2, 50, 3 * head_dim)).astype(np.float32)
    keys[3] = 0
    cache.write(isa, 1, slots, keys, values)
    cache.write(isa, 0, slots, values, keys)
    found = np.empty_like(keys), np.empty_like(values)
    cache.read(1, slots, *found)
    for wrote, held in zip((keys, values), found, strict=True):
        np.testing.assert_array_equal(held, rounded(wrote, kind, head_dim))
    cache.erase(int(slots[4]))
    for layer, wrote in ((0, (values, keys)), (1, (keys, values))):
        cache.read(layer, slots, *found)
        for numbers, held in zip(wrote, found, strict=True):
            kept = rounded(numbers, kind, head_dim)
            kept[4] = 0
            np.testing.assert_array_equal(held, kept)


def rounded(x: F32, kind: str, head_dim: int) -> Any:
    if kind == "f32":
        return x.copy()
    if kind == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return nearest.astype(np.uint32).view(np.float32)
    heads = x.reshape(len(x), -1, head_dim)
    largest = np.abs(heads).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(heads * inverse) * (largest / np.float32(127))).reshape(x.shape)


def test_nonfinite_keys_and_values_are_detected_in_an_int8_cache(
    native: ModuleType, isa: str
) -> None:
    cache = native.AttentionCache("int8", 1, 1, 32, 16, 1)
    keys = np.ones((2, 32), np.float32)
    keys[0, 9], keys[1, 9] = np.nan, np.inf
    slots = np.arange(2)
    cache.write(isa, 0, slots, keys, np.ones_like(keys))
    found = np.empty_like(keys), np.empty_like(keys)
    cache.read(0, slots, *found)
    assert np.isnan(found[0]).all() and (found[1] == 1).all()


class TestSchedule:
    @staticmethod
    def items(native: ModuleType, rows: tuple[Row, ...], window: int = 0) -> Any:
        here = world(native, "int8", Shape(1, 1, 8, window=window), rows)
        tokens = [(i, t, t < row.prompt) for i, row in enumerate(rows) for t in range(row.tokens)]
        step = here.step(sorted(tokens, key=lambda token: token[2]))
        step.schedule(16)
        return step.items()

    def test_a_shared_chunk_is_read_once_for_all_rows(self, native: ModuleType) -> None:
        rows = tuple(Row(1100, generated=1, shared=64) for _ in range(16))
        items = self.items(native, rows)
        readers = {
            chunk: [t for t, first, count, _ in items if first <= chunk < first + count]
            for chunk in range(5)
        }
        assert [readers[chunk] for chunk in range(4)] == [[list(range(16))]] * 4
        assert readers[4] == [[i] for i in range(16)]

    def test_a_single_long_row_is_split_among_threads_and_many_rows_are_not(
        self, native: ModuleType
    ) -> None:
        alone = self.items(native, (Row(8192, generated=1),))
        assert len(alone) >= 4 and sum(count for _, _, count, _ in alone) == 32
        many = self.items(native, tuple(Row(700, generated=1) for _ in range(32)))
        assert [(first, count, part) for _, first, count, part in many] == [(0, 3, -1)] * 32

    def test_chunks_outside_the_sliding_window_are_not_read(self, native: ModuleType) -> None:
        items = self.items(native, (Row(2000, prompt=20),), window=100)
        assert [(first, count) for _, first, count, _ in items] == [(7, 1)]
