"""Which cached prefix goes first when blocks run short: a key per node, smallest evicted first.

Recency is a counter of cache operations, not a clock, so that eviction is the same in every run.
"""

from collections.abc import Callable
from typing import Literal, Protocol

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
