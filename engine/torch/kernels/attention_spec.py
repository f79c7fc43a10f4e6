"""`KernelSpec`s of the attention kernels, for tests and benchmarks. An example is the attention of
one layer in one step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runtime.model_runner import I32, BatchInputs
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
    ReferencePlan,
)
from engine.torch.kernels.attention_triton import (
    MIN_MEMBERS,
    MIN_SHARED_KEYS,
    TritonAttention,
    TritonPlan,
)
from engine.torch.kernels.base import (
    ROUNDED,
    Example,
    Inputs,
    KernelSpec,
    Shape,
    register,
    size_of,
)
from engine.torch.kernels.fp8 import random_cache

_MAX_DECODES = 256


@dataclass(frozen=True, slots=True)
class Plans:
    """The attention plans of the reference backend and the Triton backend for one step."""

    reference: ReferencePlan
    triton: TritonPlan
    num_keys: int  # number of keys to read; a key that several rows share counts once
    num_pairs: int  # number of pairs of a query and a key to which it attends


Rows = Sequence[tuple[int, int]]  # (number of keys, number of queries) of each row


def _reference(q: Tensor, cache: Tensor, plans: Plans) -> Tensor:
    return plans.reference.attend(q, q, q, cache, window=None)


def _triton(q: Tensor, cache: Tensor, plans: Plans) -> Tensor:
    return plans.triton.attend_cached(q, cache, None)


def bytes_of(q: Tensor, cache: Tensor, plans: Plans) -> int:
    return size_of(q, q) + plans.num_keys * size_of(cache[0, 0])


def _flops_of(q: Tensor, cache: Tensor, plans: Plans) -> int:
    """FLOPs of one call. Each pair of query and key takes two FLOPs per head value for the score,
    and two for the weighted sum of values.
    """
    return 4 * plans.num_pairs * q.shape[1] * q.shape[2]


def _heads(shape: Shape, in_fp8: bool = False) -> AttentionHeads:
    scale = shape.head_dim**-0.5
    sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
    return AttentionHeads(*sizes, scale, in_fp8=in_fp8)


def tables_of(rows: Rows, shared: int, block_size: int) -> I32:
    """The block tables of all rows, with blocks in random order. The first `shared` blocks are the
    same in all rows.
    """
    widths = np.array([-(-keys // block_size) for keys, _ in rows])
    own = widths - shared
    blocks = np.random.default_rng(0).permutation(int(own.sum()) + shared).astype(np.int32) + 1
    tables = np.zeros((len(rows), int(widths.max())), np.int32)
    used = shared
    for table, count in zip(tables, own, strict=True):
        table[:shared] = blocks[:shared]
        table[shared : shared + count] = blocks[used : used + count]
        used += count
    return tables


def batch_of(rows: Rows, tables: I32, shares: int = 0) -> BatchInputs:
    """Inputs of a step, for its attention. The first `shares` blocks of all rows are the same."""
    lengths = np.array([keys for keys, _ in rows], np.int32)
    starts = np.cumsum([0] + [queries for _, queries in rows]).astype(np.int32)
    nothing = np.zeros(int(starts[-1]), np.int32)
    return BatchInputs(
        token_ids=nothing,
        positions=nothing,
        write_slots=nothing.astype(np.int64),
        query_start=starts,
        seq_lens=lengths,
        num_prompt=lengths,
        block_tables=tables,
        slots=np.arange(len(rows), dtype=np.int32),
        logit_rows=np.zeros(0, np.int32),
        adapter_ids=np.zeros(len(rows), np.int32),
        prefix_groups=np.full(len(rows), 0 if shares else -1, np.int32),
        prefix_blocks=np.full(1 if shares else 0, shares, np.int32),
    )


def example_of(
    label: str, rows: Rows, shared: int, shape: Shape, inputs: Inputs, in_fp8: bool
) -> Example:
    size = shape.block_size
    step = batch_of(rows, tables_of(rows, shared, size), shared)
    positions = torch.zeros(len(step.token_ids), dtype=torch.int64, device=inputs.device)
    heads = _heads(shape, in_fp8)
    reference, triton = (
        backend(heads, block_size=size, dtype=inputs.dtype).plan(step, positions)
        for backend in (ReferenceAttention, TritonAttention)
    )
    assert isinstance(reference, ReferencePlan) and isinstance(triton, TritonPlan)
    keys = sum(keys for keys, _ in rows) - (len(rows) - 1) * shared * size
    pairs = sum(queries * keys - queries * (queries - 1) // 2 for keys, queries in rows)
    blocks = int(step.block_tables.max()) + 1
    q = inputs.normal(len(step.token_ids), shape.num_heads, shape.head_dim)
    if in_fp8:
        cache = random_cache(inputs, blocks, shape)
    else:
        cache = inputs.normal(blocks, size, 2, shape.num_kv_heads, shape.head_dim)
    cache[0] = float("nan")  # reveals kernels that use values past a row's end
    for table, length in zip(step.block_tables, step.seq_lens, strict=True):
        if length % size:
            cache[int(table[length // size]), length % size :] = float("nan")
    return Example(label, (q, cache, Plans(reference, triton, keys, pairs)))


def _examples(
    rows_of: Callable[[Shape], Iterator[tuple[str, Rows, int]]], in_fp8: bool
) -> Callable[[Shape, torch.device, torch.dtype], Iterator[Example]]:
    def examples(shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[Example]:
        for label, rows, shared in rows_of(shape):
            yield example_of(label, rows, shared, shape, Inputs(device, dtype), in_fp8)

    return examples


def _decodes(shape: Shape) -> Iterator[tuple[str, Rows, int]]:
    for count in shape.rows:
        if count <= _MAX_DECODES:
            rows = [(shape.context + 7 * row % shape.context, 1) for row in range(count)]
            yield f"{count} x {shape.context}+ keys", rows, 0


def _shared(shape: Shape) -> Iterator[tuple[str, Rows, int]]:
    blocks = -(-4 * MIN_SHARED_KEYS // shape.block_size)
    if shape.context < MIN_SHARED_KEYS:
        blocks = -(-MIN_SHARED_KEYS // shape.block_size)
    for count in shape.rows:
        if MIN_MEMBERS <= count <= _MAX_DECODES:
            keys = blocks * shape.block_size
            rows = [(keys + 1 + 5 * row % shape.context, 1) for row in range(count)]
            yield f"{count}, {keys} shared keys", rows, blocks


def _prompts(shape: Shape) -> Iterator[tuple[str, Rows, int]]:
    longest = max(shape.rows)
    yield f"1 x {longest}", [(longest, longest)], 0
    part = max(longest // 4, 2)
    rows = [(part + shape.context, part), (part, part), (shape.context, 1), (2 * part, part)]
    yield f"3 x {part} and one more", rows, 0


# Float8 keys and values are multiplied in float16, also if the queries are float32.
_FP8_TOLERANCE = {**ROUNDED, torch.float32: ROUNDED[torch.float16]}

for _name, _rows_of, _in_fp8 in (
    ("attention_decode", _decodes, False),
    ("attention_shared", _shared, False),
    ("attention_prompts", _prompts, False),
    ("attention_decode_fp8", _decodes, True),
    ("attention_shared_fp8", _shared, True),
    ("attention_prompts_fp8", _prompts, True),
):
    register(
        KernelSpec(
            name=_name,
            reference=_reference,
            triton=_triton,
            examples=_examples(_rows_of, _in_fp8),
            bytes_of=bytes_of,
            flops_of=_flops_of,
            tolerance=_FP8_TOLERANCE if _in_fp8 else ROUNDED,
        )
    )
