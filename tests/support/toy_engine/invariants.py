"""The runtime's invariants, recomputed from its raw state.

Nothing here calls the runtime's own `check`: each rule is implemented a second time, independently.
A KV cell of the toy model is a hash of all tokens before it, so the contents of cached blocks can
be checked too.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from engine.runtime.groups.windows import min_window_blocks
from engine.runtime.model_runner import NULL_BLOCK, BatchInputs
from engine.runtime.radix_cache import Node
from engine.runtime.sequence import MAX_PREEMPTIONS, ScheduledBatch
from engine.runtime.sequence_table import GUESSED_TOKENS, MUCH_SHORTER
from tests.support.toy_engine.runner import CRASH_TOKEN, NAN_TOKEN, mix


@lru_cache(maxsize=1 << 16)
def cell_after(tokens: tuple[int, ...]) -> int:
    """What the toy model writes to the KV cell of the last token."""
    return mix(cell_after(tokens[:-1]) if len(tokens) > 1 else 1, tokens[-1])


class Snapshot:
    """A copy of the state of the pool, the tree and the sequences."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.pool, self.kv = engine.pool, engine.kv
        self.size = engine.spec.block_size
        self.running = list(engine.scheduler.table.running)
        self.waiting = list(engine.scheduler.table.waiting)
        self.held: Counter[int] = Counter(engine.hostages)
        for seq in self.running:
            self.held.update(seq.blocks)
        # Each node with its namespace, and the tokens and blocks from the root to its end.
        self.paths = list(self._walk())
        self.cached = [block for *_, node in self.paths for block in node.blocks]
        # The windowed block or the checkpoint of each cached block that has one.
        self.windowed = {
            block: entry
            for *_, node in self.paths
            for side in node.sides
            for block, entry in zip(node.blocks, side, strict=True)
            if entry != NULL_BLOCK
        }

    def _walk(self) -> Iterator[tuple[str, tuple[int, ...], list[int], Node]]:
        for namespace, root in self.kv.radix._roots.items():
            pending = [((), [], child) for child in root.children.values()]
            while pending:
                tokens, blocks, node = pending.pop()
                tokens, blocks = (*tokens, *node.tokens), [*blocks, *node.blocks]
                yield namespace, tokens, blocks, node
                pending += [(tokens, blocks, child) for child in node.children.values()]


def check_invariants(engine) -> None:
    now = Snapshot(engine)
    for check in CHECKS:
        check(now)


def conservation(now: Snapshot) -> None:
    """INV-01: every block is free, evictable or referenced, and nothing is referenced when idle."""
    evictable = set(now.cached) - now.held.keys()
    total = now.pool.num_free + len(evictable) + len(now.held)
    assert total == now.pool.num_blocks - 1, "blocks appeared or vanished"
    if not now.running and not now.waiting:
        assert now.held.keys() == set(now.engine.hostages), "blocks are held and nobody runs"


def reference_counts(now: Snapshot) -> None:
    """INV-02: a count is the number of holders, and never negative."""
    for block in range(now.pool.num_blocks):
        holders = now.held[block] + now.cached.count(block)
        assert now.pool.refs(block) == holders >= 0, (block, now.pool.refs(block), holders)


def free_list(now: Snapshot) -> None:
    """INV-03: no block is free twice, or free and held."""
    free = now.pool._free
    assert len(free) == len(set(free)) == now.pool.num_free
    assert not set(free) & (now.held.keys() | set(now.cached))


def null_block(now: Snapshot) -> None:
    """INV-04: no sequence and no cache node holds the null block."""
    assert NULL_BLOCK not in now.pool._free and NULL_BLOCK not in now.held
    assert NULL_BLOCK not in now.cached and now.pool.refs(NULL_BLOCK) == 0


def holders_are_distinct(now: Snapshot) -> None:
    """INV-06: no holder lists a block twice, so releasing a list drops one reference per block."""
    for seq in now.running:
        assert len(seq.blocks) == len(set(seq.blocks)), seq.request_id


