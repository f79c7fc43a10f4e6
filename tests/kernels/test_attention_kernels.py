"""The Triton attention kernels, interpreted, against attention by its definition."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.runtime.model_runner import BatchInputs
from engine.torch.kernels import attention_triton
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_triton import TritonAttention

BLOCK_SIZE = 8
TOLERANCE = 2e-5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def config(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> AttentionHeads:
    return AttentionHeads(heads, kv_heads, head_dim, head_dim**-0.5, (window,))


def step(rows: list[tuple[int, int]], shared: int = 0) -> BatchInputs:
    """Rows of (keys, queries); all of them begin with the same `shared` blocks."""
    rng = np.random.default_rng(0)
    widths = [-(-length // BLOCK_SIZE) for length, _ in rows]
    blocks = rng.permutation(np.arange(1, sum(widths) + shared + 1)).astype(np.int32)
    tables = np.zeros((len(rows), max(widths)), np.int32)
    used = shared
    for table, width in zip(tables, widths, strict=True):
        own = width - shared
        table[:width] = np.concatenate((blocks[:shared], blocks[used : used + own]))
        used += own
    lengths = np.array([length for length, _ in rows], np.int32)
    starts = np.cumsum([0] + [count for _, count in rows]).astype(np.int32)
    num_tokens = int(starts[-1])
    none = np.zeros(0, np.int32)
    return BatchInputs(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        write_slots=np.zeros(num_tokens, np.int64),
        query_start=starts,
        seq_lens=lengths,
        num_prompt=lengths,
        block_tables=tables,
        slots=np.arange(len(rows), dtype=np.int32),
        logit_rows=none,
        adapter_ids=np.zeros(len(rows), np.int32),
        prefix_groups=np.full(len(rows), 0 if shared else -1, np.int32),
        prefix_blocks=np.array([shared], np.int32) if shared else none,
    )


def compare(
    model: AttentionHeads,
    inputs: BatchInputs,
    dtype: torch.dtype = torch.float32,
    tolerance: float = TOLERANCE,
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    num_blocks = int(inputs.block_tables.max()) + 1
    parts = 1 if model.latent else 2
    pages = (num_blocks, BLOCK_SIZE, parts, model.num_kv_heads, model.head_dim)
    cache = torch.randn(pages, generator=generator, device=DEVICE).to(dtype)
    # As in a step without a graph, the queries are a part of a fused projection.
    projected = (len(inputs.token_ids), model.num_heads + model.num_kv_heads, model.head_dim)
    qk = torch.randn(projected, generator=generator, device=DEVICE).to(dtype)
    q = qk[:, : model.num_heads]
    # What lies behind a row's end is another's, or NaN: nothing of it may be seen.
    cache[0] = float("nan")
    positions = torch.zeros(len(inputs.token_ids), dtype=torch.int64, device=DEVICE)
    sinks = None
    if model.has_sinks:
        sinks = 2 * torch.randn(model.num_heads, generator=generator, device=DEVICE)
    plans = [
        backend(model, block_size=BLOCK_SIZE, dtype=dtype).plan(inputs, positions)
        for backend in (TritonAttention, ReferenceAttention)
    ]
    for window in model.windows:
        found, expected = (
            plan.attend(q, q, q, cache, window=window, sinks=sinks) for plan in plans
        )
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


HEADS = [(4, 1, 16), (6, 2, 24), (2, 2, 32)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 20])
def test_decode_rows_equal_reference_attention(
    heads: tuple[int, int, int], window: int | None
) -> None:
    compare(config(*heads, window), step([(1, 1), (65, 1), (200, 1), (8, 1), (300, 1)]))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 20])
def test_prefill_rows_equal_reference_attention(
    heads: tuple[int, int, int], window: int | None
) -> None:
    compare(config(*heads, window), step([(40, 40), (150, 3), (161, 70), (2, 2)]))


FEATURES = [
    {"scale": 0.11, "windows": (None, 20)},
    {"has_sinks": True},
    {"alibi_bias": 8.0},
    {"softcap": 1.5, "has_sinks": True, "windows": (20,)},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_steps_mixing_prefill_and_decode_equal_reference_attention(features: dict) -> None:
    model = replace(config(6, 2, 16), **features)
    compare(model, step([(20, 20), (400, 1), (1, 1), (90, 33)]))


@pytest.mark.parametrize(
    ("heads", "dtype", "block_size"),
    [
        ((6, 2, 16), torch.float32, 8),
        # On a Hopper GPU, these are the sizes of the kernel in CUDA C++.
        pytest.param((8, 2, 64), torch.bfloat16, 16, marks=pytest.mark.gpu),
        pytest.param((8, 2, 128), torch.bfloat16, 32, marks=pytest.mark.gpu),
    ],
)
def test_windowed_layers_read_their_own_tables_and_no_freed_block(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks that the window has left are freed: their places are null, and they may hold
    anything.
    """
    monkeypatch.setattr(sys.modules[__name__], "BLOCK_SIZE", block_size)
    window, rows = 20, [(20, 20), (400, 1), (1, 1), (90, 33), (210, 1), (300, 70)]
    model = replace(config(*heads), windows=(None, window))
    inputs = step(rows)
    tables = np.where(inputs.block_tables > 0, inputs.block_tables.max() + 1, 0)
    tables = (tables - inputs.block_tables).astype(np.int32)
    freed = tables.copy()
    for table, (length, count) in zip(freed, rows, strict=True):
        table[: max(0, length - count - window + 1) // block_size] = 0
    assert (freed != tables).any()
    pages = (int(tables.max()) + 1, block_size, 2, model.num_kv_heads, model.head_dim)
    cache = torch.randn(pages, device=DEVICE).to(dtype)
    q = torch.randn(len(inputs.token_ids), model.num_heads, model.head_dim, device=DEVICE).to(dtype)
    positions = torch.zeros(len(inputs.token_ids), dtype=torch.int64, device=DEVICE)
    whole = replace(inputs, window_tables=tables)
    expected = ReferenceAttention(model, block_size=block_size, dtype=dtype)
    plan = TritonAttention(model, block_size=block_size, dtype=dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2
    for each, given in ((None, inputs.block_tables), (window, freed)):
        wanted = expected.plan(whole, positions).attend(q, q, q, cache, window=each)
        poisoned = cache.clone()
        poisoned[np.setdiff1d(np.arange(pages[0]), given[given > 0])] = float("nan")
        found = plan.plan(replace(inputs, window_tables=freed), positions)
        result = found.attend(q, q, q, poisoned, window=each)
        torch.testing.assert_close(result, wanted, atol=tolerance, rtol=tolerance)


def test_prefix_sharing_does_not_change_attention_scores() -> None:
    rows = [(300 + 5 * row, 1) for row in range(17)]
    model = replace(config(4, 2, 16), softcap=1.5, has_sinks=True)
    compare(model, step(rows, shared=35))


@pytest.mark.parametrize("features", [{"alibi_bias": 8.0}, {"windows": (None, 20)}], ids=str)
def test_models_with_alibi_or_windows_do_not_share_prefixes(features: dict) -> None:
    model = replace(config(4, 2, 16), **features)
    inputs = step([(300 + 5 * row, 1) for row in range(17)], shared=35)
    backend = TritonAttention(model, block_size=BLOCK_SIZE, dtype=torch.float32)
    lists, _ = backend.lists(inputs)
    assert not len(lists["shared"]) and not backend.has_shared(inputs)


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_float16_attention_equals_the_reference(head_dim: int) -> None:
    inputs = step([(40, 40), (150, 1), (1, 1), (190, 70), (140, 1)])
    compare(config(4, 2, head_dim), inputs, torch.float16, 2e-3)
    compare(
        config(4, 2, head_dim), step([(300 + row, 1) for row in range(17)], 35), torch.float16, 2e-3
    )


# (heads, size of the latent, rotated values); the last as in DeepSeek-V2-Lite
LATENTS = [(6, 24, 8), (20, 32, 16), (16, 512, 64)]


@pytest.mark.parametrize("sizes", LATENTS)
def test_latent_attention_reads_keys_and_values_from_latents(sizes: tuple[int, int, int]) -> None:
    heads, latent, rope_dim = sizes
    model = replace(config(heads, 1, latent + rope_dim), latent=latent)
    compare(model, step([(1, 1), (65, 1), (700, 1), (40, 40), (90, 33), (2, 2)]))
    many = step([(300 + 5 * row, 1) for row in range(17)], shared=35)
    compare(model, many, torch.float16, 2e-3)


def test_a_long_decode_row_is_split_and_its_partial_results_merged() -> None:
    model = config(4, 2, 16)
    inputs = step([(700, 1), (3, 1)])
    lists, _ = TritonAttention(model, block_size=BLOCK_SIZE, dtype=torch.float32).lists(inputs)
    assert lists["partials"][0, 1] > 3
    compare(model, inputs)


@pytest.mark.parametrize("lengths", [(8000,), (1, 900, 2000, 130, 64, 2500, 700, 33)])
def test_work_spans_cover_every_row_evenly_with_the_longest_first(lengths: tuple[int, ...]) -> None:
    """A row's are alike and cover it, the longest are begun first, a lone row fills the card."""
    backend = TritonAttention(config(16, 8, 16), block_size=BLOCK_SIZE, dtype=torch.float32)
    lists, _ = backend.lists(step([(length, 1) for length in lengths]))
    row, first, last, _ = lists["spans"].T
    assert (np.diff(last - first) <= 0).all()
    for index, length in enumerate(lengths):
        of_row = np.sort(first[row == index])
        (width,) = set((last - first)[row == index])
        np.testing.assert_array_equal(of_row, np.arange(0, length, width))
    if len(lengths) == 1:
        assert len(row) == attention_triton.LONE_PROGRAMS // 8


@pytest.mark.parametrize("num_rows", [16, 37])
def test_a_shared_prefix_is_read_once_for_many_rows(num_rows: int) -> None:
    model = config(4, 2, 16)
    inputs = step([(300 + 5 * row, 1) for row in range(num_rows)], shared=35)
    backend = TritonAttention(model, block_size=BLOCK_SIZE, dtype=torch.float32)
    lists, room = backend.lists(inputs)
    assert len(lists["shared"]) and lists["spans"][:, 1].min() == 35 * BLOCK_SIZE
    limit = backend.room_for(num_rows, num_rows, only_decodes=True, shares=True)
    assert room.spans <= limit.spans and room.shared <= limit.shared
    assert room.partials <= limit.partials
    compare(model, inputs)


def test_prefixes_are_not_shared_for_few_rows_or_a_short_prefix() -> None:
    backend = TritonAttention(config(4, 2, 16), block_size=BLOCK_SIZE, dtype=torch.float32)
    for inputs in (step([(300, 1)] * 3, shared=35), step([(40, 1)] * 20, shared=3)):
        lists, _ = backend.lists(inputs)
        assert not len(lists["shared"])


@pytest.mark.parametrize("seed", range(4))
def test_work_lists_fit_the_capacity_of_a_cuda_graph(seed: int) -> None:
    rng = np.random.default_rng(seed)
    backend = TritonAttention(config(4, 1, 16), block_size=BLOCK_SIZE, dtype=torch.float32)
    num_rows = int(rng.integers(1, 40))
    lengths = rng.integers(1, 4000, num_rows)
    inputs = step([(int(length), int(min(length, rng.integers(1, 60)))) for length in lengths])
    tokens = len(inputs.token_ids)
    room = backend.room_for(tokens, num_rows, only_decodes=False, shares=False)
    lists, _ = backend.lists(inputs, room)
    assert len(lists["spans"]) <= room.spans and len(lists["tiles"]) <= room.tiles
    assert lists["partials"].sum(axis=0)[1] <= room.partials


def test_the_comparison_fails_if_a_work_item_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_triton._spans

    def loses_one(*args: object) -> tuple[np.ndarray, np.ndarray]:
        spans, partials = whole(*args)  # type: ignore[arg-type]
        spans[0, 2] -= 64
        return spans, partials

    monkeypatch.setattr(attention_triton, "_spans", loses_one)
    with pytest.raises(AssertionError):
        compare(config(4, 2, 16), step([(700, 1)]))


def test_merge_counters_are_reset_between_steps() -> None:
    model = config(4, 2, 16)
    backend = TritonAttention(model, block_size=BLOCK_SIZE, dtype=torch.float32)
    inputs = step([(700, 1), (400, 1)])
    cache = torch.randn(int(inputs.block_tables.max()) + 1, BLOCK_SIZE, 2, 2, 16, device=DEVICE)
    q = torch.randn(2, 4, 16, device=DEVICE)
    positions = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    plan = backend.plan(inputs, positions)
    first = plan.attend(q, q, q, cache, window=None)
    torch.testing.assert_close(plan.attend(q, q, q, cache, window=None), first)
    shorter = replace(inputs, seq_lens=np.array([650, 399], np.int32))
    assert not torch.equal(
        backend.plan(shorter, positions).attend(q, q, q, cache, window=None), first
    )
