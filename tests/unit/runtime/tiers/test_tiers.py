"""Tiers of the prefix cache under the toy engine, whose every token depends on its KV contents."""

import threading
from contextlib import suppress

import numpy as np
import pytest

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import UNSHARED, Abort
from engine.runtime.tiers import health, kv_tiers
from engine.runtime.tiers import offload_worker as mover_module
from engine.runtime.tiers.disk import DiskTier
from engine.runtime.tiers.health import WatchedTier
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import KVTiers
from engine.runtime.tiers.offload_worker import OffloadWorker
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.tiers import InlineMover, tiered_engine

MIB = 2**20
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
SHAPES = {
    "plain": {},
    "windows": {"window": 4, "num_window_blocks": 24},
    "states": {"has_state": True, "num_checkpoints": 8},
}


def disk(path, **options) -> DiskTier:
    return DiskTier(path, options.pop("max_bytes", MIB), "lru", None, **options)


def answer(engine, name: str, prompt=PROMPT, **options):
    engine.submit(name, prompt, max_tokens=6, **options)
    engine.run()
    engine.check()
    return engine.outcomes[name, 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_restarted_engine_continues_from_the_blocks_on_disk(tmp_path, shape) -> None:
    first, _ = tiered_engine(disk(tmp_path), **SHAPES[shape])
    told = answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path), **SHAPES[shape])
    again = answer(second, "b")
    assert again.tokens == told.tokens
    assert again.num_cached == 16 if shape == "plain" else again.num_cached >= 8
    assert mover.tiers[0].num_hits >= 4 and mover.tiers[0].num_bad == 0
    # The answer is stored as well, so that a conversation goes on from it.
    third, _ = tiered_engine(disk(tmp_path), **SHAPES[shape])
    longer = answer(third, "c", [*PROMPT, *told.tokens, 1, 2])
    assert longer.num_cached >= (20 if shape == "plain" else 8)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_the_pool_evicted_come_back_from_host_memory(shape) -> None:
    engine, mover = tiered_engine(HostTier(MIB, "lru", None), num_blocks=16, **SHAPES[shape])
    answer(engine, "a")
    engine.kv.flush()
    again = answer(engine, "b")
    assert again.num_cached >= 8 and mover.tiers[0].num_hits >= 4


def test_a_host_tier_for_a_gpu_lends_its_blocks() -> None:
    made: list[int] = []

    def new_row(num_bytes: int):
        made.append(num_bytes)
        return np.empty(num_bytes, np.uint8)

    tier = HostTier(MIB, "lru", None, new_row)
    engine, _ = tiered_engine(tier, num_blocks=16)
    written, write = [], engine.runner.write_blocks
    engine.runner.write_blocks = lambda group, blocks, rows: (
        written.extend(rows),
        write(group, blocks, np.array(rows)),
    )
    right = answer(engine, "a").tokens
    engine.kv.flush()
    assert answer(engine, "b").tokens == right
    assert written and len(made) == tier.num_records
    kept = [record.payload for record in tier._records.values()]
    assert all(any(row is each for each in kept) for row in written), "none was copied"
    engine.check()


def test_tenants_do_not_share_blocks(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a", salt="one")
    second, _ = tiered_engine(disk(tmp_path))
    assert answer(second, "b", salt="two").num_cached == 0
    assert answer(second, "c", salt="one").num_cached == 16


def test_blocks_that_no_other_request_can_use_are_not_stored(tmp_path) -> None:
    engine, _ = tiered_engine(disk(tmp_path))
    answer(engine, "a", salt=f"{UNSHARED}1")
    assert not list(tmp_path.iterdir())
    assert answer(engine, "b", salt=f"{UNSHARED}1").num_cached == 16, "from the KV pool"


def test_blocks_that_do_not_fit_in_the_queue_are_stored_later(tmp_path) -> None:
    """The queue has room for fewer blocks than one step computes."""

    def small(*given, **named) -> InlineMover:
        return InlineMover(*given, **named, max_queued_bytes=3 * block_bytes)

    block_bytes = ToyEngine().runner.bytes_per_block("full")
    engine, _ = tiered_engine(disk(tmp_path), make_mover=small)
    for count in (3, 6, 8):
        answer(engine, str(count))
        assert len(list(tmp_path.glob("*/*.full"))) >= count


def test_another_model_does_not_find_the_stored_blocks(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path), identity="other weights")
    assert answer(second, "b").num_cached == 0 and mover.tiers[0].num_bad == 0


@pytest.mark.parametrize(("token_s", "load_s"), [(1e-9, 0.0), (0.01, 100.0)])
def test_blocks_are_recomputed_if_that_is_faster_than_loading(tmp_path, token_s, load_s) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path), prompt_s=lambda count: token_s * count)
    mover.tiers[0].loaded(1, 1, 0, load_s)  # as measured
    assert answer(second, "b").num_cached == 0


