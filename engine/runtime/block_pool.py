"""Counts the references to the blocks of the paged KV cache.

A sequence holds a reference to each of its blocks. The prefix cache holds a reference to each
cached block. A block without references is free. A block to which only the prefix cache holds a
reference can be evicted. Block 0 is the null block, which is never allocated.
"""

from collections.abc import Callable, Iterable, Sequence

from engine.runtime.model_runner import NULL_BLOCK


class BlockPool:
    """Counts the references to each block of the KV pool. Invariant: refs[b] == (1 if b is in the
    prefix cache) + number of sequences that hold b.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.num_blocks = num_blocks
        # Called with each block that leaves the prefix cache, if somebody wants to know.
        self.on_uncached: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Free every block."""
        num_blocks = self.num_blocks
        self.num_evictable = 0
        self._refs = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        # The free list is a stack. The block that was freed last is reused first, because it may
        # still be in the CPU's cache.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        """Number of blocks that at least one sequence holds."""
        return self.num_usable - self.num_free - self.num_evictable

    @property
    def num_cached(self) -> int:
        return self._cached.count(1)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """How many of these blocks can be evicted, because only the prefix cache holds them."""
        return sum(1 for b in blocks if self._cached[b] and self._refs[b] == 1)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks for a sequence. Each gets one reference. The caller has checked
        `num_free`.
        """
        assert 0 <= count <= len(self._free), (count, len(self._free))
        if not count:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block, for a sequence that starts to use these blocks."""
        for block in blocks:
            refs = self._refs[block]
            assert refs > 0, f"block {block} is free and can't be shared"
            if refs == 1 and self._cached[block]:
                self.num_evictable -= 1
            self._refs[block] = refs + 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Drop a sequence's references to its blocks. Blocks without references become free."""
        for block in blocks:
            refs = self._refs[block] - 1
            assert refs >= 0, f"block {block} dropped more often than it was held"
            self._refs[block] = refs
            if refs == 0:
                self._free.append(block)
            elif refs == 1 and self._cached[block]:
                self.num_evictable += 1

    def cache(self, blocks: Iterable[int]) -> None:
        """Add the prefix cache's reference to blocks that a sequence still holds."""
        for block in blocks:
            assert not self._cached[block] and self._refs[block] > 0, block
            self._cached[block] = 1
            self._refs[block] += 1

    def uncache(self, block: int) -> None:
        """Drop the prefix cache's reference to a block that no sequence holds. The block becomes
        free.
        """
        assert self._cached[block] and self._refs[block] == 1, block
        self._cached[block] = 0
        self._refs[block] = 0
        self.num_evictable -= 1
        self._free.append(block)
        if self.on_uncached is not None:
            self.on_uncached(block)

    def check(self, holders: Iterable[Iterable[int]], cached: Iterable[int]) -> None:
        """Count the references again, and raise AssertionError if a stored count is wrong.
        `holders` are the block lists of all sequences. `cached` are the blocks in the prefix cache.
        """
        expected = [0] * self.num_blocks
        for held in holders:
            for block in held:
                expected[block] += 1
        in_tree = set()
        for block in cached:
            assert block not in in_tree, f"block {block} is in the tree twice"
            in_tree.add(block)
            expected[block] += 1
        assert expected[NULL_BLOCK] == 0, "the null block is held"
        for block in range(self.num_blocks):
            assert expected[block] == self._refs[block], (block, expected[block], self._refs[block])
            assert (block in in_tree) == bool(self._cached[block]), block
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {b for b in range(1, self.num_blocks) if expected[b] == 0}, "free list"
        evictable = sum(1 for b in in_tree if expected[b] == 1)
        assert evictable == self.num_evictable, (evictable, self.num_evictable)
