"""Reports which prefixes are cached, for a router that places requests by them.

The report knows the hashes of each cached block. A block that is published adds its hashes, and a
block that is evicted removes them. Nothing is hashed until a router asks.
"""

from typing import TYPE_CHECKING

from engine.core.interfaces.request import CachedPrefixes
from engine.core.prefix_hashes import UNIT_TOKENS, as_number, next_hash, root_hash
from engine.runtime.radix_cache import Node, Root
from engine.runtime.sequence import CacheExtension, Sequence, Tokens, packed

if TYPE_CHECKING:
    from engine.runtime.kv_cache import KVCache


class CacheReport(CacheExtension):
    """The hashes of all cached blocks of `kv`, and the changes since the last message."""

    def __init__(self, kv: "KVCache") -> None:
        self._kv = kv
        self._width = UNIT_TOKENS * 4
        # The digests of the units that end in each cached block
        self._of_block: dict[int, list[bytes]] = {}
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._is_all = True
        kv.attach(self)
        kv.pool.on_uncached = self._uncached
        for node in kv.radix.tops():
            self._walk(node)

    def restart(self) -> None:
        """Let the next message have everything, because a router has lost what it knew."""
        self._is_all = True

    def inserted(self, seq: Sequence, tokens: Tokens, blocks: list[int]) -> None:
        self._published(seq.namespace, tokens, blocks)

    def reset(self) -> None:
        """The cache was emptied at once."""
        self._of_block.clear()
        self._is_all = True

    def _published(self, namespace: str, tokens: Tokens, blocks: list[int]) -> None:
        """Note the blocks of a prefix that are now in the cache. Those that were there before have
        known hashes.
        """
        size, data, pool = self._kv.block_size, b"", self._kv.pool
        parent, done = root_hash(namespace), 0  # `done` units have been hashed
        for index, block in enumerate(blocks):
            end = (index + 1) * size // UNIT_TOKENS
            if end == done:
                continue
            known = self._of_block.get(block)
            if known is not None:
                parent, done = known[-1], end
                continue
            data = data or tokens.tobytes()
            found = []
            while done < end:
                start = done * self._width
                parent = next_hash(parent, data[start : start + self._width])
                found.append(parent)
                done += 1
            if pool.is_cached(block):
                self._of_block[block] = found
                self._note(found, self._added, self._removed)

    def news(self) -> CachedPrefixes | None:
        """The message to send now, if anything has changed."""
        if self._is_all:
            every = [as_number(each) for found in self._of_block.values() for each in found]
            self._is_all = False
            self._added, self._removed = {}, {}
            return CachedPrefixes(tuple(every), is_all=True)
        if not self._added and not self._removed:
            return None
        added, self._added = self._added, {}
        removed, self._removed = self._removed, {}
        return CachedPrefixes(tuple(added), tuple(removed))

    def _uncached(self, block: int) -> None:
        self._note(self._of_block.pop(block, []), self._removed, self._added)

    def _note(
        self, found: list[bytes], changes: dict[int, None], opposite: dict[int, None]
    ) -> None:
        for digest in found:
            number = as_number(digest)
            if number in opposite:
                del opposite[number]  # the two changes cancel each other
            else:
                changes[number] = None

    def _walk(self, top: Node) -> None:
        """Note the blocks of a top node of the tree, and of all nodes below it."""
        assert isinstance(top.parent, Root)
        blocks: list[int] = []
        pending = [(top, packed(), blocks)]
        while pending:
            node, tokens, above = pending.pop()
            tokens, blocks = tokens + node.tokens, above + node.blocks
            self._published(top.parent.namespace, tokens, blocks)
            pending += [(child, tokens, blocks) for child in node.children.values()]


def report_cache(kv: "KVCache") -> None:
    """Report everything that is cached, and from now on each change of it."""
    report = kv.find(CacheReport)
    if report is None:
        CacheReport(kv)
    else:
        report.restart()
