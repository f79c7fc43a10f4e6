"""The prefix tree by itself: what matches, what splits, who is evicted first."""

import random

import pytest

from engine.runtime.block_pool import BlockPool
from engine.runtime.radix_cache import RadixCache
from engine.runtime.sequence import packed

SIZE = 2


class Tree:
    """A cache whose sequences are released as soon as they are stored."""

    def __init__(self, num_blocks: int = 64, **options) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, SIZE, **options)

    def store(self, *tokens: int, namespace: str = "", tenant: str = "") -> list[int]:
        matched = self.cache.match(namespace, packed(tokens)).blocks
        self.pool.share(matched)
        blocks = matched + self.pool.take(len(tokens) // SIZE - len(matched))
        self.cache.insert(namespace, packed(tokens), blocks, only_own=False, tenant=tenant)
        self.pool.drop(blocks)
        self.check()
        return blocks

    def has(self, *tokens: int, namespace: str = "") -> bool:
        return len(self.cache.match(namespace, packed(tokens)).blocks) * SIZE == len(tokens)

    def check(self) -> None:
        self.cache.check()
        self.pool.check([], self.cache.blocks())


def test_match_is_the_longest_prefix_in_whole_blocks():
    tree = Tree()
    blocks = tree.store(1, 2, 3, 4, 5, 6)
    assert tree.cache.match("", packed([1, 2, 3, 4, 9, 9])).blocks == blocks[:2]
    assert tree.cache.match("", packed([1, 2, 3])).blocks == blocks[:1]
    assert tree.cache.match("", packed([2, 1])).blocks == []


def test_inserting_a_branch_splits_a_node_and_keeps_both_sides():
    tree = Tree()
    tree.store(1, 2, 3, 4, 5, 6)
    tree.store(1, 2, 3, 4, 7, 8)
    assert tree.has(1, 2, 3, 4, 5, 6) and tree.has(1, 2, 3, 4, 7, 8)
    assert tree.cache.num_leaves == 2 and tree.pool.num_cached == 4


def test_match_agrees_with_brute_force_over_random_trees():
    rng = random.Random(5)
    for _ in range(60):
        tree, stored = Tree(512), []
        for _ in range(12):
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 9))]
            tree.store(*tokens)
            stored.append(tokens)
        for _ in range(20):
            wanted = [rng.randrange(2) for _ in range(rng.randrange(0, 18))]
            best = max(
                n
                for tokens in stored
                for n in range(len(tokens) // SIZE + 1)
                if tokens[: n * SIZE] == wanted[: n * SIZE] and n * SIZE <= len(wanted)
            )
            assert len(tree.cache.match("", packed(wanted)).blocks) == best


def test_a_running_sequence_is_not_inserted_below_anothers_block():
    tree = Tree()
    tree.store(1, 2)
    own = tree.pool.take(2)  # computed the same block again, and one more
    tree.cache.insert("", packed([1, 2, 3, 4]), own, only_own=True)
    assert not tree.has(1, 2, 3, 4)
    tree.cache.insert("", packed([1, 2, 3, 4]), own, only_own=False)
    tree.pool.drop(own)
    tree.check()
    assert tree.has(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("lru", (5, 6)), ("lfu", (3, 4)), ("fifo", (1, 2))],
)
def test_lru_lfu_and_fifo_choose_the_evicted_block(policy, victim):
    tree = Tree(policy=policy)
    tree.store(1, 2)  # oldest
    for _ in range(3):
        tree.store(5, 6)  # used often, but not lately
    tree.store(3, 4)
    tree.store(3, 4)
    for _ in range(4):
        tree.store(1, 2)
    tree.cache.evict(1)
    remaining = {t for t in [(1, 2), (3, 4), (5, 6)] if tree.has(*t)}
    assert remaining == {(1, 2), (3, 4), (5, 6)} - {victim}


def test_eviction_removes_tails_and_spares_referenced_blocks():
    tree = Tree()
    blocks = tree.store(1, 2, 3, 4, 5, 6, 7, 8)
    tree.pool.share(blocks[:2])
    assert tree.cache.evict(10) == 2
    assert tree.has(1, 2, 3, 4) and not tree.has(1, 2, 3, 4, 5, 6)
    tree.cache.check()


def test_namespaces_are_separate_trees_and_are_removed_when_empty():
    tree = Tree(4096)
    for number in range(200):
        tree.store(1, 2, namespace=f"tenant-{number}")
    assert not tree.has(1, 2, namespace="tenant-x")
    tree.cache.evict(200)
    assert not tree.cache._roots and tree.pool.num_free == tree.pool.num_usable


def test_cached_blocks_expire_after_their_time_to_live():
    now = [0.0]
    tree = Tree(ttl_s=10.0, clock=lambda: now[0])
    tree.store(1, 2, 3, 4)
    now[0] = 8.0
    tree.store(1, 2, 5, 6)  # renews what it shares
    now[0] = 12.0
    assert tree.has(1, 2, 5, 6) and not tree.has(1, 2, 3, 4)
    assert tree.cache.expire() == 1
    now[0] = 30.0
    assert tree.cache.expire() == 2
    assert tree.pool.num_free == tree.pool.num_usable


def test_the_eviction_heap_stays_bounded():
    tree = Tree(16)
    for number in range(5000):
        tree.store(1, 2, 3, 4)
        tree.store(1, 2, number % 3, 9)
    assert len(tree.cache._leaves) < 200


class Flooded(Tree):
    """One that is always full: room is made for whatever is stored."""

    def __init__(self, **options) -> None:
        self.now = 0.0
        super().__init__(41, clock=lambda: self.now, **options)  # 40 blocks

    def visit(self, tenant: str, *tokens: int, salt: str = "") -> None:
        namespace = tenant + salt
        matched = len(self.cache.match(namespace, packed(tokens)).blocks)
        self.cache.evict(len(tokens) // SIZE - matched - self.pool.num_free)
        self.store(*tokens, namespace=namespace, tenant=tenant)

    def flood(self, tenant: str, count: int, salts: int = 1) -> None:
        for number in range(count):
            self.now += 0.1
            self.visit(tenant, *range(1000 + number, 1008 + number), salt=str(number % salts))


WARM = tuple(range(20))


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
@pytest.mark.parametrize("salts", [1, 50])  # many namespaces are still one tenant
def test_a_flood_of_one_tenant_evicts_its_own_blocks(policy, salts):
    tree = Flooded(policy=policy)
    tree.visit("victim", *WARM)
    tree.flood("flood", 500, salts)
    assert tree.has(*WARM, namespace="victim")
    assert tree.pool.num_cached > 30  # what the victim does not use is there to be used


def test_a_tenant_keeps_at_most_its_equal_share_under_pressure():
    tree = Flooded()
    tree.visit("greedy", *range(70))  # 35 of 40
    tree.flood("other", 200)
    assert tree.has(*range(20), namespace="greedy")
    assert not tree.has(*range(60), namespace="greedy")


def test_blocks_of_an_idle_tenant_lose_their_protection():
    tree = Flooded()
    tree.visit("gone", *WARM)
    tree.flood("a", 50)
    tree.now += 1000
    tree.flood("a", 50)
    assert not tree.cache.match("gone", packed(WARM)).blocks
    assert list(tree.cache._leaves.by_tenant) == ["a"]


def test_a_single_tenant_may_fill_the_cache_by_policy_order():
    tree = Flooded()
    tree.visit("a", *WARM)
    tree.flood("a", 100)
    assert not tree.has(*WARM, namespace="a")