def test_a_tier_that_seems_slow_is_tried_with_a_few_blocks(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(health, "USUAL_BYTES_PER_S", 1)
    answer(tiered_engine(disk(tmp_path))[0], "a")
    second, mover = tiered_engine(disk(tmp_path), prompt_s=lambda count: 0.01 * count)
    assert answer(second, "b").num_cached == 4, "two blocks"
    second.kv.flush()
    assert answer(second, "c").num_cached == 16, "now it is known to be fast"
    mover.tiers[0].loaded(1, 2**30, 0, 2**30)
    second.kv.flush()
    assert answer(second, "d").num_cached == 0, "now it is known to be slow"
    monkeypatch.setattr(health, "PROBE_AFTER_S", -1.0)
    second.kv.flush()
    assert answer(second, "e").num_cached == 4, "that was long ago"


def test_a_damaged_block_is_recomputed_and_counted(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    for file in tmp_path.glob("*/*.full"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    second, mover = tiered_engine(disk(tmp_path))
    answer(second, "b")
    assert mover.tiers[0].num_bad >= 1
    # What was computed again has replaced the damaged block.
    third, mover = tiered_engine(disk(tmp_path))
    assert answer(third, "c").num_cached >= 2 and mover.tiers[0].num_hits >= 1


def test_a_failing_tier_costs_only_its_blocks(tmp_path) -> None:
    class Broken(DiskTier):
        def find(self, names):
            raise OSError("gone")

        def store(self, records):
            raise OSError("full")

    engine, mover = tiered_engine(Broken(tmp_path, MIB, "lru", None))
    for name in "abc":
        answer(engine, name)
    assert not mover.tiers[0].is_readable and mover.tiers[0].num_errors == 2
    with suppress(StopIteration):
        next(tmp_path.iterdir())
        raise AssertionError("a file was written")


@pytest.mark.parametrize("has_other", [False, True])
def test_blocks_are_not_copied_repeatedly_for_a_failing_tier(tmp_path, has_other) -> None:
    class Full(DiskTier):
        def store(self, records):
            raise OSError("full")

    tiers = [Full(tmp_path, MIB, "lru", None)]
    engine, _ = tiered_engine(*tiers, *([HostTier(MIB, "lru", None)] if has_other else []))
    copied = []
    read_blocks = engine.runner.read_blocks
    engine.runner.read_blocks = lambda group, ids: (copied.extend(ids), read_blocks(group, ids))[1]
    for name in "abc":
        answer(engine, name)
    assert len(copied) < 20, "three times 8 blocks of the prompt, and those of the answers"


def test_a_failing_tier_is_logged_once(tmp_path, caplog) -> None:
    class Gone(DiskTier):
        def tidy_up(self) -> None:
            raise OSError("gone")

    now = 0.0
    watched = WatchedTier(Gone(tmp_path, MIB, "lru", None), lambda: now)
    for _ in range(5):
        watched.tidy_up()
        now += 60.0
    assert watched.num_errors == 5 and len(caplog.records) == 1


def test_a_full_tier_evicts_the_least_recently_used(tmp_path) -> None:
    engine, mover = tiered_engine(disk(tmp_path, max_bytes=2000))
    for index in range(8):
        answer(engine, str(index), [index, *PROMPT])
    files = list(tmp_path.glob("*/*.full"))
    assert 0 < sum(file.stat().st_size for file in files) <= 2000
    assert mover.tiers[0].tier.num_bytes == sum(file.stat().st_size for file in files)


def test_two_requests_for_the_same_blocks_load_them_once(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path))
    for name in "bc":
        second.submit(name, PROMPT, max_tokens=6)
    second.run()
    second.check()
    assert mover.tiers[0].num_hits == 8
    assert {second.outcomes[name, 0].num_cached for name in "bc"} == {16}


def test_loading_blocks_does_not_evict_the_prefix_they_continue(tmp_path) -> None:
    """The pool has room for one prompt only, and its first blocks are the next to be evicted."""
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path), num_blocks=12)
    answer(second, "start", PROMPT[:5])
    answer(second, "other", [1, 1, 2, 2, 3, 3])
    again = answer(second, "b")
    assert again.num_cached == 16 and mover.tiers[0].num_hits >= 6


