"""KV memory for the scheduler: it allocates blocks to sequences and shares cached prefixes.

Only this module changes the `BlockPool` and the `RadixCache` while sequences run. It handles block
ids. The keys and values themselves are in the runner's memory.
"""

import logging
from collections.abc import Iterable

from engine.backends.custom.runtime.block_pool import BlockPool
from engine.backends.custom.runtime.radix_cache import RadixCache
from engine.backends.custom.runtime.sequence import Sequence

log = logging.getLogger(__name__)


class KVCache:
    """Allocates blocks to sequences and shares cached prefixes among them.

    `max_cached_blocks` bounds the blocks kept for finished sequences; `max_cached_sequences` bounds
    the number of distinct prefixes.
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
        self.num_queried = 0  # prompt tokens looked up in the prefix cache
        self.num_hit = 0  # prompt tokens found there
        self.num_unpublished = 0  # failed attempts to publish blocks to the prefix cache

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._blocks_for(num_tokens) <= self.pool.num_usable

    def match(self, seq: Sequence) -> list[int]:
        """The cached blocks of the sequence's prefix. The last token is never included, because it
        must be computed to get logits.
        """
        if not self.sharing:
            return []
        return self.radix.match(seq.namespace, seq.tokens[:-1])

    def admit(self, seq: Sequence, matched: list[int], spare: int, reserve: int) -> bool:
        """Give a sequence the `matched` cached blocks, and allocate further blocks for a total of
        `reserve` tokens. Returns False and allocates nothing if fewer than `spare` blocks would
        then be free or evictable.
        """
        assert not seq.blocks and reserve >= len(seq.tokens), (seq.blocks, reserve)
        needed = self._blocks_for(reserve) - len(matched)
        evictable = self.pool.num_evictable - self.pool.count_evictable(matched)
        if needed + spare > self.pool.num_free + evictable:
            return False
        self.pool.share(matched)
        # The matched blocks are set before the allocation, so that `release` gives them back if the
        # allocation fails.
        seq.blocks = list(matched)
        self._make_room(needed)
        seq.blocks += self.pool.take(needed)
        seq.num_computed = seq.num_confirmed = len(matched) * self.block_size
        self.num_queried += len(seq.tokens)
        self.num_hit += seq.num_computed
        return True

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the sequence's block table to hold `num_tokens` tokens. Returns False if too few
        blocks are free or evictable.
        """
        needed = self._blocks_for(num_tokens) - len(seq.blocks)
        if needed <= 0:
            return True
        if needed > self.pool.num_free + self.pool.num_evictable:
            return False
        self._make_room(needed)
        seq.blocks.extend(self.pool.take(needed))
        return True

    def commit(self, seq: Sequence) -> None:
        """Publish prompt blocks to the prefix cache while the sequence keeps running: those that
        are full and that finished steps have computed.

        Generated tokens are published only at release. Other requests can hardly use them earlier,
        and steady decode then never modifies the tree.
        """
        self._publish(seq, min(seq.num_confirmed, seq.num_prompt), only_own=True)

    def release(self, seq: Sequence) -> None:
        """Publish every full block that finished steps have computed, then drop all references of
        the sequence. Safe to call twice.
        """
        self._publish(seq, seq.num_confirmed, only_own=False)
        self.pool.drop(seq.blocks)
        seq.blocks = []
        seq.num_computed = seq.num_confirmed = 0
        self._enforce_bounds()

    def flush(self) -> int:
        """Drop every cached prefix that no running sequence uses."""
        return self.radix.evict(self.pool.num_evictable)

    def rebuild(self) -> None:
        """Reset to an empty pool and tree. Allowed only when no sequence holds a block."""
        self.pool.reset()
        self.radix.reset()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that reference counts, free blocks and the tree agree with the sequences' block
        lists.
        """
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
        """Publish the blocks of the first `num_tokens` tokens to the prefix cache. A failure is
        only counted and logged, because later requests can recompute the blocks.
        """
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
