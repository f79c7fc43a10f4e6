"""Checkpoints of states, with which the prefix cache serves models whose layers keep states.

The state of a sequence is overwritten by each step. To resume after a cached prefix, a copy of the
state at its end is needed: a checkpoint. A row of a prompt ends where a checkpoint is to be taken,
and the runner copies the state after that row. Checkpoints are the entries of a side column of the
prefix cache. Entry e is state `max_slots` + e of the runner.
"""

from collections.abc import Iterable

import numpy as np

from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState
from engine.runtime.model_runner import I32, NULL_BLOCK, RunnerSpec
from engine.runtime.sequence import Row, Sequence

# In prompts, there is a checkpoint after every so many blocks, and one after the last block whose
# tokens are not the whole prompt. The last token must be computed to get logits.
STRIDE = 32


class StateGroup:
    """Takes checkpoints of running sequences. `Sequence.checkpoints` has those that a sequence
    holds, by the index of the block at whose end they are.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.column = AuxBlockState(pool, reach=1)
        self._block_size = block_size

    def resume(self, seq: Sequence, entries: list[int], num_blocks: int) -> None:
        """Let a sequence start after a cached prefix. It holds the checkpoint while it runs,
        because a failed step starts over from there.
        """
        self.column.share(entries)
        seq.checkpoints = dict.fromkeys((num_blocks - 1,), *entries) if entries else {}

    def cut(self, seq: Sequence, start: int, count: int) -> int:
        """The length of a row that begins at `start`, shortened so that it ends at the next
        checkpoint.
        """
        last, step = self._last(seq), STRIDE * self._block_size
        if start >= last:
            return count
        return min(count, min(last, (start // step + 1) * step) - start)

    def reserve(self, seq: Sequence, end: int) -> None:
        """Take an entry for a checkpoint after `end` tokens, if one belongs there and an entry is
        free.
        """
        size = self._block_size
        belongs = 0 < end <= self._last(seq) and (
            end == self._last(seq) or not end % (STRIDE * size)
        )
        if not belongs or end // size - 1 in seq.checkpoints:
            return
        if self.pool.num_free + self.pool.num_evictable:
            seq.checkpoints[end // size - 1] = self.column.take(1)[0]

    def entries(self, seq: Sequence, num_blocks: int) -> list[int]:
        """The checkpoint of each of the first blocks, or NULL_BLOCK."""
        return [seq.checkpoints.get(index, NULL_BLOCK) for index in range(num_blocks)]

    def drop_taken(self, seq: Sequence, num_blocks: int | None = None) -> None:
        """Drop the checkpoints of the first `num_blocks` blocks, or all, but for the one with which
        the sequence started.
        """
        for index in list(seq.checkpoints):
            if index != seq.num_matched - 1 and (num_blocks is None or index < num_blocks):
                self.column.drop((seq.checkpoints.pop(index),), can_resume=True)

    def release(self, seq: Sequence) -> None:
        self.column.drop(seq.checkpoints.values(), can_resume=True)
        seq.checkpoints = {}

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that reference counts agree with what the sequences hold."""
        held = [list(seq.checkpoints.values()) for seq in sequences]
        self.pool.check(held, self.column.entries())

    def _last(self, seq: Sequence) -> int:
        return (seq.num_prompt - 1) // self._block_size * self._block_size


def state_group(spec: RunnerSpec) -> StateGroup | None:
    """The checkpoints of a runner, or None if it has none."""
    if not spec.num_checkpoints:
        return None
    return StateGroup(BlockPool(spec.num_checkpoints + 1), spec.block_size)


def checkpoint_arrays(rows: tuple[Row, ...], spec: RunnerSpec) -> tuple[I32 | None, I32 | None]:
    """The states that rows start from, and those that they are copied to (`state_load` and
    `state_save` of `BatchInputs`).
    """
    if not any(row.seq.checkpoints for row in rows):
        return None, None
    size, first = spec.block_size, spec.max_slots
    found = np.full((2, len(rows)), -1, np.int32)
    for index, (seq, start, length, *_) in enumerate(rows):
        matched, end = seq.num_matched * size, start + length
        if start == matched and matched:
            found[0, index] = first + seq.checkpoints[seq.num_matched - 1]
        if not end % size and end > matched and end // size - 1 in seq.checkpoints:
            found[1, index] = first + seq.checkpoints[end // size - 1]
    return found[0], found[1]
