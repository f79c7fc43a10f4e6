"""Scheduling policy: order, priorities, aging, holding, pinning, deadlines and bounds."""

import dataclasses
import random
import time
from types import SimpleNamespace

import msgspec
import pytest

from engine.core.interfaces.request import Abort
from engine.runtime import loop
from engine.runtime.sequence import MAX_PREEMPTIONS, Sequence
from engine.runtime.sequence_table import AGING_STEPS, WaitingQueue
from tests.support.toy_engine.engine import ToyEngine


def order_of_first_tokens(engine: ToyEngine) -> list[str]:
    order: list[str] = []
    for _ in range(500):
        engine.turn()
        for (request_id, _), outcome in engine.outcomes.items():
            if outcome.tokens and request_id not in order:
                order.append(request_id)
        if all(outcome.finish_reason for outcome in engine.outcomes.values()):
            return order
    raise AssertionError("no end")


def test_first_come_first_served_within_a_priority():
    engine = ToyEngine(max_slots=1)
    engine.submit("late", (1, 2), priority=1, max_tokens=2)
    engine.submit("a", (3, 4), max_tokens=2)
    engine.submit("b", (5, 6), max_tokens=2)
    engine.submit("urgent", (7, 8), priority=-1, max_tokens=2)
    assert order_of_first_tokens(engine) == ["urgent", "a", "b", "late"]


def test_aging_overtakes_a_higher_priority():
    engine = ToyEngine(max_slots=1, num_blocks=64)
    engine.submit("patient", (1, 2), priority=1, max_tokens=2)
    engine.submit("first", (9, 9), max_tokens=2)
    engine.turn()
    engine.scheduler.step += 2 * AGING_STEPS
    for number in range(3):
        engine.submit(f"fresh{number}", (3, number), max_tokens=2)
    order = order_of_first_tokens(engine)
    assert order.index("patient") < order.index("fresh0")


def test_a_shared_prompt_is_computed_once_for_all_waiting_requests():
    engine = ToyEngine(max_slots=8, num_blocks=200, block_size=2, budget=8)
    prefix = tuple(range(1, 21))
    for number in range(8):
        engine.submit(f"r{number}", (*prefix, number), max_tokens=3)
    engine.run()
    engine.check()
    computed = engine.runner.num_tokens
    assert computed == len(prefix) + 8 * (1 + 2)  # the prefix once; each tail, and two more tokens
    cached = sorted(engine.outcomes[f"r{n}", 0].num_cached for n in range(8))
    assert cached == [0] + [20] * 7


def test_sequences_waiting_for_a_shared_prefix_continue_if_its_owner_is_aborted():
    engine = ToyEngine(max_slots=4, num_blocks=64, budget=2)
    prompt = tuple(range(1, 16))
    engine.submit("leader", prompt, max_tokens=4)
    engine.turn(2)
    engine.submit("follower", prompt, max_tokens=4)
    engine.turn(2)
    assert engine.scheduler.table.num_running == 1
    engine.channel.inbox.append(Abort("leader"))
    engine.run()
    engine.check()
    assert engine.outcomes["follower", 0].finish_reason == "length"


def test_sequences_do_not_wait_for_blocks_if_sharing_is_off():
    engine = ToyEngine(sharing=False)
    for number in range(2):
        engine.submit(f"r{number}", (1, 2, 3, 4, 5), max_tokens=3)
    engine.turn()
    assert engine.scheduler.table.num_running == 2


