"""Tenants get equal parts of an engine that can't serve all, and nobody waits for ever."""

import copy
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runtime.budget import StepBudget
from engine.runtime.sequence import Sequence
from engine.runtime.sequence_table import (
    AGING_STEPS,
    GUESSED_TOKENS,
    MAX_REMEMBERED,
    WaitingQueue,
)
from tests.support.toy_engine.engine import ToyEngine

REQUIRED = (dataclasses.MISSING, dataclasses.MISSING)
BLANK = [f.name for f in dataclasses.fields(Sequence) if (f.default, f.default_factory) == REQUIRED]
LARGEST = 64 + GUESSED_TOKENS


def sequence(arrival, tenant, prompt=8, max_tokens=8, priority=0, step=0):
    seq = Sequence(**dict.fromkeys(BLANK, 0))
    seq.tokens = [1] * prompt
    seq.arrival, seq.tenant, seq.priority = arrival, tenant, priority
    seq.num_prompt, seq.max_tokens, seq.queue.submitted_step = prompt, max_tokens, step
    return seq


def admit_one(line, step=0):
    """What the scheduler does with the first in order."""
    seq = next(line.in_order(step))
    line.remove(seq)
    seq.slot = 0
    line.charge(seq)
    return seq


def test_a_single_tenant_is_served_first_come_first_served():
    line = WaitingQueue()
    for arrival in range(20):
        line.add(sequence(arrival, "a", prompt=1 + arrival % 5))
    assert [admit_one(line).arrival for _ in range(20)] == list(range(20))


def test_a_flood_of_one_tenant_does_not_keep_others_waiting():
    line = WaitingQueue()
    for arrival in range(500):
        line.add(sequence(arrival, "flood"))
    for _ in range(50):
        admit_one(line)
    for arrival in range(500, 510):
        line.add(sequence(arrival, "light"))
    admitted = [admit_one(line).tenant for _ in range(20)]
    assert admitted.count("light") == 10


def test_an_idle_tenant_does_not_save_up_turns():
    line = WaitingQueue()
    for arrival in range(100):
        line.add(sequence(arrival, "busy"))
    line.add(sequence(100, "away"))
    for _ in range(60):
        admit_one(line)
    for arrival in range(200, 260):
        line.add(sequence(arrival, "away"))
    admitted = [admit_one(line).tenant for _ in range(40)]
    assert 18 <= admitted.count("away") <= 22


def test_tokens_that_were_not_generated_are_refunded():
    line = WaitingQueue()
    promised = [sequence(arrival, "modest", max_tokens=200) for arrival in range(4)]
    for seq in promised:
        line.add(seq)
    for arrival in (10, 11):
        line.add(sequence(arrival, "other", max_tokens=100))
    first = admit_one(line)
    assert first.tenant == "modest"
    line.settle(first)  # it ended at once, with nothing generated
    assert next(line.in_order(0)).tenant == "other"
    admit_one(line)  # which has been promised less, and has it all
    assert next(line.in_order(0)).tenant == "modest"


def test_a_preempted_sequence_is_admitted_before_new_ones():
    line = WaitingQueue()
    seq = sequence(0, "a", prompt=60)
    line.add(seq)
    line.add(sequence(1, "b", prompt=1))
    assert admit_one(line) is seq
    line.add(seq)  # preempted
    assert next(line.in_order(0)) is seq


def test_aging_bounds_the_delay_by_priorities():
    line = WaitingQueue()
    line.add(sequence(0, "patient", priority=1, step=0))
    for arrival in range(1, 50):
        line.add(sequence(arrival, "urgent", priority=0, step=AGING_STEPS - 10))
    assert next(line.in_order(AGING_STEPS - 1)).tenant == "urgent"
    assert next(line.in_order(AGING_STEPS)).tenant == "patient"


