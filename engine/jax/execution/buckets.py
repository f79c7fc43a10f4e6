"""The shapes of steps. XLA compiles a program per shape, so steps are padded to one of few shapes.

Decode-only steps and steps with prefill use different programs. The number of tokens is padded to a
min size times a power of two. A program for fewer tokens than the min size would hardly be faster.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.runners.layout import Layout
from engine.runners.runs import cut
from engine.runtime.model_runner import I32, BatchInputs

# Decode-only steps of up to FEW_ROWS rows are padded to FEW_ROWS, larger ones to MIN_ROWS or more.
MIN_ROWS = 8
FEW_ROWS = 2  # not 1, because XLA copies the whole KV cache when only one token is written to it
MIN_PROMPT_TOKENS = 32
TILE = 32  # max queries per attention item (see `Work`) in steps with prefill
MIN_TABLE_TOKENS = 2048
TABLE_GROWTH = 4


class Bucket(NamedTuple):
    """The sizes that a step is padded to. XLA compiles a program for each combination."""

    num_tokens: int
    num_rows: int
    table_width: int
    tile: int  # max queries per attention item
    num_items: int
    has_windows: bool = False  # layers with a sliding window have block tables of their own


@cache
def step_layout(bucket: Bucket) -> Layout:
    """The layout of a step's int32 arrays in one vector. All padding is 0, so padding tokens write
    their keys and values to block 0, which belongs to no sequence.
    """
    tokens, items = bucket.num_tokens, bucket.num_items
    sizes = {
        "token_ids": tokens,
        "positions": tokens,
        "write_slots": tokens,
        "slots": tokens,  # the slot of each token's sequence
        "logit_rows": tokens,  # indices of the tokens whose logits `sample` needs
        "tables": bucket.num_rows * bucket.table_width,
        "token": items,  # this and the next two arrays are attention items, see `Work`
        "length": items,
        "row": items,
        "num_items": 2,  # the number of items with one query, and the number of all items
    }
    if bucket.has_windows:
        sizes |= {"window_slots": tokens, "window_tables": sizes["tables"]}
    return Layout(sizes, dict.fromkeys(sizes, 0))


def padded_rows(count: int) -> int:
    return FEW_ROWS if count <= FEW_ROWS else _doubled(MIN_ROWS, count)


def _doubled(size: int, count: int) -> int:
    while size < count:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class Buckets:
    """Chooses the padded shape of each step of a runner."""

    max_slots: int
    block_size: int
    max_seq_len: int
    chunk: int  # attention reads this many positions at once; block tables are padded to multiples

    def of(self, inputs: BatchInputs) -> Bucket:
        num_tokens, num_rows = len(inputs.token_ids), len(inputs.slots)
        width = self._table_width(inputs.block_tables.shape[1])
        has_windows = inputs.window_tables is not None
        if num_tokens == num_rows:
            size = padded_rows(num_rows)
            return Bucket(size, size, width, 1, size, has_windows)
        size = _doubled(MIN_PROMPT_TOKENS, num_tokens)
        rows = min(size, padded_rows(self.max_slots))
        return Bucket(size, rows, width, TILE, size // TILE + rows, has_windows)

    def _table_width(self, num_blocks: int) -> int:
        tokens, longest = MIN_TABLE_TOKENS, num_blocks * self.block_size
        while tokens < longest:
            tokens *= TABLE_GROWTH
        tokens = min(tokens, max(longest, self.max_seq_len))
        chunk = max(self.chunk, self.block_size)
        return -(-tokens // chunk) * (chunk // self.block_size)


def packed_step(inputs: BatchInputs, bucket: Bucket) -> I32:
    """All arrays of a step, padded to the bucket's sizes and packed into one vector."""
    counts = np.diff(inputs.query_start)
    tokens, lengths, rows = attention_items(inputs.query_start, counts, bucket.tile)
    arrays: dict[str, NDArray[np.generic]] = {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "write_slots": inputs.write_slots,
        "slots": np.repeat(inputs.slots, counts),
        "logit_rows": inputs.logit_rows,
        "tables": _padded(inputs.block_tables, bucket),
        "token": tokens,
        "length": lengths,
        "row": rows,
        "num_items": np.array([np.count_nonzero(lengths == 1), len(tokens)]),
    }
    if inputs.window_tables is not None and inputs.window_slots is not None:
        arrays["window_slots"] = inputs.window_slots
        arrays["window_tables"] = _padded(inputs.window_tables, bucket)
    return step_layout(bucket).packed(arrays)


def _padded(tables: I32, bucket: Bucket) -> I32:
    padded = np.zeros((bucket.num_rows, bucket.table_width), np.int32)
    padded[: len(tables), : tables.shape[1]] = tables
    return padded


def attention_items(query_start: I32, counts: I32, tile: int) -> tuple[I32, I32, I32]:
    """Cuts the rows of a batch into attention items of at most `tile` queries.

    Returns the first token, the number of queries and the row of each item. Items with one query
    come first.
    """
    if tile == 1:
        rows = np.arange(len(counts), dtype=np.int32)
        return rows, np.ones_like(rows), rows
    rows, offsets = cut(counts, tile)
    lengths = np.minimum(tile, counts[rows] - offsets)
    order = np.argsort(lengths != 1, kind="stable")
    tokens = (query_start[rows] + offsets)[order].astype(np.int32)
    return tokens, lengths[order].astype(np.int32), rows[order]
