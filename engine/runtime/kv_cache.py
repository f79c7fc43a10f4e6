"""Allocates KV blocks to sequences and shares cached prefixes among sequences.

Only this module changes the `BlockPool` and the `RadixCache` while sequences run. It handles only
block ids. The keys and values themselves are in the memory of the runner.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.core.interfaces.stats import TierStats
from engine.runtime.block_pool import BlockPool
from engine.runtime.eviction_order import EvictedBlocks
from engine.runtime.groups.states import StateGroup
from engine.runtime.groups.windows import WindowGroup
from engine.runtime.model_runner import NULL_BLOCK
from engine.runtime.radix_cache import Match, RadixCache
from engine.runtime.sequence import Sequence, Tokens

if TYPE_CHECKING:
    from engine.runtime.insight.cache_report import CacheReport
    from engine.runtime.tiers.kv_tiers import KVTiers

log = logging.getLogger(__name__)

NO_LIMIT = sys.maxsize


class KVCache:
    """Allocates blocks to sequences and shares cached prefixes among them.

    `max_cached_blocks` limits how many blocks stay cached that no sequence uses. `target_blocks` is
    given if blocks that were never used take no memory yet. While more blocks than this are in use,
    cached blocks are evicted before a sequence gets new ones. If a prompt needs blocks that were
    evicted, the target grows by as many.
    `max_cached_sequences` limits how many distinct prefixes stay cached. `windows` is given if the
    layers with a sliding window have a block pool of their own. Its column is the first side column
    of `radix`. `states` is given if layers keep states. Its column is the last one.
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
        windows: WindowGroup | None = None,
        states: StateGroup | None = None,
    ) -> None:
        self.pool = pool
        self.radix = radix
        self.block_size = block_size
        self.sharing = sharing
        self.windows = windows
        self.states = states
        self.tiers: KVTiers | None = None  # host memory, disk or Redis below the KV pool
        self.report: CacheReport | None = None  # what a router is told about the cache
        self.tier_stats: tuple[TierStats, ...] = ()  # of tiers that are not used any more
        self.no_match = Match([], tuple([] for _ in radix.columns))
        # The most tokens of a sequence that a step may compute.
        self.max_row = NO_LIMIT if windows is None else windows.max_row
        self._max_cached_blocks = max_cached_blocks
        self._max_cached_sequences = max_cached_sequences
        self.target_blocks = target_blocks
        if target_blocks is not None:
            radix.evicted = EvictedBlocks(pool.num_blocks, block_size)
        self.num_queried = 0  # prompt tokens looked up in the prefix cache
        self.num_hit = 0  # prompt tokens found there
        self.num_unpublished = 0  # failed attempts to publish blocks to the prefix cache

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
        """Start to load blocks for a sequence that begins to wait, if there are tiers."""
        if self.tiers is not None:
            with self._without_tiers_on_error():
                self.tiers.read_ahead(seq)

    def is_loading(self, seq: Sequence) -> bool:
        """Whether a waiting sequence should wait for blocks that are loaded from a tier."""
        if self.tiers is not None:
            with self._without_tiers_on_error():
                return self.tiers.is_loading(seq)
        return False

    @contextmanager
    def _without_tiers_on_error(self) -> Iterator[None]:
        """If loading raises, the engine goes on without tiers. No request depends on them."""
        try:
            yield
        except Exception:
            log.exception("the cache tiers failed, and are not used any more")
            if self.tiers is not None:
                self.tier_stats = tuple(replace(each, is_up=False) for each in self.tiers.stats())
                self.tiers.close(gives_up=True)
            self.tiers = None

    def stop_loading(self, seq: Sequence) -> None:
        if self.tiers is not None:
            self.tiers.forget(seq)

    def row_length(self, seq: Sequence, start: int, count: int) -> int:
        """How many of the next `count` tokens of a sequence one row may compute."""
        count = min(count, self.max_row)
        return count if self.states is None else self.states.cut(seq, start, count)

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
        seq.reserved, seq.num_matched = reserve, len(matched)
        self.pool.share(matched)
        # The sequence gets the matched blocks before the allocation. If the allocation fails,
        # `release` then gives them back.
        seq.blocks = list(matched)
        seq.num_computed = seq.num_confirmed = len(matched) * self.block_size
        if self.windows is not None:
            self.windows.resume(seq, match.sides[0], len(matched))
            if not self._extend_windows(seq, num_tokens, spare):
                self._drop_all(seq)
                return False
        if self.states is not None:
            self.states.resume(seq, match.sides[-1], len(matched))
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
        if self.windows is not None and not self._extend_windows(seq, num_tokens, spare):
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
        if self.states is not None:
            self.states.drop_taken(seq, seq.num_confirmed // self.block_size)

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
        freed = 0
        if self.windows is not None:
            freed = self.windows.column.evict(self.windows.pool.num_evictable)
        if self.states is not None:
            freed += self.states.column.evict(self.states.pool.num_evictable)
        return freed + self.radix.evict(self.pool.num_evictable)

    def rebuild(self) -> None:
        """Reset the block pool and the prefix cache to empty. Allowed only while no sequence holds
        a block.
        """
        self.pool.reset()
        if self.windows is not None:
            self.windows.pool.reset()
        if self.states is not None:
            self.states.pool.reset()
        self.radix.reset()
        if self.report is not None:
            self.report.cleared()

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
        if self.windows is not None:
            self.windows.check(sequences)
        if self.states is not None:
            self.states.check(sequences)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _extend_windows(self, seq: Sequence, num_tokens: int, spare: int = 0) -> bool:
        assert self.windows is not None
        self.windows.free_passed(seq)
        return self.windows.extend(seq, num_tokens, spare)

    def _set_room(self, seq: Sequence) -> None:
        # A windowed table is never longer than the other one.
        table = seq.blocks if self.windows is None else seq.window_blocks
        seq.room = len(table) * self.block_size

    def _drop_all(self, seq: Sequence) -> None:
        self.pool.drop(seq.blocks)
        seq.blocks = []
        if self.windows is not None:
            self.windows.release(seq)
        if self.states is not None:
            self.states.release(seq)
        seq.num_computed = seq.num_confirmed = seq.num_matched = seq.reserved = seq.room = 0

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
        """Publish the full blocks of the first `num_tokens` tokens to the prefix cache and the
        tiers.
        """
        if not self.sharing:
            return
        count = num_tokens // self.block_size
        tokens = seq.tokens[: count * self.block_size]
        sides: tuple[list[int], ...] = ()
        if self.windows is not None:
            sides = (seq.window_blocks[:count],)
        if self.states is not None:
            sides += (self.states.entries(seq, count),)
        is_cached = self._insert(seq, tokens, seq.blocks[:count], only_own, sides)
        if is_cached and self.tiers is not None:
            with self._without_tiers_on_error():
                self.tiers.publish(seq, count, is_end=not only_own)

    def _insert(
        self,
        seq: Sequence,
        tokens: Tokens,
        blocks: list[int],
        only_own: bool = False,
        sides: tuple[list[int], ...] = (),
    ) -> bool:
        """Put blocks into the prefix cache, and tell the node's router. A failure is only counted
        and logged, because later requests can compute the blocks again.
        """
        try:
            self.radix.insert(seq.namespace, tokens, blocks, only_own, seq.tenant, sides)
            if self.report is not None:
                self.report.published(seq.namespace, tokens, blocks)
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
