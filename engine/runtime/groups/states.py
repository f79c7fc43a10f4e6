"""Checkpoints of states, with which the prefix cache serves models whose layers keep states.

The state of a sequence is overwritten by each step. To resume after a cached prefix, a copy of the
state at its end is needed: a checkpoint. A row of a prompt ends where a checkpoint is to be taken,
and the runner copies the state after that row. Checkpoints are the entries of a side column of the
prefix cache. Entry e is state `max_slots` + e of the runner.
"""

from collections.abc import Sequence as Listed
from dataclasses import replace

import numpy as np

from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState
from engine.runtime.model_runner import NULL_BLOCK, BatchInputs, RunnerSpec
from engine.runtime.sequence import CacheExtension, Row, Sequence

# In prompts, there is a checkpoint after every so many blocks, and one after the last block whose
# tokens are not the whole prompt. The last token must be computed to get logits.
STRIDE = 32


class StateGroup(CacheExtension):
    """Takes checkpoints of running sequences. `first_state` is the index of checkpoint 0 among the
    states of the runner.
    """

    column: AuxBlockState
    # Blocks that a running sequence publishes are of no use without a checkpoint.
    publishes_at_once = False

    def __init__(self, pool: BlockPool, block_size: int, first_state: int) -> None:
        self.pool = pool
        self.column = AuxBlockState(pool, reach=1)
        self._block_size = block_size
        self._first_state = first_state
        # The checkpoints that each running sequence holds, by the index of the block at whose end
        # they are
        self._held: dict[Sequence, dict[int, int]] = {}

    def resume(self, seq: Sequence, entries: list[int], num_blocks: int, reserve: int) -> None:
        """Let a sequence start after a cached prefix. It holds the checkpoint while it runs,
        because a failed step starts over from there.
        """
        self.column.share(entries)
        self._held[seq] = dict.fromkeys((num_blocks - 1,), *entries) if entries else {}

    def row_length(self, seq: Sequence, start: int, count: int, room: int) -> int:
        """The length of a row that begins at `start`, shortened so that it ends at the next
        checkpoint.
        """
        last, step = self._last(seq), STRIDE * self._block_size
        if start >= last:
            return count
        return min(count, min(last, (start // step + 1) * step) - start)

    def granted(self, seq: Sequence, end: int) -> None:
        """Take an entry for a checkpoint after `end` tokens, if one belongs there and an entry is
        free.
        """
        size, held = self._block_size, self._held[seq]
        belongs = 0 < end <= self._last(seq) and (
            end == self._last(seq) or not end % (STRIDE * size)
        )
        if not belongs or end // size - 1 in held:
            return
        if self.pool.num_free + self.pool.num_evictable:
            held[end // size - 1] = self.column.take(1)[0]

    def entries(self, seq: Sequence, num_blocks: int) -> list[int]:
        """The checkpoint of each of the first blocks, or NULL_BLOCK."""
        held = self._held.get(seq, {})
        return [held.get(index, NULL_BLOCK) for index in range(num_blocks)]

    def committed(self, seq: Sequence, num_blocks: int | None = None) -> None:
        """Drop the checkpoints of the first `num_blocks` blocks, or all, but for the one with which
        the sequence started.
        """
        held = self._held[seq]
        for index in list(held):
            if index != seq.num_matched - 1 and (num_blocks is None or index < num_blocks):
                self.column.drop((held.pop(index),), can_resume=True)

    def release(self, seq: Sequence) -> None:
        self.column.drop(self._held.pop(seq, {}).values(), can_resume=True)

    def evict(self) -> int:
        return self.column.evict(self.pool.num_evictable)

    def reset(self) -> None:
        self.pool.reset()
        self._held.clear()

    def check_held(self, sequences: Listed[Sequence]) -> None:
        """Assert that reference counts agree with what the sequences hold."""
        self.pool.check(
            [list(held.values()) for held in self._held.values()], self.column.entries()
        )

    def add_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        """Add the states that rows start from, and those that they are copied to."""
        if not any(self._held[row.seq] for row in rows):
            return inputs
        size, first = self._block_size, self._first_state
        found = np.full((2, len(rows)), -1, np.int32)
        for index, (seq, start, length, *_) in enumerate(rows):
            matched, end, held = seq.num_matched * size, start + length, self._held[seq]
            if start == matched and matched:
                found[0, index] = first + held[seq.num_matched - 1]
            if not end % size and end > matched and end // size - 1 in held:
                found[1, index] = first + held[end // size - 1]
        return replace(inputs, state_load=found[0], state_save=found[1])

    def _last(self, seq: Sequence) -> int:
        return (seq.num_prompt - 1) // self._block_size * self._block_size


def state_group(spec: RunnerSpec) -> StateGroup | None:
    """The checkpoints of a runner, or None if it has none."""
    if not spec.num_checkpoints:
        return None
    pool = BlockPool(spec.num_checkpoints + 1)
    return StateGroup(pool, spec.block_size, spec.max_slots)
