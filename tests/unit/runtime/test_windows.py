"""The block group of layers with a sliding window, and the column of the prefix cache that keeps
its blocks.
"""

import random

import pytest

from engine.core import faults
from engine.core.faults import Fault
from engine.runtime.block_pool import BlockPool
from engine.runtime.groups.aux_block_state import AuxBlockState, resumable
from engine.runtime.groups.windows import min_window_blocks
from engine.runtime.model_runner import NULL_BLOCK
from engine.runtime.radix_cache import RadixCache
from engine.runtime.sequence import MAX_PREEMPTIONS, packed
from tests.support.toy_engine.engine import ToyEngine

PROMPT = tuple(range(1, 13))


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


def windowed(**options) -> ToyEngine:
    return ToyEngine(**{"num_blocks": 64, "window": 5, "max_slots": 2, **options})


class Tree:
    """A tree of blocks of one token, with one side column."""

    def __init__(self, reach: int = 2, num_blocks: int = 64) -> None:
        self.pool, self.side_pool = BlockPool(num_blocks), BlockPool(num_blocks)
        self.column = AuxBlockState(self.side_pool, reach)
        self.cache = RadixCache(self.pool, 1, columns=(self.column,))

    def store(self, *tokens: int, entries: str | None = None) -> None:
        """Store a prefix. `entries` has an "x" for each block with an entry."""
        found = self.cache.match("", packed(tokens)).blocks
        self.pool.share(found)
        blocks = found + self.pool.take(len(tokens) - len(found))
        side = [
            self.side_pool.take(1)[0] if each == "x" else NULL_BLOCK
            for each in entries or "x" * len(tokens)
        ]
        self.cache.insert("", packed(tokens), blocks, only_own=False, sides=(side,))
        self.pool.drop(blocks)
        self.column.drop([entry for entry in side if entry != NULL_BLOCK], can_resume=True)
        self.check()

    def matches(self, *tokens: int) -> int:
        match = self.cache.match("", packed(tokens))
        assert len(match.sides[0]) == min(self.column.reach, len(match.blocks))
        return len(match.blocks)

    def check(self) -> None:
        self.cache.check()
        self.pool.check([], self.cache.blocks())
        self.side_pool.check([], self.column.entries())


def test_the_longest_resumable_prefix_agrees_with_trying_every_length():
    rng = random.Random(3)
    for _ in range(300):
        length = rng.randrange(9)
        columns = [
            (rng.randrange(4), [rng.choice([NULL_BLOCK, 7, 7, 7]) for _ in range(length)])
            for _ in range(rng.randrange(1, 3))
        ]
        expected = max(
            n
            for n in range(length + 1)
            if all(all(entries[max(0, n - reach) : n]) for reach, entries in columns)
        )
        assert resumable(length, columns) == expected


def test_a_prefix_without_its_last_window_matches_shorter():
    tree = Tree(reach=2)
    tree.store(1, 2, 3, 4, 5, 6, entries="xx__xx")
    assert tree.matches(1, 2, 3, 4, 5, 6, 7) == 6
    assert tree.matches(1, 2, 3, 4, 5, 9) == 2
    assert tree.matches(1, 2, 9) == 2
    # A state checkpoint is a column that needs only the entry at the end.
    state = Tree(reach=1)
    state.store(1, 2, 3, 4, 5, entries="_x__x")
    assert [state.matches(1, 2, 3, 4, 5, 6), state.matches(1, 2, 3, 4, 9)] == [5, 2]


def test_a_later_sequence_adds_missing_windowed_entries():
    tree = Tree(reach=2)
    tree.store(1, 2, 3, 4, entries="____")
    assert tree.matches(1, 2, 3, 4) == 0
    tree.store(1, 2, 3, 4, 5, entries="__xxx")
    assert tree.matches(1, 2, 3, 4) == 4
    assert tree.side_pool.num_cached == 3


def test_windowed_entries_stay_with_their_blocks_when_a_node_splits():
    tree = Tree(reach=2)
    tree.store(1, 2, 3, 4, 5, 6)
    tree.store(1, 2, 3, 9, 9, entries="___xx")
    assert tree.matches(1, 2, 3, 4, 5, 6) == 6 and tree.matches(1, 2, 3) == 3
    assert tree.column.evict(8) == 8
    tree.check()
    assert tree.matches(1, 2, 3, 4, 5, 6) == 0


def test_windowed_entries_are_evicted_with_their_blocks():
    tree = Tree()
    tree.store(1, 2, 3, 4)
    tree.cache.evict(3)
    tree.check()
    assert tree.side_pool.num_cached == 1 and tree.matches(1, 2) == 1