def test_shares_of_past_tenants_are_forgotten():
    line = WaitingQueue()
    line.add(sequence(0, "always", prompt=64, priority=1))
    for arrival in range(1, 4 * MAX_REMEMBERED):
        line.add(sequence(arrival, f"t{arrival}"))
        admit_one(line)
    assert len(line._share._given) <= MAX_REMEMBERED + 3


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(1, 64),  # prompt
            st.integers(1, 400),  # max_tokens
            st.integers(0, 400),  # generated, at most max_tokens of them
            st.integers(0, 3),  # admissions before the next arrival
        ),
        min_size=1,
        max_size=120,
    )
)
def test_no_tenant_starves_and_shares_stay_close(arrivals):
    """While two tenants both wait all the time, what they are given differs by a bounded amount,
    however many and however large the requests of either; in the end everybody has been served.
    """
    line, given_tokens, admitted = WaitingQueue(), dict.fromkeys("abcd", 0), []
    waiting = dict.fromkeys("abcd", 0)
    since = {}  # pair -> what both had when they last began to wait together
    sizes = {}

    def take():
        seq = admit_one(line)
        waiting[seq.tenant] -= 1
        admitted.append(seq)
        given_tokens[seq.tenant] += seq.num_prompt + min(seq.max_tokens, GUESSED_TOKENS)
        for a, b in [(x, y) for x in "abcd" for y in "abcd" if x < y]:
            if not (waiting[a] and waiting[b]):
                since.pop((a, b), None)
                continue
            before = since.setdefault((a, b), (given_tokens[a], given_tokens[b]))
            gained = (given_tokens[a] - before[0], given_tokens[b] - before[1])
            assert abs(gained[0] - gained[1]) <= 3 * LARGEST
        generated = min(sizes[seq.arrival], seq.max_tokens, GUESSED_TOKENS)
        if generated == min(seq.max_tokens, GUESSED_TOKENS):
            seq.tokens += [1] * generated
            line.settle(seq)

    for arrival, (tenant, prompt, max_tokens, generated, pause) in enumerate(arrivals):
        sizes[arrival] = generated
        line.add(sequence(arrival, tenant, prompt, max_tokens))
        waiting[tenant] += 1
        for _ in range(pause):
            if len(line):
                take()
    while len(line):
        take()
    assert sorted(seq.arrival for seq in admitted) == list(range(len(arrivals)))
    for tenant in "abcd":
        own = [seq.arrival for seq in admitted if seq.tenant == tenant]
        assert own == sorted(own)


@settings(max_examples=200, deadline=None)
@given(
    queued=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(1, 64),  # prompt
            st.integers(1, 400),  # max_tokens
            st.integers(-2, 2),  # priority
            st.integers(0, 2 * AGING_STEPS),  # steps before the next arrival
            st.booleans(),  # whether one is admitted then
        ),
        max_size=40,
    ),
    tenant=st.sampled_from("abcd"),
)
def test_num_before_predicts_how_many_sequences_are_admitted_first(queued, tenant):
    line, step = WaitingQueue(), 0
    for arrival, (owner, prompt, max_tokens, priority, pause, admits) in enumerate(queued):
        line.add(sequence(arrival, owner, prompt, max_tokens, min(priority, 0), step))
        step += pause
        if admits:
            admit_one(line, step)
    for priority in (0, -1):
        expected = line.num_before(tenant, priority, step)
        newest = sequence(len(queued), tenant, priority=priority, step=step)
        line.add(newest)
        clone = copy.deepcopy(line)
        before = 0
        while (seq := admit_one(clone, step)).arrival != newest.arrival:
            before += 1
            assert seq.arrival < newest.arrival
        assert expected == before
        line.remove(newest)


def test_lower_priorities_precede_a_new_sequence_only_after_aging():
    line = WaitingQueue()
    line.add(sequence(0, "batch", priority=2, step=0))
    line.add(sequence(1, "batch", priority=2, step=AGING_STEPS))
    assert line.num_before("a", 0, AGING_STEPS) == 0
    assert line.num_before("a", 0, 2 * AGING_STEPS) == 1
    assert line.num_before("a", 0, 3 * AGING_STEPS) == 2
    assert line.num_before("a", 3, AGING_STEPS) == 2


