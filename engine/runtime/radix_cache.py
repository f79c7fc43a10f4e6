"""The prefix cache: a radix tree that maps token prefixes to KV blocks.

An edge of the tree stands for one or more whole blocks. The tree holds a reference to each of its
blocks. `match` does not modify the tree. `insert` may split nodes, and `evict` removes blocks from
the ends of leaves. A sequence that holds a cached block also holds all blocks above it in the tree.
So if no sequence holds a block, no sequence holds the blocks below it. Such a block can therefore
always be freed, by evicting leaf after leaf.

An eviction policy such as LRU ranks the leaves. If several tenants are active, a tenant that has no
more than an equal share of the cached blocks is spared: its leaves are evicted last. So a tenant
whose prompts keep changing evicts its own prefixes first. With a single tenant, only the policy
decides.
"""

import heapq
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState, resumable
from engine.runtime.model_runner import NULL_BLOCK
from engine.runtime.sequence import Tokens, packed

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


class Node:
    """A node of the tree, with the tokens and blocks of the edge that leads to it."""

    __slots__ = (
        "blocks",
        "children",
        "created",
        "expires_at",
        "last_used",
        "num_uses",
        "parent",
        "sides",
        "tenant",
        "tokens",
    )

    def __init__(
        self, tokens: Tokens, blocks: list[int], parent: "Node | None", tenant: str
    ) -> None:
        self.tokens = tokens
        self.tenant = tenant
        self.blocks = blocks
        # For each side column, one entry per block. NULL_BLOCK where the entry is missing.
        self.sides: tuple[list[int], ...] = ()
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # keyed by the token ids of their first block
        self.created = 0
        self.last_used = 0
        self.num_uses = 0
        self.expires_at: float | None = None