def test_blocks_behind_the_window_are_evicted_before_sequence_ends():
    tree = Tree(reach=1)
    entries = tree.side_pool.take(4)
    blocks = tree.pool.take(4)
    tree.cache.insert("", packed((1, 2, 3, 4)), blocks, only_own=True, sides=(entries,))
    tree.column.drop(entries[3:], can_resume=True)  # ended here, before the others are passed
    tree.column.drop(entries[:3], can_resume=False)
    tree.pool.drop(blocks)
    assert tree.column.evict(2) == 2
    assert [tree.matches(1), tree.matches(1, 2, 3), tree.matches(1, 2, 3, 4)] == [0, 3, 4]
    tree.column.share(tree.cache.match("", packed((1, 2, 3))).sides[0])
    tree.column.drop(entries[2:3], can_resume=True)  # resumed here, later than the end
    assert tree.column.evict(1) == 1
    assert [tree.matches(1, 2, 3), tree.matches(1, 2, 3, 4)] == [3, 3]
    tree.check()


def test_a_long_answer_needs_only_the_blocks_of_its_window(depth):
    engine = windowed(depth=depth, max_slots=1, window=4)
    pool = engine.windows.pool
    assert pool.num_usable == min_window_blocks(4, 2, 1) == 3
    engine.submit("long", PROMPT, max_tokens=40)
    engine.run()
    engine.check()
    assert engine.outcomes["long", 0].finish_reason == "length"
    assert engine.scheduler.num_preemptions == 0
    assert pool.num_free + pool.num_evictable == pool.num_usable


def test_several_sequences_share_a_small_windowed_pool(depth):
    engine = windowed(depth=depth, max_slots=4, num_window_blocks=9, num_blocks=128)
    for number in range(6):
        engine.submit(f"r{number}", (number, *PROMPT), max_tokens=30, temperature=1.0)
    for _ in range(60):
        engine.turn()
        engine.check()
    engine.run()
    engine.check()
    assert all(outcome.finish_reason == "length" for outcome in engine.outcomes.values())


def test_a_conversation_resumes_where_its_window_ended(depth):
    engine = windowed(depth=depth, num_window_blocks=12)
    engine.submit("first", PROMPT, max_tokens=11)
    engine.run()
    said = (*PROMPT, *engine.outcomes["first", 0].tokens)
    engine.submit("second", (*said, 5, 6), max_tokens=9)
    engine.run()
    engine.check()
    assert engine.outcomes["second", 0].num_cached == 22 == len(said) - 1


def test_a_shared_prompt_resumes_from_blocks_cached_by_others(depth):
    """The second request diverges in the middle of the first. Its start is still cached, because
    the pool has room. In a full pool, the start is computed again.
    """
    for num_window_blocks, num_cached in ((20, 8), (4, 0)):
        engine = windowed(depth=depth, num_window_blocks=num_window_blocks, max_slots=1)
        engine.submit("first", PROMPT, max_tokens=8)
        engine.run()
        engine.submit("second", (*PROMPT[:8], 20, 20, 20), max_tokens=8)
        engine.run()
        engine.check()
        assert engine.outcomes["second", 0].num_cached == num_cached


def test_a_failed_step_is_repeated_with_its_window(depth):
    engine = windowed(depth=depth, num_window_blocks=16, budget=4)
    for number in range(2):
        engine.submit(f"r{number}", (number, *PROMPT), max_tokens=24)
    for stage in ("forward", "sample", "wait") * 6:
        with faults.planned(Fault(stage, at=2)):
            engine.turn(2)
        engine.check()
    engine.run()
    engine.check()
    assert engine.num_unforeseen() == 0


def test_a_preempted_sequence_resumes_with_its_window(depth):
    engine = windowed(depth=depth, num_window_blocks=16)
    for number in range(2):
        engine.submit(f"r{number}", (number, *PROMPT), max_tokens=24)
    engine.turn(10)
    victim = engine.scheduler.table.running[-1]
    engine.scheduler._preempt(victim)
    engine.check()
    engine.turn(2)
    assert victim.num_matched > 0
    engine.run()
    engine.check()


def test_a_pinned_sequence_has_its_own_windowed_blocks():
    engine = windowed(num_window_blocks=24)
    engine.submit("a", PROMPT, max_tokens=20)
    engine.submit("b", PROMPT, max_tokens=20)
    engine.turn(4)
    victim = engine.scheduler.table.running[-1]
    for _ in range(MAX_PREEMPTIONS):
        engine.scheduler._preempt(victim)
        engine.turn()
    held = [block for block in engine.windows.tables[victim].blocks if block != NULL_BLOCK]
    assert held and all(engine.windows.pool.refs(block) == 1 for block in held)
    engine.run()
    engine.check()


def test_a_flush_frees_both_pools():
    engine = windowed(num_window_blocks=20)
    engine.submit("a", PROMPT, max_tokens=4)
    engine.turn(2)
    stats = engine.loop.stats()
    assert (stats.num_window_blocks, stats.num_free_window_blocks) == (20, 13)
    assert stats.num_referenced_window_blocks == 3
    engine.run()
    assert engine.windows.pool.num_evictable
    engine.kv.flush()
    assert engine.windows.pool.num_free == engine.windows.pool.num_usable
    assert engine.pool.num_free == engine.pool.num_usable
