"""All that the scheduler sees of KV memory: admit, extend, commit, release.

The only caller of `BlockPool` and `RadixCache`. Keys and values are never touched here; a block is
a number.
"""

import logging
from collections.abc import Iterable

from engine.backends.custom.runtime.block_pool import BlockPool
from engine.backends.custom.runtime.radix_cache import RadixCache
from engine.backends.custom.runtime.sequence import Sequence

log = logging.getLogger(__name__)


class KVCache:
    """Gives blocks to sequences and lets later sequences share what earlier ones computed.

    `max_cached_blocks` bounds what finished sequences leave behind, `max_cached_sequences` how many
    distinct prefixes are remembered.
    """

    def __init__(
        self,
        pool: BlockPool,
        radix: RadixCache,
        block_size: int,
        *,
        sharing: bool = True,
        max_cached_blocks: int | None = None,
        max_cached_sequences: int | None = None,
    ) -> None:
        self.pool = pool
        self.radix = radix
        self.block_size = block_size
        self.sharing = sharing
        self._max_cached_blocks = max_cached_blocks
        self._max_cached_sequences = max_cached_sequences
        self.num_queried = 0  # tokens looked up
        self.num_hit = 0  # tokens found
        self.num_unpublished = 0  # times that publishing failed

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._blocks_for(num_tokens) <= self.pool.num_usable

    def match(self, seq: Sequence) -> list[int]:
        """Cached blocks of the sequence's prefix; never all of it, since one token must be
        computed.
        """
        if not self.sharing:
            return []
        return self.radix.match(seq.namespace, seq.tokens[:-1])

    def admit(self, seq: Sequence, matched: list[int], spare: int, reserve: int) -> bool:
        """Share the matched blocks and take the rest for `reserve` tokens, if `spare` more would
        remain.
        """
        assert not seq.blocks and reserve >= len(seq.tokens), (seq.blocks, reserve)
        needed = self._blocks_for(reserve) - len(matched)
        evictable = self.pool.num_evictable - self.pool.count_evictable(matched)
        if needed + spare > self.pool.num_free + evictable:
            return False
        self.pool.share(matched)
        seq.blocks = list(matched)  # so that they are given back if there is no room after all
        self._make_room(needed)
        seq.blocks += self.pool.take(needed)
        seq.num_computed = seq.num_confirmed = len(matched) * self.block_size
        self.num_queried += len(seq.tokens)
        self.num_hit += seq.num_computed
        return True

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Make sure that the sequence has blocks for `num_tokens` tokens."""
        needed = self._blocks_for(num_tokens) - len(seq.blocks)
        if needed <= 0:
            return True
        if needed > self.pool.num_free + self.pool.num_evictable:
            return False
        self._make_room(needed)
        seq.blocks.extend(self.pool.take(needed))
        return True

    def commit(self, seq: Sequence) -> None:
        """Publish the prompt blocks that are full and confirmed, while the sequence goes on.

        What it generates is published at release: nobody can want it earlier, and steady decoding
        then never touches the tree.
        """
        self._publish(seq, min(seq.num_confirmed, seq.num_prompt), only_own=True)

    def release(self, seq: Sequence) -> None:
        """Publish every full confirmed block, then let go of all. Safe to call twice."""
        self._publish(seq, seq.num_confirmed, only_own=False)
        self.pool.drop(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.num_confirmed = 0
        self._enforce_bounds()

    def flush(self) -> int:
        """Forget every prefix that no running sequence uses."""
        return self.radix.evict(self.pool.num_evictable)

    def rebuild(self) -> None:
        """Start over with an empty pool and tree; only when no sequence holds a block."""
        self.pool.reset()
        self.radix.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert conservation, reference counts and tree shape against the sequences' own lists."""
        sequences = list(sequences)
        self.radix.check()
        self.pool.check([seq.blocks for seq in sequences], self.radix.blocks())
        for seq in sequences:
            assert len(seq.blocks) * self.block_size >= seq.num_computed, seq.request_id
            assert seq.num_confirmed <= seq.num_computed, seq.request_id

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _make_room(self, needed: int) -> None:
        short = needed - self.pool.num_free
        if short > 0:
            evicted = self.radix.evict(short)
            assert evicted == short, (evicted, short)

    def _publish(self, seq: Sequence, num_tokens: int, only_own: bool) -> None:
        """What can't be published is computed again by whoever needs it; nobody fails for it."""
        if not self.sharing:
            return
        count = num_tokens // self.block_size
        tokens = seq.tokens[: count * self.block_size]
        try:
            self.radix.insert(seq.namespace, tokens, seq.blocks[:count], only_own, seq.tenant)
        except Exception:
            self.num_unpublished += 1
            self.radix.find_leaves()
            log.exception("%d blocks could not be published", count)

    def _enforce_bounds(self) -> None:
        if self._max_cached_blocks is not None:
            self.radix.evict(self.pool.num_evictable - self._max_cached_blocks)
        if self._max_cached_sequences is not None:
            while self.radix.num_leaves > self._max_cached_sequences and self.radix.evict_leaf():
                pass
