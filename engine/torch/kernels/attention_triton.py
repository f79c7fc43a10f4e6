"""Paged attention by our own kernels. The host plans a step as lists of small work items.

Rows with one query are cut into spans of keys, which are computed in parallel (split-K). Rows with
several queries are cut into tiles of queries. If many rows share their first blocks, one work item
attends to the shared keys for many of these rows and reads the keys once. The lists and their
lengths are in device memory. A captured CUDA graph launches enough programs for the longest
possible lists, so it serves sequences of any length. The kernels are Triton code, except prefill,
and decode with a float8 cache, on Hopper, which are CUDA C++.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runners.runs import cut
from engine.runtime.model_runner import I32, BatchInputs
from engine.torch.kernels.attention_heads import (
    MANY_SPANS,
    AttentionHeads,
    Scratch,
    Tiles,
    tiles_for,
)
from engine.torch.kernels.cuda import attention as hopper
from engine.torch.kernels.cuda import decode as hopper_decode
from engine.torch.kernels.fp8 import FP8, dense_blocks
from engine.torch.transfer import to_device

KEY_BLOCK = 64  # the length of a span is a multiple of this many keys
MIN_SPAN = 128  # min keys of a span
SPARE_SPANS = 64  # a step may have this many more spans than rows, to split long rows
# With a float8 cache and at least FP8_ROWS rows, a step may have FP8_SPANS spans. These are enough
# for the small programs of many spans to keep the device busy. They take fewer instructions per
# key, which limit the speed of float8 attention.
FP8_ROWS, FP8_SPANS = 32, 320
LONE_PROGRAMS = 128  # max programs for a step with a single row; about one per multiprocessor
# If at least MIN_MEMBERS rows share a prefix of at least MIN_SHARED_KEYS keys, the prefix is read
# once for many rows. Any other prefix is read once per row.
MIN_SHARED_KEYS, MIN_MEMBERS = 256, 16
MAX_SPLITS = 8  # max number of spans that the keys of a shared prefix are cut into
# Number of programs to aim for when shared prefixes are cut into spans. This many programs keep the
# device busy. More programs would only write more partial results.
SHARED_PROGRAMS = 256
SPAN_FIELDS, TILE_FIELDS, SHARED_FIELDS = 4, 2, 5  # integers per item of each work list
NUM_COUNTS = 5  # table width, lengths of the lists, where the block tables start


@dataclass(frozen=True, slots=True)
class ListLengths:
    """The lengths of a step's work lists, or the max lengths that a captured graph allows."""

    spans: int
    tiles: int
    shared: int
    partials: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The plan of a step's attention. It has the step's work lists on the device."""

    arrays: Mapping[str, Tensor]
    room: ListLengths
    scratch: Scratch | None
    heads: AttentionHeads
    slopes: Tensor | None  # (N,), in units of scores before their scaling
    tiles: Tiles
    on_hopper: bool
    decodes_on_hopper: bool
    group: int  # heads of a program
    tile_tokens: int

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        *,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        # The queries of a fused projection are not next to each other.
        return self.attend_cached(q.contiguous(), cache, window, sinks)

    def attend_cached(
        self, q: Tensor, cache: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer: queries q (T, N, H) -> outputs (T, N, U). All keys and values,
        also those of this step, are in the cache.
        """
        if self.heads.latent:
            return self._attend_latents(q, cache)
        from engine.torch.kernels.triton import attention_decode
        from engine.torch.kernels.triton.attention_tile import Tile

        out = torch.empty_like(q)
        tiles, arrays = self.tiles, self._arrays(window)
        if self.room.spans:
            many = self.room.spans > MANY_SPANS
            assert self.scratch is not None
            attention_decode.decode(
                q,
                cache,
                out,
                arrays,
                self.scratch,
                self.heads,
                window=window or 0,
                slopes=self.slopes,
                sinks=sinks,
                shares="shared" in arrays and self.room.shared > 0,
                on_hopper=self.decodes_on_hopper,
                span_tile=Tile(*(tiles.many_spans if many else tiles.span)),
                shared_tile=Tile(*tiles.shared),
            )
        if self.room.tiles:
            self._attend_prompts(q, cache, out, arrays, window or 0, sinks)
        return out

    def _attend_latents(self, q: Tensor, cache: Tensor) -> Tensor:
        from engine.torch.kernels.triton import attention_latent
        from engine.torch.kernels.triton.attention_tile import Tile

        out = q.new_empty((*q.shape[:2], self.heads.latent))
        arrays, heads, tiles = self.arrays, self.heads, self.tiles
        if self.room.spans:
            assert self.scratch is not None
            span, scratch = Tile(*tiles.span), self.scratch
            attention_latent.decode(q, cache, out, arrays, scratch, heads, self.group, span)
        if self.room.tiles:
            chunk = Tile(*tiles.chunk)
            attention_latent.prefill(q, cache, out, arrays, heads, self.group, chunk)
        return out

    def _arrays(self, window: int | None) -> Mapping[str, Tensor]:
        """The arrays for layers with this window. The first four counts are the same for all
        layers. The fifth is where the layers' block tables start.
        """
        if window is None or "window_counts" not in self.arrays:
            return self.arrays
        return {**self.arrays, "counts": self.arrays["window_counts"]}

    def _attend_prompts(
        self,
        q: Tensor,
        cache: Tensor,
        out: Tensor,
        arrays: Mapping[str, Tensor],
        window: int,
        sinks: Tensor | None,
    ) -> None:
        from engine.torch.kernels.triton import attention_prefill
        from engine.torch.kernels.triton.attention_tile import Tile

        if self.on_hopper and cache.dtype == FP8 and "dense_blocks" in arrays:
            cache = dense_blocks(cache, arrays["dense_blocks"], q.dtype)
            arrays = {**arrays, "tables": arrays["dense_tables"]}
        if self.on_hopper and cache.dtype != FP8:
            scale = self.heads.scale
            hopper.prefill(q, cache, out, arrays, window=window, scale=scale)
            return
        attention_prefill.prefill(
            q,
            cache,
            out,
            arrays,
            self.heads,
            window=window,
            slopes=self.slopes,
            sinks=sinks,
            tokens=self.tile_tokens,
            tile=Tile(*self.tiles.chunk),
        )


