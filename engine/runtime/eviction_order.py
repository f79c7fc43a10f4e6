"""The order in which leaves of the prefix cache are evicted, and which blocks were evicted last.

An eviction policy such as LRU ranks the leaves. If several tenants are active, a tenant that has no
more than an equal share of the cached blocks is spared: its leaves are evicted last. So a tenant
whose prompts keep changing evicts its own prefixes first. With a single tenant, only the policy
decides.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from engine.runtime.sequence import Tokens

if TYPE_CHECKING:
    from engine.runtime.radix_node import Node

EvictionPolicy = Literal["lru", "lfu", "fifo"]
Key = tuple[int, int]


class BlockUsage(Protocol):
    """The attributes of a tree node by which an eviction policy may rank it."""

    created: int
    last_used: int
    num_uses: int


POLICIES: dict[EvictionPolicy, Callable[[BlockUsage], Key]] = {
    "lru": lambda node: (node.last_used, node.created),
    "lfu": lambda node: (node.num_uses, node.last_used),
    "fifo": lambda node: (node.created, 0),
}


# A tenant that has sent no request for this long counts as inactive. Its leaves are no longer
# spared.
ABSENT_AFTER_S = 300.0
# How often the set of active tenants is recomputed.
REVIEW_INTERVAL_S = 10.0

Entry = tuple[Key, int, "Node"]


class EvictedBlocks:
    """The blocks that were evicted last, as hashes of their tokens. So it is known that a larger
    cache would have had the next blocks of a prompt. Two blocks with equal tokens count as the same
    one, even if the tokens before them differ.
    """

    def __init__(self, max_blocks: int, block_size: int) -> None:
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._hashes: dict[int, None] = {}  # the oldest first

    def clear(self) -> None:
        self._hashes.clear()

    def add(self, tokens: Tokens) -> None:
        """Remember the blocks with these tokens."""
        for block in self._blocks(tokens, 0):
            self._hashes.pop(block, None)
            self._hashes[block] = None
        while len(self._hashes) > self._max_blocks:
            del self._hashes[next(iter(self._hashes))]

    def take(self, tokens: Tokens, first: int) -> int:
        """How many of the blocks of `tokens`, from block `first` on, were evicted. The first block
        that was not ends the count. Blocks that are counted are forgotten.
        """
        count = 0
        for block in self._blocks(tokens, first):
            if block not in self._hashes:
                break
            del self._hashes[block]
            count += 1
        return count

    def _blocks(self, tokens: Tokens, first: int) -> Iterator[int]:
        size = self._block_size
        for start in range(first * size, len(tokens) - size + 1, size):
            yield hash(tokens[start : start + size].tobytes())


class Leaves:
    """The leaves of the prefix cache in the order of eviction, as heaps. An entry becomes outdated
    when its leaf is used, extended or removed. `pop` skips it, because `is_current(key, node)` is
    then False.
    """

    def __init__(
        self,
        key: Callable[[BlockUsage], Key],
        is_current: Callable[[Key, "Node"], bool],
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._is_current = is_current
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._heap: list[Entry] = []
        self._spared: list[Entry] = []  # leaves of spared tenants, which are evicted last
        self.by_tenant: dict[str, int] = {}  # number of cached blocks of each tenant
        self._total = 0
        self._seen: dict[str, float] = {}
        self._present: set[str] = set()
        self._review_at = 0.0

    def __len__(self) -> int:
        return len(self._heap) + len(self._spared)

    def count(self, tenant: str, change: int) -> None:
        """Add `change`, which may be negative, to the number of the tenant's cached blocks."""
        self._total += change
        left = self.by_tenant.get(tenant, 0) + change
        if left:
            self.by_tenant[tenant] = left
        else:
            self.by_tenant.pop(tenant, None)
            self._seen.pop(tenant, None)
            self._present.discard(tenant)

    def note(self, tenant: str) -> None:
        """Mark a tenant that has cached blocks as active."""
        self._seen[tenant] = self._clock()
        self._present.add(tenant)

    def push(self, node: "Node") -> None:
        heapq.heappush(self._heap, (self._key(node), id(node), node))

    def replace(self, nodes: Iterable["Node"]) -> None:
        """Rebuild the heaps from `nodes`, which must be all leaves of the tree."""
        self._spared.clear()
        self._heap = [(self._key(node), id(node), node) for node in nodes]
        heapq.heapify(self._heap)

    def pop(self) -> "Node | None":
        """Remove and return the leaf to evict next. None if no leaf can be evicted."""
        if self._spared and self._clock() >= self._review_at:
            self._review()
        while self._heap:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry[0], entry[2]):
                continue
            if not self._is_spared(entry[2].tenant):
                return entry[2]
            if not self._spared:
                self._review_at = self._clock() + REVIEW_INTERVAL_S
            heapq.heappush(self._spared, entry)
        while self._spared:
            key, _, node = heapq.heappop(self._spared)
            if self._is_current(key, node):
                return node
        return None

    def _is_spared(self, tenant: str) -> bool:
        if len(self._present) < 2 or tenant not in self._present:
            return False
        return self.by_tenant[tenant] * len(self._present) <= self._total

    def _review(self) -> None:
        long_ago = self._clock() - ABSENT_AFTER_S
        self._present = {tenant for tenant, at in self._seen.items() if at > long_ago}
        self._heap += self._spared
        heapq.heapify(self._heap)
        self._spared.clear()
