"""Allocates KV blocks to sequences and shares cached prefixes among sequences.

Only this module changes the `BlockPool` and the `RadixCache` while sequences run. It handles only
block ids. The keys and values themselves are in the memory of the runner.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed

from engine.runtime.block_pool import BlockPool
from engine.runtime.model_runner import NULL_BLOCK
from engine.runtime.radix_cache import EvictedBlocks, Match, RadixCache
from engine.runtime.sequence import CacheExtension, E, Sequence, Tokens

log = logging.getLogger(__name__)


class KVCache:
    """Allocates blocks to sequences and shares cached prefixes among them.

    `max_cached_blocks` limits how many blocks stay cached that no sequence uses. `target_blocks` is
    given if blocks that were never used take no memory yet. While more blocks than this are in use,
    cached blocks are evicted before a sequence gets new ones. If a prompt needs blocks that were
    evicted, the target grows by as many.
    `max_cached_sequences` limits how many distinct prefixes stay cached. `groups` are extensions
    for layers with memory of their own. Their columns are the side columns of `radix`, in the same
    order.
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
        target_blocks: int | None = None,
        groups: Listed[CacheExtension] = (),
    ) -> None:
        self.pool = pool
        self.radix = radix
        self.block_size = block_size
        self.sharing = sharing
        self.groups = tuple(groups)
        self.extensions = self.groups  # the groups, then what was attached
        self.publishes_at_once = all(each.publishes_at_once for each in groups)
        self.no_match = Match([], tuple([] for _ in radix.columns))
        # The most tokens of a sequence that a step may compute.
        self.max_row = min((each.max_row for each in groups), default=sys.maxsize)
        self._max_cached_blocks = max_cached_blocks
        self._max_cached_sequences = max_cached_sequences
        self.target_blocks = target_blocks
        if target_blocks is not None:
            radix.evicted = EvictedBlocks(pool.num_blocks, block_size)
        self.num_queried = 0  # prompt tokens looked up in the prefix cache
        self.num_hit = 0  # prompt tokens found there
        self.num_unpublished = 0  # failed attempts to publish blocks to the prefix cache

    def attach(self, extension: CacheExtension) -> None:
        self.extensions += (extension,)

    def find(self, kind: type[E]) -> E | None:
        """The extension of a kind, if there is one."""
        return kind.among(self.extensions)

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._blocks_for(num_tokens) <= self.pool.num_usable

    def match(self, seq: Sequence) -> Match:
        """The cached prefix with which the sequence can start. The block of the last token is
        never included, because this token must be computed to get logits.
        """
        if not self.sharing:
            return self.no_match
        return self.radix.match(seq.namespace, seq.tokens[:-1])

    def read_ahead(self, seq: Sequence) -> None:
        """Start to load blocks for a sequence that begins to wait."""
        for each in self.extensions:
            each.read_ahead(seq, self)

    def is_loading(self, seq: Sequence) -> bool:
        """Whether a waiting sequence should wait for blocks that are loaded from a tier."""
        return any(each.is_loading(seq, self) for each in self.extensions)

    def is_reading(self, seq: Sequence) -> bool:
        """Whether blocks are being loaded for a sequence."""
        return any(each.is_reading(seq) for each in self.extensions)

    def row_length(self, seq: Sequence, start: int, count: int) -> int:
        """How many of the next `count` tokens of a sequence one row may compute."""
        count = min(count, self.max_row)
        for each in self.groups:
            count = each.row_length(seq, start, count, count)
        return count

    def num_reused(self, seq: Sequence, num_found: int) -> int:
        """How many of the prompt tokens that were found in the cache count as cached."""
        for each in self.extensions:
            num_found = each.num_reused(seq, num_found)
        return num_found

    def admit(self, seq: Sequence, match: Match, spare: int, reserve: int, num_tokens: int) -> bool:
        """Give a sequence the cached blocks of `match`, and allocate more blocks, so that it has
        room for `num_tokens` tokens now and never lacks room for `reserve` tokens. If fewer than
        `spare` blocks would then remain free or evictable, this allocates nothing and returns
        False.
        """
        matched = match.blocks
        assert not seq.blocks and reserve >= len(seq.tokens), (seq.blocks, reserve)
        needed = self._blocks_for(reserve) - len(matched)
        evictable = self.pool.num_evictable - self.pool.count_evictable(matched)
        if needed + spare > self.pool.num_free + evictable:
            return False
        seq.num_matched = len(matched)
        self.pool.share(matched)
        # The sequence gets the matched blocks before the allocation. If the allocation fails,
        # `release` then gives them back.
        seq.blocks = list(matched)
        seq.num_computed = seq.num_confirmed = len(matched) * self.block_size
        for each, entries in zip(self.groups, match.sides, strict=True):
            each.resume(seq, entries, len(matched), reserve)
        if not all(each.extend(seq, num_tokens, spare) for each in self.groups):
            self._drop_all(seq)
            return False
        if self.target_blocks is not None and self.radix.evicted is not None:
            grown = self.target_blocks + self.radix.evicted.take(seq.tokens, len(matched))
            self.target_blocks = min(grown, self.pool.num_usable)
        self._make_room(needed)
        seq.blocks += self.pool.take(needed)
        self._set_room(seq)
        self.num_queried += len(seq.tokens)
        self.num_hit += seq.num_computed
        return True

    def extend(self, seq: Sequence, num_tokens: int, spare: int = 0) -> bool:
        """Extend the sequence's block tables so that it has room for `num_tokens` tokens. Returns
        False if fewer than `spare` blocks would then remain free or evictable.
        """
        needed = self._blocks_for(num_tokens) - len(seq.blocks)
        if needed + spare > self.pool.num_free + self.pool.num_evictable:
            return False
        if not all(each.extend(seq, num_tokens, spare) for each in self.groups):
            return False
        if needed > 0:
            self._make_room(needed)
            seq.blocks.extend(self.pool.take(needed))
        self._set_room(seq)
        return True

    def commit(self, seq: Sequence) -> None:
        """Publish the full prompt blocks that finished steps have computed to the prefix cache. The
        sequence keeps running.

        Generated tokens are published only at release. Other requests can hardly use them earlier.
        So steady decode never modifies the prefix cache.
        """
        self._publish(seq, min(seq.num_confirmed, seq.num_prompt), only_own=True)
        for each in self.groups:
            each.committed(seq, seq.num_confirmed // self.block_size)

    def rewind(self, seq: Sequence) -> None:
        """Let a running sequence start again after the cached prefix with which it started."""
        for each in self.groups:
            each.committed(seq)
        seq.num_computed = seq.num_confirmed = seq.num_matched * self.block_size

    def release(self, seq: Sequence) -> None:
        """Publish every full block that finished steps have computed, then drop the sequence's
        references to all its blocks. Safe to call twice.
        """
        self._publish(seq, seq.num_confirmed, only_own=False)
        self._drop_all(seq)
        self._enforce_bounds()

    def adopt(self, seq: Sequence, first: int, end: int, fill: Callable[[list[int]], None]) -> bool:
        """Publish the blocks `first` .. `end` - 1 of a waiting sequence, which come from a tier.
        `fill` writes the last of them to new blocks of the pool, as many as the cache lacks.
        Returns False if there is no room, if the blocks before them are not cached, or if
        publishing fails.
        """
        tokens = seq.tokens[: end * self.block_size]
        cached = self.radix.path(seq.namespace, tokens).blocks
        if len(cached) < first:
            return False
        # These blocks must not be evicted to make room for those that follow them.
        self.pool.share(cached)
        new: list[int] = []
        try:
            needed = end - len(cached)
            if needed > self.pool.num_free + self.pool.num_evictable:
                return False
            self._make_room(needed)
            new = self.pool.take(needed)
            fill(new)
            return self._insert(seq, tokens, cached + new)
        finally:
            self.pool.drop(cached + new)

    def adopt_entries(
        self, seq: Sequence, column: int, first: int, end: int, fill: Callable[[list[int]], None]
    ) -> bool:
        """Add entries of a side column to the cached blocks `first` .. `end` - 1. `fill` writes the
        data of the entries, as in `adopt`.
        """
        tokens = seq.tokens[: end * self.block_size]
        cached = self.radix.path(seq.namespace, tokens).blocks
        side = self.radix.columns[column]
        if len(cached) < end or end - first > side.pool.num_free + side.pool.num_evictable:
            return False
        entries = side.take(end - first)
        try:
            fill(entries)
            sides = [[NULL_BLOCK] * end for _ in self.radix.columns]
            sides[column][first:] = entries
            return self._insert(seq, tokens, cached, sides=tuple(sides))
        finally:
            side.drop(entries, can_resume=True)

    def flush(self) -> int:
        """Drop every cached block that no sequence uses. Returns the number of freed blocks."""
        freed = sum(each.evict() for each in self.groups)
        return freed + self.radix.evict(self.pool.num_evictable)

    def rebuild(self) -> None:
        """Reset the block pool and the prefix cache to empty. Allowed only while no sequence holds
        a block.
        """
        self.pool.reset()
        self.radix.reset()
        for each in self.extensions:
            each.reset()

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
        for each in self.groups:
            each.check_held(sequences)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _set_room(self, seq: Sequence) -> None:
        room = len(seq.blocks) * self.block_size
        for each in self.groups:
            room = each.room(seq, room)
        seq.room = room

    def _drop_all(self, seq: Sequence) -> None:
        self.pool.drop(seq.blocks)
        seq.blocks = []
        for each in self.groups:
            each.release(seq)
        seq.num_computed = seq.num_confirmed = seq.num_matched = seq.room = 0

    def _make_room(self, needed: int) -> None:
        short = needed - self.pool.num_free
        evicted = self.radix.evict(max(short, self._num_over_target(needed)))
        assert evicted >= short, (evicted, short)

    def _num_over_target(self, needed: int = 0) -> int:
        """How many blocks would be in use beyond the target if sequences got `needed` more."""
        if self.target_blocks is None:
            return 0
        return self.pool.num_usable - self.pool.num_free + needed - self.target_blocks

    def _publish(self, seq: Sequence, num_tokens: int, only_own: bool) -> None:
        """Publish the full blocks of the first `num_tokens` tokens to the prefix cache."""
        if not self.sharing:
            return
        count = num_tokens // self.block_size
        tokens = seq.tokens[: count * self.block_size]
        sides = tuple([each.entries(seq, count) for each in self.groups])
        if self._insert(seq, tokens, seq.blocks[:count], only_own, sides):
            for each in self.extensions:
                each.published(seq, self, count, is_end=not only_own)

    def _insert(
        self,
        seq: Sequence,
        tokens: Tokens,
        blocks: list[int],
        only_own: bool = False,
        sides: tuple[list[int], ...] = (),
    ) -> bool:
        """Put blocks into the prefix cache. A failure is only counted
        and logged, because later requests can compute the blocks again.
        """
        try:
            self.radix.insert(seq.namespace, tokens, blocks, only_own, seq.tenant, sides)
            for each in self.extensions:
                each.inserted(seq, tokens, blocks)
        except Exception:
            self.num_unpublished += 1
            self.radix.find_leaves()
            log.exception("%d blocks could not be published", len(blocks))
            return False
        return True

    def _enforce_bounds(self) -> None:
        self.radix.evict(self._num_over_target())
        if self._max_cached_blocks is not None:
            self.radix.evict(self.pool.num_evictable - self._max_cached_blocks)
        if self._max_cached_sequences is not None:
            while self.radix.num_leaves > self._max_cached_sequences and self.radix.evict_leaf():
                pass
