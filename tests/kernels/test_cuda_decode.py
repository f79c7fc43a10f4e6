"""The CUDA kernel for decode attention with a float8 cache, against attention by its definition. On
a Hopper GPU it runs there, elsewhere it is emulated.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.runtime.model_runner import BatchInputs
from engine.torch.device import is_hopper
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_spec import batch_of, tables_of
from engine.torch.kernels.attention_triton import (
    TritonAttention,
    TritonPlan,
)
from engine.torch.kernels.base import (
    ROUNDED,
    TINY,
    Inputs,
    copied,
    interpreting,
)
from engine.torch.kernels.cuda import decode
from engine.torch.kernels.fp8 import cache_scales, random_cache
from tests.kernels.emulation import Emulated

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
DEVICE = torch.device("cuda" if HOPPER else "cpu")
HALF_OF_SHARED_BYTES = 233_472 // 2 - 1024  # for each of two thread blocks of a multiprocessor
LLAMA_8B, LLAMA_1B = (32, 8, 128, 16), (32, 8, 64, 16)  # heads, KV heads, head size, block size
# One warp for a KV head, and two, four and eight; pages smaller and larger than a tile.
SIZES = [LLAMA_8B, LLAMA_1B, (12, 3, 128, 64), (16, 2, 128, 8), (7, 1, 64, 32), (8, 8, 64, 128)]
LENGTHS = (1, 16, 17, 64, 65, 300, 128, 2)  # of one tile, of whole tiles, of several spans


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    if HOPPER:
        return
    folder: Path = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(decode, "supports", decode.covers)
    files = ("decode.cuh", "decode.cu")
    monkeypatch.setattr(
        decode,
        "function",
        lambda config, dtype: Emulated("decode_rows", files, decode.sizes(config, dtype), folder),
    )


def model(sizes: tuple[int, int, int, int], window: int | None = None) -> AttentionHeads:
    heads, kv_heads, head_dim, _ = sizes
    return AttentionHeads(heads, kv_heads, head_dim, head_dim**-0.5, (window,), in_fp8=True)


def step(lengths: tuple[int, ...], block_size: int, shared: int = 0) -> BatchInputs:
    rows = [(length, 1) for length in lengths]
    return batch_of(rows, tables_of(rows, shared, block_size), shared)


def tensors(
    inputs: BatchInputs, sizes: tuple[int, int, int, int], dtype: torch.dtype, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Queries and a cache. What no row may see is NaN: slots past a row's end, and blocks that lie
    wholly before its window.
    """
    heads, kv_heads, head_dim, block_size = sizes
    shape = replace(TINY, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    made = Inputs(DEVICE, torch.float32)
    cache = random_cache(made, int(inputs.block_tables.max()) + 1, shape)
    scales = cache_scales(cache)
    hidden = [(0, slice(None))]
    for table, length in zip(inputs.block_tables, inputs.seq_lens, strict=True):
        if length % block_size:
            hidden.append((int(table[length // block_size]), slice(length % block_size, None)))
        left = max(0, length - window) // block_size if window else 0
        hidden.extend((int(block), slice(None)) for block in table[:left])
    for place in hidden:
        cache[place] = float("nan")
        scales[place] = float("nan")
    return made.normal(len(inputs.seq_lens), heads, head_dim).to(dtype), cache


def planned(
    inputs: BatchInputs, heads: AttentionHeads, dtype: torch.dtype, size: int
) -> TritonPlan:
    backend = TritonAttention(heads, block_size=size, dtype=dtype)
    plan = backend.plan(inputs, torch.zeros(len(inputs.seq_lens), dtype=torch.int64, device=DEVICE))
    assert plan.decodes_on_hopper
    return plan


def expected(inputs: BatchInputs, heads: AttentionHeads, q: Tensor, cache: Tensor) -> Tensor:
    """In float32, with the same float8 keys and values."""
    backend = ReferenceAttention(heads, block_size=cache.shape[1], dtype=torch.float32)
    plan = backend.plan(inputs, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    exact = q.float()
    return plan.attend(exact, exact, exact, cache, window=heads.windows[0])


def compare(
    sizes: tuple[int, int, int, int],
    lengths: tuple[int, ...] = LENGTHS,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    shared: int = 0,
) -> None:
    heads, inputs = model(sizes, window), step(lengths, sizes[3], shared)
    q, cache = tensors(inputs, sizes, dtype, window or 0)
    found = planned(inputs, heads, dtype, sizes[3]).attend(q, q, q, cache, window=window)
    same(found, expected(inputs, heads, q, cache if window is None else without_nan(cache)))


def without_nan(cache: Tensor) -> Tensor:
    """The reference multiplies hidden values by zero, which NaN would survive."""
    copy: Tensor = copied(cache)
    hidden = cache_scales(cache).isnan()
    cache_scales(copy)[hidden] = 0.0
    copy.view(torch.uint8)[hidden] = 0
    return copy


def same(found: Tensor, wanted: Tensor) -> None:
    tolerance = ROUNDED[found.dtype]
    torch.testing.assert_close(
        found.float(), wanted, rtol=tolerance.relative, atol=tolerance.absolute
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fp8_decode_attention_equals_the_reference_at_all_lengths(
    sizes: tuple[int, int, int, int],
) -> None:
    compare(sizes)


def test_fp8_decode_attention_with_float16_queries() -> None:
    compare(LLAMA_8B, dtype=torch.float16)


@pytest.mark.parametrize("sizes", [LLAMA_1B, (16, 2, 128, 8), (12, 3, 128, 64)], ids=str)
@pytest.mark.parametrize("window", [20, 100])
def test_the_sliding_window_hides_early_keys(sizes: tuple[int, int, int, int], window: int) -> None:
    """Some spans lie wholly before the window."""
    compare(sizes, window=window)


@pytest.mark.parametrize("sizes", [LLAMA_8B, (16, 2, 128, 8)], ids=str)
def test_fp8_decode_attention_merges_the_parts_of_a_long_row(
    sizes: tuple[int, int, int, int],
) -> None:
    lists, _ = TritonAttention(model(sizes), block_size=sizes[3], dtype=torch.bfloat16).lists(
        step((1900,), sizes[3])
    )
    assert lists["partials"][0, 1] > 8
    compare(sizes, (1900,))


def test_one_work_span_covers_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block table is longer than what the producer warp loads at once."""
    monkeypatch.setattr(decode, "MIN_SPAN", 1 << 20)
    compare((4, 2, 64, 8), (1100, 700))


@pytest.mark.skipif(not HOPPER and not interpreting(), reason="Triton reads the shared prefix")
def test_fp8_decode_attention_with_a_shared_prefix() -> None:
    sizes = (4, 2, 64, 16)
    compare(sizes, tuple(300 + 5 * row for row in range(17)), shared=17)


def test_a_graph_launches_more_thread_blocks_than_there_are_spans() -> None:
    """The spans past the last one are of an earlier step. Counters are zero after each launch."""
    sizes = LLAMA_1B
    heads, inputs = model(sizes), step((300, 70), sizes[3])
    q, cache = tensors(inputs, sizes, torch.bfloat16)
    plan = planned(inputs, heads, torch.bfloat16, sizes[3])
    stale = torch.full((7, 4), 1 << 20, dtype=torch.int32, device=DEVICE)
    spans = torch.cat((plan.arrays["spans"], stale))
    plan = replace(plan, arrays={**plan.arrays, "spans": spans})
    for _ in range(2):
        same(plan.attend(q, q, q, cache, window=None), expected(inputs, heads, q, cache))
        assert plan.scratch is not None and not plan.scratch.arrived.any()


def test_fp8_cache_scales_multiply_scores_and_values() -> None:
    """Scales multiply scores and weights, key by key."""
    sizes = LLAMA_1B
    heads, inputs = model(sizes), step((90, 33), sizes[3])
    q, cache = tensors(inputs, sizes, torch.float16)
    scales = cache_scales(cache)
    factors = torch.logspace(-3, 0.5, scales.numel(), device=DEVICE).view(scales.shape)
    scales.mul_(factors)
    found = planned(inputs, heads, torch.float16, sizes[3]).attend(q, q, q, cache, window=None)
    same(found, expected(inputs, heads, q, cache))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_two_thread_blocks_fit_on_one_multiprocessor(sizes: tuple[int, int, int, int]) -> None:
    heads, inputs = model(sizes), step((1,), sizes[3])
    _, cache = tensors(inputs, sizes, torch.bfloat16)
    group = heads.heads_per_program
    config = decode.DecodeConfig(sizes[2], group, sizes[1], sizes[3], cache.stride(1), 0, True)
    assert config.shared_bytes <= HALF_OF_SHARED_BYTES


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        (replace(model(LLAMA_8B), in_fp8=False), 16, torch.bfloat16),
        (replace(model(LLAMA_8B), softcap=30.0), 16, torch.bfloat16),
        (model(LLAMA_8B), 16, torch.float32),
        (model(LLAMA_8B), 4, torch.bfloat16),
        (model((32, 8, 96, 16)), 16, torch.bfloat16),
        (model((32, 32, 128, 16)), 16, torch.bfloat16),
        (model((64, 4, 128, 16)), 16, torch.bfloat16),
    ],
)
def test_models_that_the_cuda_decode_kernel_does_not_cover_use_triton(
    heads: AttentionHeads, block_size: int, dtype: torch.dtype
) -> None:
    assert decode.covers(model(LLAMA_8B), 16, torch.bfloat16)
    assert not decode.covers(heads, block_size, dtype)


def test_decode_spans_fit_the_capacity_of_a_cuda_graph() -> None:
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 17, 64, 300):
        backend = TritonAttention(model(LLAMA_8B), block_size=16, dtype=torch.bfloat16)
        inputs = step(tuple(map(int, rng.integers(1, 9000, num_rows))), 16)
        room = backend.room_for(num_rows, num_rows, only_decodes=True, shares=False)
        lists, _ = backend.lists(inputs, room)
        assert len(lists["spans"]) <= room.spans
        assert lists["partials"][:, 1].sum() <= room.partials