class Root(Node):
    """The root of one namespace's tree. A root without children is removed."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, tenant: str) -> None:
        super().__init__(packed(), [], None, tenant)
        self.namespace = namespace


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
        is_current: Callable[[Key, Node], bool],
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

    def push(self, node: Node) -> None:
        heapq.heappush(self._heap, (self._key(node), id(node), node))

    def replace(self, nodes: Iterable[Node]) -> None:
        """Rebuild the heaps from `nodes`, which must be all leaves of the tree."""
        self._spared.clear()
        self._heap = [(self._key(node), id(node), node) for node in nodes]
        heapq.heapify(self._heap)

    def pop(self) -> Node | None:
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


class Match(NamedTuple):
    """A cached prefix after which a sequence can resume. `sides` has, for each side column, the
    entries of the last blocks, as many as the column's reach.
    """

    blocks: list[int]
    sides: tuple[list[int], ...] = ()


class RadixCache:
    """Maps token prefixes to blocks. There is a tree for each namespace. Sequences share prefixes
    only within a namespace. A tenant may have several namespaces, but a namespace has one tenant.

    The eviction policy decides which blocks are evicted first. With `ttl_s`, prefixes that were not
    used for this many seconds expire. With side columns, only the prefixes after which a sequence
    can resume match.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy: EvictionPolicy = "lru",
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        columns: Sequence[AuxBlockState] = (),
    ) -> None:
        self._pool = pool
        self.columns = tuple(columns)
        self._block_size = block_size
        self._key = POLICIES[policy]
        self._leaves = Leaves(self._key, self._is_evictable, clock)
        self.evicted: EvictedBlocks | None = None  # remembers evicted blocks, if given
        self._ttl_s = ttl_s
        self._clock = clock
        self._tick = 0
        self.num_evicted = 0
        self.reset()

    def reset(self) -> None:
        """Empty the tree without returning its blocks to the pools. The caller resets the pools as
        well.
        """
        for column in self.columns:
            column.clear()
        self._roots: dict[str, Root] = {}
        self._leaves.clear()
        if self.evicted is not None:
            self.evicted.clear()
        self.num_leaves = 0

    def match(self, namespace: str, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens` after which a sequence can resume. Only whole
        blocks match.
        """
        found, sides = self.path(namespace, tokens)
        if not sides:
            return Match(found)
        reaches = [column.reach for column in self.columns]
        length = resumable(len(found), list(zip(reaches, sides, strict=True)))
        last = (
            side[max(0, length - reach) : length]
            for reach, side in zip(reaches, sides, strict=True)
        )
        return Match(found[:length], tuple(last))

    def path(self, namespace: str, tokens: Tokens) -> Match:
        """All cached blocks of `tokens`, with all their side entries. A sequence may be unable to
        resume after them.
        """
        found: list[int] = []
        sides: tuple[list[int], ...] = tuple([] for _ in self.columns)
        for node, count in self.walk(namespace, tokens):
            found.extend(node.blocks[:count])
            for side, entries in zip(sides, node.sides, strict=True):
                side.extend(entries[:count])
        return Match(found, sides)

    def root(self, namespace: str) -> Node | None:
        return self._roots.get(namespace)

    def tops(self) -> Iterator[Node]:
        """The nodes below the roots of all namespaces."""
        for root in self._roots.values():
            yield from root.children.values()

    def insert(
        self,
        namespace: str,
        tokens: Tokens,
        blocks: Sequence[int],
        only_own: bool,
        tenant: str = "",
        sides: Sequence[Sequence[int]] = (),
    ) -> None:
        """Store a prefix whose blocks a sequence holds. If a part of the prefix is already cached,
        the tree keeps the blocks that it has. `sides` has an entry per block for each side column,
        or NULL_BLOCK. The tree takes the entries that it lacks.

        `only_own` is for a sequence that keeps running. Then storing stops at the first block for
        which the tree has another block with the same tokens. Any block stored below it would have
        an ancestor that the sequence does not hold.
        """
        if not blocks:
            return
        size = self._block_size
        assert len(tokens) == len(blocks) * size, (len(tokens), len(blocks))
        self._tick += 1
        node: Node = self._roots.setdefault(namespace, Root(namespace, tenant))
        done = 0
        while done < len(blocks):
            child = node.children.get(tokens[done * size : (done + 1) * size].tobytes())
            if child is None:
                break
            common = self._common_blocks(child, tokens, done)
            if only_own and child.blocks[:common] != list(blocks[done : done + common]):
                return
            if not only_own:  # a running sequence has added its entries with its blocks
                self._fill(child, sides, done, common)
            done += common
            if common < len(child.blocks) and done < len(blocks):
                child = self._split(child, common)
            node = child
            self._touch(node, is_use=not only_own)
        if done < len(blocks):
            node = self._attach(node, tokens[done * size :], list(blocks[done:]))
            self._fill(node, sides, done, len(node.blocks))
        self._leaves.note(node.tenant)
        if not node.children:
            self._push(node)

    def evict(self, count: int) -> int:
        """Free up to `count` blocks that no sequence holds. Blocks are taken from the ends of
        leaves, in the order of eviction. Returns the number of freed blocks.
        """
        freed = 0
        while freed < count and (node := self._leaves.pop()) is not None:
            freed += self._trim(node, count - freed)
        return freed

    def evict_leaf(self) -> int:
        """Free as many blocks as possible of the leaf that is next in the order of eviction.
        Returns the number of freed blocks, or 0 if every leaf is in use.
        """
        while (node := self._leaves.pop()) is not None:
            if freed := self._trim(node, len(node.blocks)):
                return freed
        return 0

    def expire(self) -> int:
        """Free the prefixes whose time to live has passed and that no sequence uses."""
        if self._ttl_s is None:
            return 0
        now, freed = self._clock(), 0
        expired = [n for n in self._nodes() if not n.children and self._is_expired(n, now)]
        while expired:
            node = expired.pop()
            parent = node.parent
            freed += self._trim(node, len(node.blocks))
            emptied = parent is not None and not node.blocks and not parent.children
            if emptied and parent is not None and self._is_expired(parent, now):
                expired.append(parent)
        return freed

    def find_leaves(self) -> None:
        """Rebuild the heaps of leaves from the whole tree.

        Eviction drops leaves that are in use from the heaps. Such a leaf returns when the blocks of
        its sequence are published. If publishing failed, this method finds the leaf.
        """
        self._leaves.replace(each for each in self._nodes() if not each.children)

    def blocks(self) -> Iterator[int]:
        for node in self._nodes():
            yield from node.blocks

    def check(self) -> None:
        """Assert that every node has whole blocks, that each child has the tokens of its first
        block as key, and that the numbers of leaves and of blocks per tenant are correct.
        """
        size, leaves = self._block_size, 0
        for namespace, root in self._roots.items():
            assert root.children, f"namespace {namespace!r} is empty but kept"
        for node in self._nodes():
            assert node.blocks and len(node.tokens) == len(node.blocks) * size, node.tokens
            leaves += not node.children
            assert node.parent is not None
            assert node.parent.children[node.tokens[:size].tobytes()] is node
            assert all(len(side) == len(node.blocks) for side in node.sides), "a side column"
        assert leaves == self.num_leaves, (leaves, self.num_leaves)
        for index, column in enumerate(self.columns):
            column.check(node.sides[index] for node in self._nodes())
        cached = Counter[str]()
        for node in self._nodes():
            cached[node.tenant] += len(node.blocks)
        assert cached == self._leaves.by_tenant, "blocks of tenants"

    def walk(self, namespace: str, tokens: Tokens) -> Iterator[tuple[Node, int]]:
        """Yields the nodes along the path of `tokens`, each with the number of its blocks that
        match. Only the last node may match partially.
        """
        node: Node | None = self._roots.get(namespace)
        done, size = 0, self._block_size
        now = self._clock() if self._ttl_s is not None else 0.0
        while node is not None and (done + 1) * size <= len(tokens):
            node = node.children.get(tokens[done * size : (done + 1) * size].tobytes())
            if node is None or self._is_expired(node, now):
                return
            common = self._common_blocks(node, tokens, done)
            yield node, common
            if common < len(node.blocks):
                return
            done += common

    def _common_blocks(self, node: Node, tokens: Tokens, done: int) -> int:
        """How many leading blocks of the node's edge have the same tokens as `tokens` from block
        `done` on. The first block is known to match, so the result is at least 1.
        """
        size, start = self._block_size, done * self._block_size
        max_blocks = min(len(node.blocks), len(tokens) // size - done)
        if node.tokens[: max_blocks * size] == tokens[start : start + max_blocks * size]:
            return max_blocks
        # The first block matches, and `max_blocks` blocks do not.
        return 1 + bisect_left(
            range(2, max_blocks),
            True,
            key=lambda count: node.tokens[: count * size] != tokens[start : start + count * size],
        )

    def _is_expired(self, node: Node, now: float) -> bool:
        return node.expires_at is not None and node.expires_at <= now

    def _touch(self, node: Node, is_use: bool) -> None:
        node.last_used = self._tick
        node.num_uses += is_use
        if self._ttl_s is not None:
            node.expires_at = self._clock() + self._ttl_s

    def _attach(self, parent: Node, tokens: Tokens, blocks: list[int]) -> Node:
        if parent.children or isinstance(parent, Root):
            # Otherwise the parent was a leaf, and the new node takes its place as a leaf.
            self.num_leaves += 1
        node = Node(tokens, blocks, parent, parent.tenant)
        node.sides = tuple([NULL_BLOCK] * len(blocks) for _ in self.columns)
        self._leaves.count(node.tenant, len(blocks))
        node.created = self._tick
        parent.children[tokens[: self._block_size].tobytes()] = node
        self._pool.cache(blocks)
        self._touch(node, is_use=False)
        return node

    def _fill(self, node: Node, sides: Sequence[Sequence[int]], done: int, count: int) -> None:
        """Store the side entries that the first `count` blocks of a node lack. In `sides`, these
        blocks start at `done`.
        """
        for column, entries, side in zip(self.columns, node.sides, sides, strict=False):
            for index, entry in enumerate(side[done : done + count]):
                if entry != NULL_BLOCK and entries[index] == NULL_BLOCK:
                    column.add(entries, index, entry)

    def _split(self, node: Node, count: int) -> Node:
        """Move the first `count` blocks of the node's edge to a new parent node."""
        size, parent = self._block_size, node.parent
        assert parent is not None and 0 < count < len(node.blocks)
        upper = Node(node.tokens[: count * size], node.blocks[:count], parent, node.tenant)
        upper.created, upper.last_used = node.created, node.last_used
        upper.num_uses, upper.expires_at = node.num_uses, node.expires_at
        upper.sides = tuple(side[:count] for side in node.sides)
        node.sides = tuple(side[count:] for side in node.sides)
        for column, above, below in zip(self.columns, upper.sides, node.sides, strict=True):
            column.move(above)
            column.move(below)
        parent.children[upper.tokens[:size].tobytes()] = upper
        node.tokens, node.blocks, node.parent = (
            node.tokens[count * size :],
            node.blocks[count:],
            upper,
        )
        upper.children[node.tokens[:size].tobytes()] = node
        return upper

    def _push(self, node: Node) -> None:
        self._leaves.push(node)
        if len(self._leaves) > 64 + 4 * self.num_leaves:
            self.find_leaves()

    def _is_evictable(self, key: Key, node: Node) -> bool:
        """Whether the node is a leaf, its rank is still `key`, and no sequence holds its last
        block.
        """
        is_current = not node.children and node.blocks and key == self._key(node)
        return bool(is_current) and self._pool.refs(node.blocks[-1]) == 1

    def _trim(self, node: Node, count: int) -> int:
        """Free up to `count` blocks from the end of the node's edge, but none that a sequence
        holds. Returns the number of freed blocks.
        """
        freed = 0
        while freed < count and node.blocks and self._pool.refs(node.blocks[-1]) == 1:
            self._pool.uncache(node.blocks.pop())
            freed += 1
            for column, side in zip(self.columns, node.sides, strict=True):
                if (entry := side.pop()) != NULL_BLOCK:
                    column.remove(entry)
        self._leaves.count(node.tenant, -freed)
        self.num_evicted += freed
        end = len(node.blocks) * self._block_size
        if self.evicted is not None:
            self.evicted.add(node.tokens[end:])
        if node.blocks:
            del node.tokens[end:]
            self._push(node)
        else:
            self._remove(node)
        return freed

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        key = node.tokens[: self._block_size].tobytes()
        node.tokens = packed()
        del parent.children[key]
        self.num_leaves -= 1
        if parent.children:
            return
        if isinstance(parent, Root):
            del self._roots[parent.namespace]
        else:
            self.num_leaves += 1
            self._push(parent)

    def _nodes(self) -> Iterator[Node]:
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node