def test_admission_order_follows_aged_priorities():
    rng, line = random.Random(1), WaitingQueue()
    blank = dataclasses.fields(Sequence)
    for arrival in range(200):
        required = (dataclasses.MISSING, dataclasses.MISSING)
        names = [f.name for f in blank if (f.default, f.default_factory) == required]
        seq = Sequence(**dict.fromkeys(names, 0))
        seq.arrival, seq.priority = arrival, rng.randrange(3)
        seq.queue.submitted_step = 40 * arrival
        line.add(seq)
    step = 10_000
    order = [(s.priority - (step - s.queue.submitted_step) // AGING_STEPS, s.arrival) for s in line]
    found = [
        (s.priority - (step - s.queue.submitted_step) // AGING_STEPS, s.arrival)
        for s in line.in_order(step)
    ]
    assert found == sorted(order)


def test_finished_requests_are_not_kept_until_their_deadline():
    engine = ToyEngine(max_slots=4)
    for number in range(300):
        engine.submit(f"r{number}", (1, number % 20), max_tokens=1)
        request = engine.channel.inbox.pop()
        engine.channel.inbox.append(msgspec.structs.replace(request, timeout_s=1e6))
        engine.turn()
    assert len(engine.loop._admission._checks.deadlines) < 100


def test_the_first_step_after_idling_is_reported_as_busy():
    engine = ToyEngine()
    beats, forward = [], engine.runner.forward
    engine.loop._pulse = SimpleNamespace(beat=lambda busy, step_timeout_s: beats.append(busy))
    engine.turn()
    assert not beats[-1]

    def watched(inputs):
        assert beats[-1], "a step that hangs here would look idle"
        return forward(inputs)

    engine.runner.forward = watched
    engine.submit("a", (1, 2), max_tokens=2)
    engine.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_steps_time_excludes_the_step_before_it(depth, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = ToyEngine(depth=depth)
    sample = engine.runner.sample

    def slow_sample(handle, sampling):
        pending = sample(handle, sampling)
        wait = pending.wait

        def slow_wait():
            now[0] += 1.0
            return wait()

        pending.wait = slow_wait
        return pending

    engine.runner.sample = slow_sample
    engine.submit("a", (1, 2, 3), max_tokens=9)
    for _ in range(5):
        engine.turn()
    counted = engine.loop.stats()
    assert counted.steps.seconds == counted.num_steps > 2


def test_a_broken_invariant_is_counted_once_and_repaired():
    engine = ToyEngine(max_slots=4)
    engine.submit("a", (1, 2, 3), max_tokens=2)
    engine.run()
    engine.scheduler.table.free_slots.pop()  # a leak
    engine.pool.take(1)  # and another
    engine.submit("b", (1, 2, 3), max_tokens=2)
    engine.run()
    engine.turn(3)
    assert engine.loop.stats().num_invariant_failures == 1
    engine.scheduler.check()


def test_invariants_are_checked_when_nothing_has_just_been_computed():
    """The check takes milliseconds, and the client of a request that has ended may ask again."""
    engine = ToyEngine(max_slots=4)
    checked = []
    engine.scheduler.check = lambda: checked.append(engine.loop.stats().num_steps)
    for name in ("a", "b"):
        engine.submit(name, (1, 2, 3), max_tokens=1)
        engine.turn()  # it begins and ends within one iteration
        assert engine.outcomes[name, 0].finish_reason == "length" and not checked
    engine.turn(2)
    assert checked == [2]


def test_a_sequence_is_preempted_at_most_max_preemptions_times():
    engine = ToyEngine(num_blocks=10, max_slots=6, block_size=2, budget=12)
    for number in range(12):
        engine.submit(f"r{number}", (number, 1, 2, 3), max_tokens=14, temperature=1.0)
    worst = 0
    for _ in range(3000):
        engine.turn()
        live = engine.scheduler.table.sequences()
        worst = max([worst, *(seq.queue.num_preemptions for seq in live)])
        if all(outcome.finish_reason for outcome in engine.outcomes.values()):
            break
    engine.check()
    assert 0 < worst <= MAX_PREEMPTIONS
    assert all(outcome.finish_reason == "length" for outcome in engine.outcomes.values())


def test_after_max_preemptions_a_sequence_gets_all_blocks_it_can_need():
    engine = ToyEngine(num_blocks=32, block_size=2, max_slots=4)
    for name in ("older", "younger"):
        engine.submit(name, (len(name), 1, 2), max_tokens=20)
    engine.turn()
    victim = engine.scheduler.table.running[-1]
    for _ in range(MAX_PREEMPTIONS):
        assert len(victim.blocks) * 2 < victim.max_len
        engine.scheduler._preempt(victim)
        engine.turn()
    assert len(victim.blocks) * 2 >= victim.max_len
    assert engine.scheduler.table.running[0] is victim, "a victim comes from the other end"
    engine.run()
    engine.check()


def test_a_passed_deadline_ends_running_and_waiting_requests():
    engine = ToyEngine(max_slots=1)
    for name in ("running", "waiting"):
        engine.submit(name, (1, 2, 3), max_tokens=30)
        request = engine.channel.inbox.pop()
        engine.channel.inbox.append(msgspec.structs.replace(request, timeout_s=0.0))
    engine.submit("other", (1, 2, 4), max_tokens=5)
    engine.run()
    assert {engine.outcomes[n, 0].error_code for n in ("running", "waiting")} == {"timeout"}
    assert engine.outcomes["other", 0].finish_reason == "length"


def test_queue_timeout_refuses_waiting_requests_and_not_started_ones():
    engine = ToyEngine(max_slots=1)
    limits = {"running": 60.0, "patient": 60.0, "waiting": 1.0}
    for name, limit_s in limits.items():
        engine.submit(name, (1, 2, 3), max_tokens=6)
        request = engine.channel.inbox.pop()
        limited = msgspec.structs.replace(request, timeout_s=600.0, queue_timeout_s=limit_s)
        engine.channel.inbox.append(limited)
        engine.turn()
    engine.loop._send(engine.loop._admission.expire(time.monotonic() + 30))
    engine.turn()
    assert engine.outcomes["waiting", 0].error_code == "rate_limit_exceeded"
    engine.turn()  # the patient one has begun by now, or the first one runs still
    seq = next(s for s in engine.scheduler.table.sequences() if s.request_id == "running")
    assert seq.has_started
    submitted_at = engine.loop._timings.submitted_at(seq)
    engine.loop._send(engine.loop._admission.expire(submitted_at + 61))
    engine.run()
    assert engine.outcomes["running", 0].finish_reason == "length"
    assert engine.outcomes["patient", 0].error_code == "rate_limit_exceeded"
    engine.check()


def test_a_request_has_started_with_its_first_choice():
    engine = ToyEngine(max_slots=1)
    for name in ("several", "behind"):
        engine.submit(name, (1, 2, 3), max_tokens=6, n=3)
        request = engine.channel.inbox.pop()
        limited = msgspec.structs.replace(request, timeout_s=600.0, queue_timeout_s=1.0)
        engine.channel.inbox.append(limited)
    engine.turn()
    engine.loop._send(engine.loop._admission.expire(time.monotonic() + 30))
    engine.run()
    assert {engine.outcomes["several", each].finish_reason for each in range(3)} == {"length"}
    refused = {engine.outcomes["behind", each].error_code for each in range(3)}
    assert refused == {"rate_limit_exceeded"}
    engine.check()


def test_the_waiting_queue_is_bounded():
    engine = ToyEngine(max_slots=1, max_queued=2)
    for number in range(4):
        engine.submit(f"r{number}", (1, number), max_tokens=3)
    engine.run()
    refused = [n for n in range(4) if engine.outcomes[f"r{n}", 0].error_code]
    assert refused == [2, 3]
    assert engine.outcomes["r3", 0].error_code == "rate_limit_exceeded"


def test_every_running_sequence_gets_a_token_in_every_step():
    engine = ToyEngine(max_slots=3, num_blocks=100, budget=4)
    engine.submit("a", (1, 2), max_tokens=30)
    engine.turn(2)
    engine.submit("long", tuple(range(20)), max_tokens=2)
    before = len(engine.outcomes["a", 0].tokens)
    engine.turn(5)
    assert len(engine.outcomes["a", 0].tokens) == before + 5


def test_cached_blocks_and_cached_sequences_are_bounded():
    engine = ToyEngine(num_blocks=64, max_cached_blocks=6, max_cached_sequences=2)
    for number in range(6):
        engine.submit(f"r{number}", (number, number, 1, 2, 3), max_tokens=3)
        engine.run()
        assert engine.pool.num_evictable <= 6
        assert engine.kv.radix.num_leaves <= 2
    engine.check()


def test_the_target_of_used_blocks_grows_with_repeated_prompts():
    engine = ToyEngine(num_blocks=200, target_blocks=10, max_seq_len=40)
    prompts = [(number, *range(16), number) for number in range(5)]
    for prompt in prompts:
        engine.submit(f"first {prompt[0]}", prompt, max_tokens=2)
        engine.run()
        assert engine.pool.num_usable - engine.pool.num_free <= 10
    assert engine.kv.target_blocks == 10, "no prompt came twice"
    for turn in range(3):
        hits = engine.kv.num_hit
        for prompt in prompts:
            engine.submit(f"{turn} {prompt[0]}", prompt, max_tokens=2)
            engine.run()
        engine.check()
    assert engine.kv.num_hit - hits >= 5 * 16, "the last turn finds every prompt"
    assert engine.pool.num_usable - engine.pool.num_free <= engine.kv.target_blocks <= 100
