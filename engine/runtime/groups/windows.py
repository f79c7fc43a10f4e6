"""The block group of layers with a sliding window. Blocks that the window has left are freed while
the sequence runs.

Layers without a window have block tables that cover the whole sequence. Layers with a window have
block tables and a block pool of their own. So the memory of these layers holds only one window per
sequence, however long the sequence is.
"""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from engine.core.interfaces.stats import EngineStats
from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState
from engine.runtime.model_runner import I32, I64, NULL_BLOCK, BatchInputs, RunnerSpec
from engine.runtime.sequence import CacheExtension, Row, Sequence


@dataclass(slots=True)
class WindowTable:
    """The block table of a running sequence for the layers with a window. It is append-only. Blocks
    that the window has left are freed, and replaced by NULL_BLOCK.
    """

    blocks: list[int] = field(default_factory=list)
    num_freed: int = 0  # number of leading places that are NULL_BLOCK
    reserved: int = 0  # tokens for which admission guaranteed room
    num_copied: int = 0  # length of the copy in `WindowGroup.by_slot`


class WindowGroup(CacheExtension):
    """Allocates and frees the windowed blocks of sequences.

    `window` is the largest window of all layers, in tokens. A row of a step has at most `max_row`
    tokens, so that the blocks of one sequence always fit an empty pool, also while one more step is
    in flight. `num_slots` sequences of `max_blocks` blocks run at most.
    """

    column: AuxBlockState

    def __init__(
        self,
        pool: BlockPool,
        window: int,
        block_size: int,
        max_row: int,
        num_slots: int,
        max_blocks: int,
    ) -> None:
        self.pool = pool
        self.column = AuxBlockState(pool, -(-(window - 1) // block_size))
        self.tables: dict[Sequence, WindowTable] = {}  # of running sequences
        self.by_slot: I32 = np.zeros((num_slots, max_blocks), np.int32)  # copies of the tables
        self._has_grown = False  # whether the copies have changed since the last step
        self._window = window
        self._block_size = block_size
        fitting = ((pool.num_usable - 1) * block_size - window + 2) // 2
        assert fitting >= 1, (pool.num_usable, min_window_blocks(window, block_size, 1))
        self.max_row = min(max_row, fitting)
        # The most blocks that a sequence needs at a time.
        self._span = min_window_blocks(window, block_size, self.max_row)

    def resume(self, seq: Sequence, entries: list[int], num_blocks: int, reserve: int) -> None:
        self.column.share(entries)
        num_freed = num_blocks - len(entries)
        self.tables[seq] = WindowTable([NULL_BLOCK] * num_freed + entries, num_freed, reserve)

    def starts_over(self, seq: Sequence) -> bool:
        """A pinned sequence must not share windowed blocks: if others hold them too, it can't count
        on the blocks that its window leaves.
        """
        return seq.is_pinned

    def extend(self, seq: Sequence, num_tokens: int, spare: int) -> bool:
        """Extend the windowed block table so that it has room for `num_tokens` tokens. While the
        reserved tokens are computed, the sequence gets all blocks that it may need at a time.
        """
        size, table = self._block_size, self.tables[seq]
        self._free_passed(seq, table)
        first = self._first(seq.num_confirmed)
        ahead = min(-(-table.reserved // size), first + self._span)
        needed = max(-(-num_tokens // size), ahead) - len(table.blocks)
        if needed + spare > self.pool.num_free + self.pool.num_evictable:
            return False
        table.blocks += self.column.take(max(needed, 0))
        return True

    def room(self, seq: Sequence, room: int) -> int:
        # A windowed table is never longer than the other one.
        return len(self.tables[seq].blocks) * self._block_size

    def entries(self, seq: Sequence, num_blocks: int) -> list[int]:
        table = self.tables.get(seq)
        return [] if table is None else table.blocks[:num_blocks]

    def _free_passed(self, seq: Sequence, table: WindowTable) -> None:
        """Free the blocks that no later token of the sequence can attend to. Tokens of steps in
        flight count as later tokens, because a failed step is repeated.
        """
        blocks, start = table.blocks, table.num_freed
        first = min(self._first(seq.num_confirmed), len(blocks))
        if first <= start:
            return
        resumed = min(max(start, seq.num_matched), first)
        self.column.drop(blocks[start:resumed], can_resume=True)
        self.column.drop(blocks[resumed:first], can_resume=False)
        blocks[start:first] = [NULL_BLOCK] * (first - start)
        table.num_freed = first

    def release(self, seq: Sequence) -> None:
        table = self.tables.pop(seq, None)
        if table is not None:
            self.column.drop(table.blocks[table.num_freed :], can_resume=True)

    def evict(self) -> int:
        return self.column.evict(self.pool.num_evictable)

    def reset(self) -> None:
        self.pool.reset()
        self.tables.clear()

    def sync(self, seq: Sequence, slot: int, is_new: bool) -> None:
        table, copy = self.tables[seq], self.by_slot[slot]
        if is_new:
            copy[:], table.num_copied = NULL_BLOCK, 0
        copy[table.num_copied : len(table.blocks)] = table.blocks[table.num_copied :]
        copy[: table.num_freed] = NULL_BLOCK
        table.num_copied = len(table.blocks)
        self._has_grown = True

    def add_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        self._has_grown = False
        slots = np.repeat(inputs.slots, np.diff(inputs.query_start))
        return replace(
            inputs,
            window_tables=self.by_slot[inputs.slots, : inputs.block_tables.shape[1]],
            window_slots=self._write_slots(slots, inputs.positions),
        )

    def advance_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        tables, width = inputs.window_tables, inputs.block_tables.shape[1]
        if self._has_grown or tables is None or tables.shape[1] != width:
            self._has_grown, tables = False, self.by_slot[inputs.slots, :width]
        slots = self._write_slots(inputs.slots, inputs.positions)
        return replace(inputs, window_tables=tables, window_slots=slots)

    def _write_slots(self, slots: I32, positions: I32) -> I64:
        blocks, offsets = np.divmod(positions, self._block_size)
        return self.by_slot[slots, blocks].astype(np.int64) * self._block_size + offsets

    def add_stats(self, stats: EngineStats) -> EngineStats:
        return structs.replace(
            stats,
            num_window_blocks=self.pool.num_usable,
            num_free_window_blocks=self.pool.num_free,
            num_referenced_window_blocks=self.pool.num_referenced,
        )

    def check_held(self, sequences: Listed[Sequence]) -> None:
        """Assert that reference counts agree with the sequences' windowed block tables, and that no
        block is missing which a later token can attend to.
        """
        held = [table.blocks[table.num_freed :] for table in self.tables.values()]
        self.pool.check(held, self.column.entries())
        assert self.tables.keys() >= set(sequences), "a sequence without windowed blocks"
        for seq, table in self.tables.items():
            freed, first = table.num_freed, self._first(seq.num_confirmed)
            assert freed <= first and not any(table.blocks[:freed]), seq.request_id
            assert len(table.blocks) * self._block_size >= seq.num_computed, seq.request_id

    def _first(self, num_confirmed: int) -> int:
        """The first block that the token after `num_confirmed` tokens can attend to."""
        return max(0, num_confirmed - self._window + 1) // self._block_size


def min_window_blocks(window: int, block_size: int, max_row: int) -> int:
    """How many windowed blocks one sequence needs at most, if rows have up to `max_row` tokens: for
    the window before the row, the row, and the row of a step in flight.
    """
    num_tokens = window - 1 + 2 * max_row
    return -(-(num_tokens - 1) // block_size) + 1


def window_group(spec: RunnerSpec, max_row: int) -> WindowGroup | None:
    """The windowed block group of a runner, or None if all its layers use the same blocks."""
    if spec.window is None:
        return None
    pool, size = BlockPool(spec.num_window_blocks), spec.block_size
    max_blocks = -(-spec.max_seq_len // size)
    return WindowGroup(pool, spec.window, size, max_row, spec.max_slots, max_blocks)