class TritonAttention:
    def __init__(self, heads: AttentionHeads, *, block_size: int, dtype: torch.dtype) -> None:
        self._heads = heads
        self._block_size = block_size
        # A shared prefix is attended to as a whole, which would be wrong in layers with a window.
        # ALiBi depends on the positions of queries, which differ between the rows that share.
        # Latent attention has no kernel for shared prefixes.
        plain = heads.windows == (None,) and heads.alibi_bias is None
        self.can_share = plain and not heads.latent
        self._group = heads.heads_per_program
        self._num_groups = heads.num_heads // self._group
        self._tiles_of = tiles_for(heads, dtype)
        hopper_lines = None
        if heads.is_plain and not heads.latent:  # the Hopper kernel only scales and masks scores
            hopper_lines = hopper.lines_of_tile(heads.head_dim, self._group, block_size, dtype)
        self._on_hopper = hopper_lines is not None
        self._tile_tokens = (hopper_lines or self._tiles_of.chunk[0]) // self._group
        self._tile_members = self._tiles_of.shared[0] // self._group
        self._decodes_on_hopper = hopper_decode.supports(heads, block_size, dtype)
        self._scratch: Scratch | None = None
        self._slopes: Tensor | None = None

    def plan(self, inputs: BatchInputs, positions: Tensor) -> TritonPlan:
        arrays, room = self.lists(inputs)
        given = {
            **arrays,
            "query_start": inputs.query_start,
            "seq_lens": inputs.seq_lens,
            "tables": all_tables(inputs),
        }
        on_device = {name: to_device(array, positions.device) for name, array in given.items()}
        self.reserve(len(inputs.seq_lens), positions.device)
        return self.plan_on(on_device, room)

    def plan_on(self, arrays: Mapping[str, Tensor], room: ListLengths) -> TritonPlan:
        """Makes a plan from work lists on the device. The lists need not be filled before the plan
        runs.
        """
        return TritonPlan(
            arrays,
            room,
            self._scratch,
            self._heads,
            self._slopes,
            self._tiles_of,
            self._on_hopper,
            self._decodes_on_hopper,
            self._group,
            self._tile_tokens,
        )

    def reserve(self, rows: int, device: torch.device) -> None:
        """Allocates scratch memory for the partial results of up to `rows` rows, if the present
        scratch memory is too small. Plans that were made earlier keep their scratch memory. Also
        computes the slopes of ALiBi.
        """
        heads = self._heads
        self._reserve_slopes(device)
        if self._scratch is None or len(self._scratch.arrived) < rows:
            sizes = heads.num_heads, self._num_groups, heads.value_dim
            partials = MAX_SPLITS * rows + self._span_room(rows)
            self._scratch = Scratch(partials, rows, *sizes, device)

    def _reserve_slopes(self, device: torch.device) -> None:
        heads = self._heads
        if self._slopes is None and (slopes := heads.slopes(device)) is not None:
            self._slopes = slopes / (heads.softcap or heads.scale)

    def _span_room(self, rows: int) -> int:
        if self._decodes_on_hopper:
            return hopper_decode.span_room(rows)
        return span_room(rows, self._heads.in_fp8)

    def room_for(self, tokens: int, rows: int, *, only_decodes: bool, shares: bool) -> ListLengths:
        """The max lengths of the work lists of a step with at most `tokens` tokens and `rows` rows.
        `shares` says whether the step may have work items for shared prefixes.
        """
        spans = self._span_room(rows)
        tiles = 0 if only_decodes else tokens // self._tile_tokens + rows
        if not shares:
            return ListLengths(spans, tiles, 0, spans)
        return ListLengths(spans, tiles, max(rows, MAX_SPLITS), MAX_SPLITS * rows + spans)

    def has_shared(self, inputs: BatchInputs) -> bool:
        """Whether a decode-only step may have work items for shared prefixes."""
        if not self.can_share or not len(inputs.prefix_blocks):
            return False
        return int(inputs.prefix_blocks.max()) * self._block_size >= MIN_SHARED_KEYS

    def lists(
        self, inputs: BatchInputs, room: ListLengths | None = None
    ) -> tuple[dict[str, I32], ListLengths]:
        """Returns the work lists of a step by name, and their lengths. If `room` is given, no list
        is longer than `room` allows, and `room` is returned instead of the lengths.
        """
        counts = np.diff(inputs.query_start)
        decodes = np.flatnonzero(counts == 1)
        chunks = np.flatnonzero(counts > 1)
        shared, members, begins, splits = self._shared(inputs, decodes, len(chunks) > 0)
        most = room.spans if room is not None else self._span_room(len(decodes))
        smallest = MIN_SPAN
        if self._decodes_on_hopper:
            smallest = hopper_decode.MIN_SPAN
            most = min(most, hopper_decode.span_room(len(decodes)))
        elif len(decodes) == 1:
            most = min(most, 1 + LONE_PROGRAMS // self._num_groups)
        spans, partials = _spans(inputs, decodes, begins, splits, most, smallest)
        tiles = self._tiles(inputs.seq_lens - counts, counts, chunks)
        total = int(partials[:, 1].sum())
        lengths = (inputs.block_tables.shape[1], len(spans), len(tiles), len(shared))
        lists = {
            "counts": np.array((*lengths, 0), np.int32),
            "spans": spans,
            "partials": partials,
            "tiles": tiles,
            "shared": shared,
            "members": members if len(members) else np.zeros(0, np.int32),
        }
        if inputs.window_tables is not None:
            lists["window_counts"] = np.array((*lengths, inputs.block_tables.size), np.int32)
        return lists, room or ListLengths(len(spans), len(tiles), len(shared), total)

    def _tiles(self, begins: I32, counts: I32, rows: np.ndarray) -> I32:
        """Cuts rows with several queries into tiles. Returns the row and the first query of each
        tile. Tiles with the most keys come first. `begins` has the position of each row's first
        query.
        """
        which, queries = cut(counts[rows], self._tile_tokens)
        tiles = np.stack((rows[which], queries), axis=1).astype(np.int32)
        return tiles[np.argsort(-(begins[tiles[:, 0]] + tiles[:, 1]), kind="stable")]

    def _shared(
        self, inputs: BatchInputs, decodes: np.ndarray, has_chunks: bool
    ) -> tuple[I32, I32, I32, I32]:
        """Plans the work items for shared prefixes. Returns the items, the rows that they compute,
        and two arrays with a value per row of the step. The first has the number of keys that the
        row shares. The second has the number of spans that these keys are cut into.
        """
        rows = len(inputs.seq_lens)
        begins, splits = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        none = np.zeros((0, SHARED_FIELDS), np.int32), np.zeros(0, np.int32), begins, splits
        if has_chunks or not self.can_share or not len(inputs.prefix_blocks):
            return none
        keys = inputs.prefix_blocks * self._block_size
        groups = [
            (int(keys[group]), rows_of)
            for group in map(int, np.flatnonzero(keys >= MIN_SHARED_KEYS))
            if len(rows_of := np.flatnonzero(inputs.prefix_groups == group)) >= MIN_MEMBERS
        ]
        per_tile = self._tile_members
        num_tiles = sum(-(-len(rows_of) // per_tile) for _, rows_of in groups)
        useful = SHARED_PROGRAMS // (num_tiles * self._heads.num_kv_heads or 1)
        most = min(MAX_SPLITS, max(1, useful))
        items: list[tuple[int, ...]] = []
        first_member = 0
        for length, rows_of in groups:
            num_splits = min(most, -(-length // MIN_SHARED_KEYS))
            span = -(-length // (num_splits * KEY_BLOCK)) * KEY_BLOCK
            starts = range(0, length, span)
            begins[rows_of], splits[rows_of] = length, len(starts)
            for offset in range(0, len(rows_of), per_tile):
                size = min(per_tile, len(rows_of) - offset)
                items.extend(
                    (first_member + offset, size, start, min(start + span, length), index)
                    for index, start in enumerate(starts)
                )
            first_member += len(rows_of)
        if not items:
            return none
        members = np.concatenate([rows_of for _, rows_of in groups]).astype(np.int32)
        return np.array(items, np.int32), members, begins, splits


def all_tables(inputs: BatchInputs) -> I32:
    """The block tables of all rows and, after them, those of layers with a sliding window, if these
    have blocks of their own.
    """
    if inputs.window_tables is None:
        return np.ascontiguousarray(inputs.block_tables)
    return np.concatenate((inputs.block_tables, inputs.window_tables))


def span_room(rows: int, in_fp8: bool) -> int:
    return max(FP8_SPANS if in_fp8 and rows >= FP8_ROWS else SPARE_SPANS, 2 * rows)


def _spans(
    inputs: BatchInputs, decodes: np.ndarray, begins: I32, splits: I32, most: int, smallest: int
) -> tuple[I32, I32]:
    """Cuts rows with one query into at most `most` spans of at least `smallest` keys. A shared
    prefix is not cut here.

    Returns (row, first key, last key + 1, index of the partial result) for each span, and (index of
    the first partial result, number of partial results) for each row of the step. The partial
    results of a row's shared prefix come first.
    """
    partials = np.zeros((len(begins), 2), np.int32)
    if not len(decodes):
        return np.zeros((0, SPAN_FIELDS), np.int32), partials
    own = inputs.seq_lens[decodes] - begins[decodes]
    slack = 1.25 if len(decodes) > 1 else 1.0
    size = int(slack * own.sum()) // (most - len(decodes)) if most > len(decodes) else 1 << 30
    size = max(smallest, -(-size // KEY_BLOCK) * KEY_BLOCK)
    each = -(-own // size)
    # All spans of a row have the same number of keys.
    width = np.repeat(-(-own // (each * KEY_BLOCK)) * KEY_BLOCK, each)
    places = each + splits[decodes]
    ends = np.cumsum(places)
    partials[decodes, 0] = ends - places
    partials[decodes, 1] = places
    spans = np.empty((int(each.sum()), SPAN_FIELDS), np.int32)
    index = np.arange(len(spans)) - np.repeat(np.cumsum(each) - each, each)
    spans[:, 0] = np.repeat(decodes, each)
    spans[:, 1] = np.repeat(begins[decodes], each) + index * width
    spans[:, 2] = spans[:, 1] + width
    spans[:, 3] = np.repeat(partials[decodes, 0] + splits[decodes], each) + index
    # The longest spans come first, so that no long span starts when other spans are nearly done.
    return spans[np.argsort(-width, kind="stable")], partials
