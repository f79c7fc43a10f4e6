"""Which leaf of the prefix cache goes next: the least valuable one, of those that may go first.

Tenants that were here lately keep an equal part of what is cached, so that one that asks for ever
new prompts pushes out its own prefixes and not another's. With one tenant the order is the eviction
policy's alone.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from engine.backends.custom.runtime.radix_cache import Node

EvictionPolicy = Literal["lru", "lfu", "fifo"]
Key = tuple[int, int]


class Usage(Protocol):
    """What a policy may look at."""

    created: int
    last_used: int
    num_uses: int


POLICIES: dict[EvictionPolicy, Callable[[Usage], Key]] = {
    "lru": lambda node: (node.last_used, node.created),
    "lfu": lambda node: (node.num_uses, node.last_used),
    "fifo": lambda node: (node.created, 0),
}


# Whoever has not been here for so long keeps nothing back from those who are.
ABSENT_AFTER_S = 300.0
# Who is here, and so who is spared, is found out anew as often as this.
REVIEW_INTERVAL_S = 10.0

Entry = tuple[Key, int, "Node"]


class Leaves:
    """Heaps of entries that count only as long as `is_current` says so of their node and key."""

    def __init__(
        self,
        key: Callable[[Usage], Key],
        is_current: Callable[[Key, "Node"], bool],
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._is_current = is_current
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        self._heap: list[Entry] = []
        self._spared: list[Entry] = []  # they go when nothing else can
        self.by_tenant: dict[str, int] = {}  # blocks that each has in the cache
        self._total = 0
        self._seen: dict[str, float] = {}
        self._present: set[str] = set()
        self._review_at = 0.0

    def __len__(self) -> int:
        return len(self._heap) + len(self._spared)

    def count(self, tenant: str, change: int) -> None:
        """The tenant has so many blocks more in the cache."""
        self._total += change
        left = self.by_tenant.get(tenant, 0) + change
        if left:
            self.by_tenant[tenant] = left
        else:
            self.by_tenant.pop(tenant, None)
            self._seen.pop(tenant, None)
            self._present.discard(tenant)

    def note(self, tenant: str) -> None:
        """The tenant, which has something in the cache, is here."""
        self._seen[tenant] = self._clock()
        self._present.add(tenant)

    def push(self, node: "Node") -> None:
        heapq.heappush(self._heap, (self._key(node), id(node), node))

    def replace(self, nodes: Iterable["Node"]) -> None:
        """Forget the entries that count no longer: these are all the leaves."""
        self._spared.clear()
        self._heap = [(self._key(node), id(node), node) for node in nodes]
        heapq.heapify(self._heap)

    def pop(self) -> "Node | None":
        """The leaf that goes next; None when none can."""
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