def block_tables(now: Snapshot) -> None:
    """INV-09: a table has as many blocks as its tokens need, at most those promised; the arrays
    agree.
    """
    builder = now.engine.loop._step_runner._builder
    for seq in now.running:
        most = max(len(seq.tokens) + seq.num_sampling, seq.max_len)
        assert -(-seq.num_computed // now.size) <= len(seq.blocks) <= -(-most // now.size)
        if builder._lives[seq.slot] == seq.life:
            known = builder._rooms[seq.slot] // now.size
            assert builder._tables[seq.slot, :known].tolist() == seq.blocks[:known], "a table moved"


def cached_contents(now: Snapshot) -> None:
    """INV-10, INV-16: the tree holds whole blocks with exactly the contents of their tokens, all
    finite.
    """
    cells = now.engine.runner.cells
    for _, tokens, blocks, node in now.paths:
        assert NAN_TOKEN not in tokens and CRASH_TOKEN not in tokens, "a poisoned block is cached"
        assert len(tokens) == len(blocks) * now.size
        first = len(blocks) - len(node.blocks)
        for index in range(first * now.size, len(tokens)):
            place = blocks[index // now.size] * now.size + index % now.size
            assert cells[place] == cell_after(tokens[: index + 1]), "a cached block was overwritten"


def tree_shape(now: Snapshot) -> None:
    """INV-11: no edge is empty, siblings differ in their first block, and each block occurs
    once.
    """
    assert len(now.cached) == len(set(now.cached)), "a block is in the tree twice"
    for *_, node in now.paths:
        assert node.blocks and node.parent is not None
        assert node.parent.children[node.tokens[: now.size].tobytes()] is node
    assert sum(not node.children for *_, node in now.paths) == now.kv.radix.num_leaves


def longest_match(now: Snapshot) -> None:
    """INV-12, INV-17: `match` finds the longest cached prefix, but never all of the tokens."""
    if now.kv.radix._ttl_s is not None:
        return  # expired prefixes still exist but are not matched
    known: dict[tuple, int] = {}
    for namespace, tokens, blocks, _ in now.paths:
        for count in range(1, len(blocks) + 1):
            known[namespace, tokens[: count * now.size]] = blocks[count - 1]
    for seq in (now.running + now.waiting)[:6]:
        tokens, expected = seq.tokens[:-1], []
        for count in range(1, len(tokens) // now.size + 1):
            block = known.get((seq.namespace, tuple(tokens[: count * now.size])))
            if block is None:
                break
            expected.append(block)
        if not now.kv.sharing:
            expected = []
        elif (group := now.engine.windows or now.engine.states) is not None:
            entries = [now.windowed.get(block, NULL_BLOCK) for block in expected]
            expected = expected[: _longest_resume(entries, group.column.reach)]
        assert now.kv.match(seq).blocks == expected


def _longest_resume(entries: list[int], reach: int) -> int:
    return max(n for n in range(len(entries) + 1) if all(entries[max(0, n - reach) : n]))


def ancestors_are_held(now: Snapshot) -> None:
    """INV-13: a holder of a cached block also holds all its ancestors, within one namespace."""
    for namespace, _, blocks, _ in now.paths:
        for seq in now.running:
            mine = [block in seq.blocks for block in blocks]
            assert mine == sorted(mine, reverse=True), "a block is held without its ancestors"
            assert not any(mine) or seq.namespace == namespace, "another tenant's block"


def evictable_count(now: Snapshot) -> None:
    """INV-14: the running count of evictable blocks equals a fresh count."""
    assert now.pool.num_evictable == len(set(now.cached) - now.held.keys())


def windowed_references(now: Snapshot) -> None:
    """The rules of the block pool hold for the windowed blocks, too: a block's count is the number
    of its holders, it is free if that is 0, and evictable if only the tree holds it.
    """
    if now.engine.windows is None:
        return
    pool, holders = now.engine.windows.pool, Counter(now.engine.window_hostages)
    for seq in now.running:
        table = now.engine.windows.tables[seq].blocks
        live = [block for block in table if block != NULL_BLOCK]
        assert len(live) == len(set(live)), seq.request_id
        holders.update(live)
    cached = Counter(now.windowed.values())
    assert all(count == 1 for count in cached.values()), "a windowed block is in the tree twice"
    for block in range(pool.num_blocks):
        assert pool.refs(block) == holders[block] + cached[block], block
        assert pool.is_cached(block) == bool(cached[block]), block
    assert sorted(pool._free) == [b for b in range(1, pool.num_blocks) if not pool.refs(b)]
    assert pool.num_evictable == sum(not holders[block] for block in cached)
    assert NULL_BLOCK not in holders and NULL_BLOCK not in cached


def windows(now: Snapshot) -> None:
    """A sequence holds the windowed blocks of every position that it can still read, and never more
    than it needs at a time. The arrays agree.
    """
    if now.engine.windows is None:
        return
    builder, spec = now.engine.loop._step_runner._builder, now.engine.spec
    most = min_window_blocks(spec.window, now.size, now.kv.max_row)
    for seq in now.running:
        table = now.engine.windows.tables[seq].blocks
        live = [index for index, block in enumerate(table) if block != NULL_BLOCK]
        first = max(0, seq.num_confirmed - spec.window + 1) // now.size
        needed = range(first, -(-seq.num_computed // now.size))
        assert set(needed) <= set(live) and len(table) <= len(seq.blocks), seq.request_id
        assert live == list(range(len(table) - len(live), len(table))), "a hole"
        # Blocks are freed only when the table grows, which is at the start of a block.
        assert len(live) <= most + -(-2 * now.kv.max_row // now.size) + 1, "too many are held"
        if builder._lives[seq.slot] == seq.life and builder._rooms[seq.slot] == seq.room:
            copy = now.engine.windows.by_slot[seq.slot, : len(table)]
            assert copy.tolist() == table


def windowed_contents(now: Snapshot) -> None:
    """The windowed blocks in the tree have exactly the contents of their tokens."""
    if now.engine.windows is None:
        return
    for _, tokens, blocks, node in now.paths:
        for side in node.sides:
            first = len(blocks) - len(node.blocks)
            for index in range(first * now.size, len(tokens)):
                entry = side[index // now.size - first]
                cell = now.engine.runner.window_cells[entry * now.size + index % now.size]
                assert entry == NULL_BLOCK or cell == cell_after(tokens[: index + 1])


def checkpoint_contents(now: Snapshot) -> None:
    """The checkpoints in the tree are the states after their tokens."""
    if now.engine.states is None:
        return
    states = now.engine.runner.states[now.engine.spec.max_slots :]
    for _, tokens, blocks, node in now.paths:
        first = len(blocks) - len(node.blocks)
        for index, entry in enumerate(node.sides[-1], first + 1):
            assert entry == NULL_BLOCK or states[entry] == cell_after(tokens[: index * now.size])


def queues(now: Snapshot) -> None:
    """INV-18, INV-24: each sequence is in exactly one queue, and nothing of ended ones remains."""
    scheduler, everybody = now.engine.scheduler, now.running + now.waiting
    assert len(set(everybody)) == len(everybody)
    indexed = [seq for choices in scheduler.table._requests.values() for seq in choices]
    assert Counter(map(id, indexed)) == Counter(map(id, everybody))
    slots = [seq.slot for seq in now.running]
    assert sorted(slots + scheduler.table.free_slots) == list(range(now.engine.spec.max_slots))
    for seq in now.waiting:
        assert seq.slot < 0 and not seq.blocks and seq.num_computed == 0
        assert seq.room == 0
        assert now.engine.windows is None or seq not in now.engine.windows.tables
    launched = now.engine.loop._launched
    drafted = {row.seq: len(row.draft) for row in launched.batch.rows} if launched else {}
    for seq in everybody:
        assert seq.finish_reason is None
        known = len(seq.tokens) + seq.num_sampling + drafted.get(seq, 0)
        assert 0 <= seq.num_confirmed <= seq.num_computed <= known
    for each in now.engine.loop._admission.pending.requests.values():
        assert each.choices, "a grammar compiles for nobody"
    if not everybody:
        assert not scheduler.table.inflight._owners and not scheduler.table.inflight._chains


def preemptions(now: Snapshot) -> None:
    """INV-23: no sequence is preempted forever."""
    for seq in now.running + now.waiting:
        assert seq.queue.num_preemptions <= MAX_PREEMPTIONS


CHECKS = (
    conservation,
    reference_counts,
    free_list,
    null_block,
    holders_are_distinct,
    block_tables,
    cached_contents,
    tree_shape,
    longest_match,
    ancestors_are_held,
    evictable_count,
    windowed_references,
    windows,
    windowed_contents,
    checkpoint_contents,
    queues,
    preemptions,
)


@contextmanager
def noted(violations: list[str]) -> Iterator[None]:
    """Record assertion errors here, where the runtime would handle them as its own failure and go
    on.
    """
    try:
        yield
    except AssertionError as error:
        violations.append(str(error))
        raise


def check_writes(engine, inputs: BatchInputs) -> None:
    """INV-07, INV-08: a row writes only to its own unshared blocks, each position once, and no row
    reads what another row writes in the same step.
    """
    if not inputs.write_slots.any():
        return  # a warm-up step without a sequence
    size, writers = engine.spec.block_size, {}
    for row in range(len(inputs.slots)):
        for place in inputs.write_slots[inputs.query_start[row] : inputs.query_start[row + 1]]:
            block = int(place) // size
            assert writers.setdefault(block, row) == row, f"block {block} has two writers"
            if engine.spec.has_state:
                continue  # after a fault, a row is computed again, with the same results
            assert engine.pool.refs(block) == 1, f"block {block} is shared and written"
            assert not engine.pool.is_cached(block), f"block {block} is cached and written"
    if engine.windows is not None:
        for block in {int(place) // size for place in inputs.window_slots}:
            pool = engine.windows.pool
            assert pool.refs(block) == 1, f"windowed block {block} is shared and written"
            assert not pool.is_cached(block), f"windowed block {block} is cached and written"
    for row, table in enumerate(inputs.block_tables):
        for block in table[: -(-int(inputs.seq_lens[row]) // size)]:
            assert writers.get(int(block), row) == row, f"row {row} reads what another writes"


class WatchedScheduling:
    """INV-19, INV-20: budgets are kept, and every running sequence gets a row. A sequence is
    overtaken by a later one of its tenant only if that is much shorter than a prompt in progress,
    or if it finds too few free blocks itself, and then by a bounded number of tokens.
    """

    def __init__(self, scheduler, violations: list[str]) -> None:
        self._scheduler = scheduler
        self._violations = violations

    def __call__(self, budget: int, now: float, *, pauses: bool = False) -> ScheduledBatch | None:
        scheduler = self._scheduler
        waited = list(scheduler.table.waiting)
        owed = [
            seq
            for seq in scheduler.table.running
            if len(seq.tokens) + seq.num_sampling < seq.num_prompt + seq.max_tokens
            and seq.num_computed < len(seq.tokens) + seq.num_sampling  # it verifies no draft
        ]
        prompts = [seq for seq in owed if seq.num_computed < seq.num_prompt]
        longest = max((seq.num_uncomputed for seq in scheduler.table.running), default=0)
        # It is this in its place.
        batch = type(scheduler).schedule(scheduler, budget, now, pauses=pauses)
        rows = batch.rows if batch is not None else ()
        if pauses and any(row.start < row.seq.num_prompt for row in rows):
            owed = prompts
        with noted(self._violations):
            self._check(batch, budget, waited, owed, longest)
        return batch

    def _check(
        self,
        batch: ScheduledBatch | None,
        budget: int,
        waited: list,
        owed: list,
        longest: int,
    ) -> None:
        scheduler = self._scheduler
        rows = batch.rows if batch is not None else ()
        assert sum(row.length for row in rows) <= budget, "a step is over its budget"
        assert all(row.length >= 1 for row in rows)
        assert len(scheduler.table.running) <= scheduler.table.max_slots
        scheduled = {row.seq for row in rows}
        assert all(seq in scheduled or seq.slot < 0 for seq in owed), "somebody got no token"
        admitted = [seq for seq in waited if seq.slot >= 0]
        max_passing = sum(seq.num_prompt + GUESSED_TOKENS for seq in admitted)
        for seq in waited:
            is_held = seq.queue.held_by is not None or scheduler.kv.is_reading(seq)
            if seq.slot >= 0 or is_held or seq.num_sampling:
                continue
            for other in admitted:
                peers = (other.priority, other.tenant) == (seq.priority, seq.tenant)
                num_new = len(other.tokens) - other.num_matched * scheduler.kv.block_size
                is_short = MUCH_SHORTER * num_new <= longest
                is_passed = 0 < seq.queue.num_passed < len(seq.tokens) + max_passing
                overtaken = peers and other.arrival > seq.arrival and not (is_short or is_passed)
                assert not overtaken, f"{other.request_id} overtook {seq.request_id}"