def test_an_abort_while_blocks_are_loaded_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kv_tiers, "FIRST_WAIT_S", 1000.0)
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path))
    mover.read = super(type(mover), mover).read  # the thread that would read does not run
    second.submit("b", PROMPT, max_tokens=6)
    second.submit("c", [20, 21], max_tokens=3)
    second.turn()
    seq = next(each for each in second.scheduler.table.sequences() if each.request_id == "b")
    assert second.kv.is_reading(seq) and seq.slot < 0, "it waits for its blocks"
    second.turn(3)
    assert second.outcomes["c", 0].tokens, "others go on"
    second.channel.inbox.append(Abort("b"))
    second.turn()
    assert not second.kv.is_reading(seq) and not second.kv.find(KVTiers)._jobs
    assert mover._reads[0].is_cancelled
    second.check()


def test_a_sequence_continues_if_the_one_loading_its_blocks_is_aborted(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, mover = tiered_engine(disk(tmp_path))
    mover.read = super(type(mover), mover).read
    for name in "bc":
        second.submit(name, PROMPT, max_tokens=6)
    second.turn()
    job = mover._reads[0]
    loading = second.kv.find(KVTiers)._of
    assert {loading[each].job for each in second.scheduler.table.sequences()} == {job}
    del mover.read
    while not job.ready:
        mover.read_some(job)  # blocks arrive, and then the request that asked for them ends
    second.channel.inbox.append(Abort("b"))
    second.run()
    second.check()
    assert second.outcomes["c", 0].num_cached == 16


def test_loaded_blocks_not_yet_used_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mover_module, "MAX_ALL_AHEAD_BYTES", 1)
    first, _ = tiered_engine(disk(tmp_path))
    for name, start in ("a", 1), ("b", 2):
        answer(first, name, [start, *PROMPT])
    second, mover = tiered_engine(disk(tmp_path))
    mover.read = super(type(mover), mover).read
    for name, start in ("c", 1), ("d", 2):
        second.submit(name, [start, *PROMPT], max_tokens=6)
    second.turn()
    done, other = mover._reads
    while not done.is_done:
        mover.read_some(done)
    assert done.ready and mover._next_read() is None, "these blocks wait in memory already"
    second.turn()
    assert not done.ready and mover._next_read() is other
    del mover.read
    mover.read_some(other)
    second.channel.inbox.append(Abort("d"))
    second.run()
    second.check()
    assert not mover._kept


def test_offload_threads_move_blocks_and_end_with_the_engine(tmp_path, monkeypatch) -> None:
    for name in ("FIRST_WAIT_S", "STALL_S"):
        monkeypatch.setattr(kv_tiers, name, 1000.0)
    answers = []
    for name in "ab":
        engine, mover = tiered_engine(disk(tmp_path), make_mover=OffloadWorker)
        mover.start()
        answers.append(answer(engine, name))
        engine.kv.find(KVTiers).close()  # it writes what is queued
        assert not [each for each in threading.enumerate() if each.name.startswith("tier-")]
    assert answers[1].tokens == answers[0].tokens and answers[1].num_cached == 16


def test_a_timeline_names_the_tier_that_had_the_blocks(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, _ = tiered_engine(disk(tmp_path))
    timelines = []
    second._take = lambda delta, take=second._take: (timelines.append(delta.timeline), take(delta))
    answer(second, "b")
    assert timelines[-1].loaded_from == {"disk": 16}
    assert second.loop.stats().tiers[0].saved_tokens == 16


def test_a_bug_while_loading_disables_the_tiers_and_fails_no_request(tmp_path) -> None:
    first, _ = tiered_engine(disk(tmp_path))
    answer(first, "a")
    second, _ = tiered_engine(disk(tmp_path))

    def fails(*given) -> None:
        raise RuntimeError("no such device")

    second.runner.write_blocks = fails
    assert answer(second, "b").num_cached == 0
    assert second.kv.find(KVTiers).has_failed
    assert not second.loop.stats().tiers[0].is_up
    assert answer(second, "c").num_cached == 16, "from the KV pool"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_failure_to_publish_loaded_blocks_does_not_end_the_tiers(tmp_path, shape) -> None:
    told = answer(tiered_engine(disk(tmp_path), **SHAPES[shape])[0], "a")
    engine, _ = tiered_engine(disk(tmp_path), **SHAPES[shape])
    with faults.planned(Fault("publish", "memory", at=1)):
        assert answer(engine, "b").tokens == told.tokens
    assert engine.kv.num_unpublished == 1 and not engine.kv.find(KVTiers).has_failed
    engine.kv.flush()
    assert answer(engine, "c").num_cached >= 8, "they are loaded again"


def test_disabled_tiers_have_no_threads(tmp_path, monkeypatch) -> None:
    engine, mover = tiered_engine(disk(tmp_path), make_mover=OffloadWorker)
    mover.start()
    monkeypatch.setattr(engine.kv.find(KVTiers), "_ask", None)  # raises when it is called
    answer(engine, "a")
    assert engine.kv.find(KVTiers).has_failed and not mover._writes
    for thread in mover._threads:
        thread.join(10)
        assert not thread.is_alive()
