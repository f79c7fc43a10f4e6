"""Side columns of the prefix cache, for data that only some blocks of a cached prefix have.

The KV cache of layers with a sliding window is such data. To resume after a prefix, a sequence
needs only the windowed blocks of the last window. An entry of a column is the id of a block in the
column's own pool. `NULL_BLOCK` stands for a missing entry. The tree holds a reference to each
entry, as it does for its blocks. Each entry can be evicted by itself, also in the middle of a
prefix.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.runtime.block_pool import BlockPool
from engine.runtime.model_runner import NULL_BLOCK


class AuxBlockState:
    """One column of the prefix cache. A sequence can resume after L blocks only if the last `reach`
    of these blocks have entries, or all of them if L < reach.

    Entries that no sequence holds are evicted in two groups. First come the entries that were never
    needed to resume: running sequences have passed them. Then come those at which a sequence ended
    or resumed. In each group, the entry that has been unused for longest is evicted first.
    """

    def __init__(self, pool: BlockPool, reach: int) -> None:
        assert reach >= 0, reach
        self.pool = pool
        self.reach = reach
        self.num_evicted = 0
        self.clear()

    def clear(self) -> None:
        """Forget all entries without returning them to the pool. The caller resets the pool as
        well.
        """
        self._lists: dict[int, list[int]] = {}  # for each entry, the list of the node that has it
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._resumed: OrderedDict[int, None] = OrderedDict()

    def take(self, count: int) -> list[int]:
        """Take `count` blocks for a sequence. Evicts entries if too few blocks are free. The caller
        has checked that enough blocks are free or evictable.
        """
        short = count - self.pool.num_free
        if short > 0:
            evicted = self.evict(short)
            assert evicted == short, (evicted, short)
        return self.pool.take(count)

    def share(self, entries: Sequence[int]) -> None:
        """Add one reference to each entry, for a sequence that resumes with these entries."""
        self.pool.share(entries)
        for entry in entries:
            self._passed.pop(entry, None)
            self._resumed.pop(entry, None)

    def drop(self, entries: Iterable[int], can_resume: bool) -> None:
        """Drop a sequence's references. `can_resume` says that a sequence ended or resumed at these
        entries, so that they are evicted late.
        """
        queue = self._resumed if can_resume else self._passed
        pool = self.pool
        for entry in entries:
            pool.drop((entry,))
            if pool.refs(entry) == 1 and pool.is_cached(entry):
                queue[entry] = None

    def add(self, entries: list[int], index: int, entry: int) -> None:
        """Store an entry that a sequence holds at `index` of a node's list."""
        assert entries[index] == NULL_BLOCK, (entries[index], entry)
        self.pool.cache((entry,))
        entries[index] = entry
        self._lists[entry] = entries

    def move(self, entries: list[int]) -> None:
        """Register a list that took over the entries of another list."""
        for entry in entries:
            if entry != NULL_BLOCK:
                self._lists[entry] = entries

    def remove(self, entry: int) -> None:
        """Free an entry that no sequence holds. The caller has removed it from its list."""
        self.pool.uncache(entry)
        del self._lists[entry]
        if entry in self._passed:
            del self._passed[entry]
        else:
            del self._resumed[entry]
        self.num_evicted += 1

    def evict(self, count: int) -> int:
        """Free up to `count` entries that no sequence holds. Returns how many were freed."""
        freed = 0
        while freed < count and (queue := self._passed or self._resumed):
            entry = next(iter(queue))
            entries = self._lists[entry]
            entries[entries.index(entry)] = NULL_BLOCK
            self.remove(entry)
            freed += 1
        return freed

    def entries(self) -> Iterable[int]:
        return self._lists.keys()

    def check(self, lists: Iterable[list[int]]) -> None:
        """Assert that the column knows every entry of the tree, and that exactly the entries that
        no sequence holds can be evicted. `lists` are the lists of all nodes.
        """
        found = {entry: each for each in lists for entry in each if entry != NULL_BLOCK}
        assert found.keys() == self._lists.keys(), "entries of a side column"
        assert all(self._lists[entry] is each for entry, each in found.items()), "a list moved"
        assert not self._passed.keys() & self._resumed.keys(), "an entry is in two queues"
        queued = self._passed.keys() | self._resumed.keys()
        assert queued == {e for e in found if self.pool.refs(e) == 1}, "evictable entries"


def resumable(length: int, columns: Sequence[tuple[int, Sequence[int]]]) -> int:
    """The largest number of blocks, up to `length`, after which a sequence can resume. Each column
    is given as its reach and its entries.
    """
    shortened = True
    while shortened:
        shortened = False
        for reach, entries in columns:
            for at in range(length - 1, max(0, length - reach) - 1, -1):
                if entries[at] == NULL_BLOCK:
                    length, shortened = at, True  # every length above `at` needs this entry
                    break
    return length
