"""The block group of layers with a sliding window. Blocks that the window has left are freed while
the sequence runs.

Layers without a window have block tables that cover the whole sequence. Layers with a window have
block tables and a block pool of their own. So the memory of these layers holds only one window per
sequence, however long the sequence is.
"""

from collections.abc import Iterable

from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState
from engine.runtime.model_runner import NULL_BLOCK, RunnerSpec
from engine.runtime.sequence import Sequence


class WindowGroup:
    """Allocates and frees the windowed blocks of sequences.

    `window` is the largest window of all layers, in tokens. A row of a step has at most `max_row`
    tokens, so that the blocks of one sequence always fit an empty pool, also while one more step is
    in flight.
    """

    def __init__(self, pool: BlockPool, window: int, block_size: int, max_row: int) -> None:
        self.pool = pool
        self.column = AuxBlockState(pool, -(-(window - 1) // block_size))
        self._window = window
        self._block_size = block_size
        fitting = ((pool.num_usable - 1) * block_size - window + 2) // 2
        assert fitting >= 1, (pool.num_usable, min_window_blocks(window, block_size, 1))
        self.max_row = min(max_row, fitting)
        # The most blocks that a sequence needs at a time.
        self._span = min_window_blocks(window, block_size, self.max_row)

    def resume(self, seq: Sequence, entries: list[int], num_blocks: int) -> None:
        """Let a sequence start after a cached prefix of `num_blocks` blocks, the last of which have
        the windowed blocks `entries`.
        """
        self.column.share(entries)
        seq.num_window_freed = num_blocks - len(entries)
        seq.window_blocks = [NULL_BLOCK] * seq.num_window_freed + entries

    def extend(self, seq: Sequence, num_tokens: int, spare: int) -> bool:
        """Extend the windowed block table so that it has room for `num_tokens` tokens. While the
        reserved tokens are computed, the sequence gets all blocks that it may need at a time.
        Returns False if fewer than `spare` blocks would remain free or evictable.
        """
        size = self._block_size
        first = self._first(seq.num_confirmed)
        ahead = min(-(-seq.reserved // size), first + self._span)
        needed = max(-(-num_tokens // size), ahead) - len(seq.window_blocks)
        if needed + spare > self.pool.num_free + self.pool.num_evictable:
            return False
        seq.window_blocks += self.column.take(max(needed, 0))
        return True

    def free_passed(self, seq: Sequence) -> None:
        """Free the blocks that no later token of the sequence can attend to. Tokens of steps in
        flight count as later tokens, because a failed step is repeated.
        """
        table, start = seq.window_blocks, seq.num_window_freed
        first = min(self._first(seq.num_confirmed), len(table))
        if first <= start:
            return
        resumed = min(max(start, seq.num_matched), first)
        self.column.drop(table[start:resumed], can_resume=True)
        self.column.drop(table[resumed:first], can_resume=False)
        table[start:first] = [NULL_BLOCK] * (first - start)
        seq.num_window_freed = first

    def release(self, seq: Sequence) -> None:
        self.column.drop(seq.window_blocks[seq.num_window_freed :], can_resume=True)
        seq.window_blocks = []
        seq.num_window_freed = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that reference counts agree with the sequences' windowed block tables, and that no
        block is missing which a later token can attend to.
        """
        held = [seq.window_blocks[seq.num_window_freed :] for seq in sequences]
        self.pool.check(held, self.column.entries())
        for seq in sequences:
            freed, first = seq.num_window_freed, self._first(seq.num_confirmed)
            assert freed <= first and not any(seq.window_blocks[:freed]), seq.request_id
            assert len(seq.window_blocks) * self._block_size >= seq.num_computed, seq.request_id

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
    return WindowGroup(BlockPool(spec.num_window_blocks), spec.window, spec.block_size, max_row)