def test_a_priority_orders_only_the_requests_of_its_own_tenant():
    line = WaitingQueue()
    for arrival in range(4):
        line.add(sequence(arrival, "eager", priority=-100))
    line.add(sequence(4, "eager", priority=-101))
    line.add(sequence(5, "calm"))
    line.add(sequence(6, "calm", priority=1))
    admitted = [(seq.tenant, seq.arrival) for seq in (admit_one(line) for _ in range(7))]
    assert admitted[:2] == [("eager", 4), ("calm", 5)]
    assert admitted[-1] == ("calm", 6)


def test_a_light_tenant_is_served_between_a_heavy_tenants_requests():
    engine = ToyEngine(max_slots=1, num_blocks=64)
    for number in range(30):
        engine.submit(f"heavy{number}", (1, 2, number % 9), max_tokens=2, tenant="heavy")
    engine.turn(3)
    engine.submit("light", (3, 4), max_tokens=2, tenant="light")
    ended_before = 0
    while engine.outcomes["light", 0].finish_reason is None:
        engine.turn()
        engine.check()
        ended_before = sum(o.finish_reason is not None for o in engine.outcomes.values())
    assert ended_before <= 5
    engine.run()


def test_a_new_tenant_does_not_wait_for_prompts_in_progress():
    engine = ToyEngine(num_blocks=256, max_slots=8, max_seq_len=256, budget=16)
    for number in range(4):
        engine.submit(f"long{number}", [number] * 200, tenant="flood", max_tokens=4)
    engine.turn(3)
    engine.submit("short", [9, 8, 7], tenant="light", max_tokens=4)
    engine.turn(2)
    assert engine.outcomes["short", 0].tokens, "its first token is there"
    engine.run()
    engine.check()


def test_a_new_tenants_prompt_is_not_split_beside_a_flood_of_prompts():
    engine = ToyEngine(num_blocks=1024, max_slots=20, max_seq_len=256, budget=27)
    for number in range(12):
        engine.submit(f"stream{number}", [number], tenant="flood", max_tokens=200)
    engine.turn(2)
    for number in range(30):
        engine.submit(f"more{number}", [number % 19] * 100, tenant="flood", max_tokens=50)
    engine.turn(2)
    for number in range(8):
        engine.submit(f"short{number}", [9, 8, number] * 4, tenant="light", max_tokens=1)
        engine.turn(2)
        assert engine.outcomes[f"short{number}", 0].tokens, number
    engine.check()


def test_every_other_step_for_a_new_tenant_is_short_and_prefill_continues(monkeypatch):
    # Otherwise a busy machine makes steps with decode shorter.
    monkeypatch.setattr(StepBudget, "tokens", lambda *_: 256)
    engine = ToyEngine(num_blocks=1024, max_slots=16, max_seq_len=256, budget=256)
    for number in range(8):
        engine.submit(f"long{number}", [number] * 200, tenant="flood", max_tokens=4)
    engine.turn(1)
    computed = []
    for number in range(3):
        engine.submit(f"short{number}", [9, 8, number], tenant=f"light{number}", max_tokens=1)
        table = engine.scheduler.table
        before = sum(seq.num_computed for seq in table.sequences())
        engine.turn(1)
        computed.append(sum(seq.num_computed for seq in table.sequences()) - before)
    assert computed[0] < 100 < 200 < computed[1], computed
    assert computed[2] < 100
    engine.run()
    engine.check()


def test_the_last_free_slot_is_reserved_for_a_tenant_without_one():
    engine = ToyEngine(max_slots=3, num_blocks=256, max_seq_len=128)
    for number in range(6):
        engine.submit(f"flood{number}", [1, 2, number], tenant="flood", max_tokens=60)
    engine.turn(3)
    assert engine.scheduler.table.num_running == 2
    engine.submit("light", [9, 8], tenant="light", max_tokens=2)
    engine.turn(2)
    assert engine.outcomes["light", 0].tokens, "it did not wait for the end of another"
    engine.run()
    engine.check()
