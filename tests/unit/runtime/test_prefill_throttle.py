"""Even steps: what decode is promised, what a burst may take, and that no token changes."""

import random

import pytest

from engine.runtime import prefill_throttle as even_steps
from engine.runtime.budget import StepBudget
from engine.runtime.prefill_throttle import (
    FIRST_CREDIT,
    LONG_GAPS,
    MAX_PAUSE_S,
    Demand,
    PrefillThrottle,
    StepPlan,
)
from tests.support.toy_engine.engine import ToyEngine

LARGEST, MAX_SLOTS = 8192, 1024


def seconds(num_decoding: int, num_prompt_tokens: int) -> float:
    return 1.2e-3 + 5e-6 * num_decoding + 4e-6 * num_prompt_tokens


def learned(sizes: tuple[int, ...] = ()) -> PrefillThrottle:
    budget = StepBudget(LARGEST, MAX_SLOTS, 0.2)
    for _ in range(50):
        for rows in (1, 64, 256):
            budget.record(rows, 0, seconds(rows, 0))
            budget.record(rows, 512, seconds(rows, 512))
    return PrefillThrottle(budget, sizes)


def demand(num_decoding: int, num_starting: int, length: int = 128, **changes: int) -> Demand:
    counts = {"num_running": num_decoding, "num_prompt_tokens": num_starting * length, **changes}
    return Demand(num_decoding=num_decoding, num_starting=num_starting, **counts)


@pytest.mark.parametrize("rows", [100, 256, 1000])
def test_a_prompt_beside_decode_makes_a_step_less_than_twice_as_long(rows: int) -> None:
    tokens, pauses = learned().plan(demand(rows, 20))
    assert 1.7 < seconds(rows, tokens - rows) / seconds(rows, 0) < 2.0
    assert not pauses


def test_an_idle_engine_takes_large_steps() -> None:
    assert learned().plan(demand(0, 60)) == learned().plan(demand(0, 1)) == (LARGEST, False)


def test_decode_pauses_while_a_burst_of_prompts_is_prefilled() -> None:
    """A burst of 160 prompts is computed in three steps, and the last one has fewer that start than
    that decode.
    """
    pacing = learned()
    steps = [pacing.plan(demand(2 + 64 * step, 160 - 64 * step)) for step in range(3)]
    assert steps == [(LARGEST, True)] * 3
    pacing.plan(demand(162, 0))
    assert pacing.plan(demand(162, 30)).num_tokens < LARGEST


def test_decode_resumes_during_a_long_burst() -> None:
    pacing, plans = learned(), []
    for step in range(100):
        plans.append(pacing.plan(demand(2 + step, 6400 - 64 * step)))
    assert {plan.num_tokens for plan in plans} == {LARGEST}
    num_paused = sum(plan.pauses for plan in plans)
    assert plans == sorted(plans, key=lambda plan: not plan.pauses)
    assert num_paused == pytest.approx(MAX_PAUSE_S / seconds(0, LARGEST), abs=2)


def test_long_prompts_are_not_split_into_small_chunks() -> None:
    assert learned().plan(demand(500, 1, 7000)) == (LARGEST, False)
    assert learned().plan(demand(500, 1, 1000)).num_tokens < LARGEST


def test_step_sizes_are_rounded_to_padded_graph_sizes() -> None:
    """Decode and 0.8 of its time of prefill are 752 tokens. The next smaller size is taken, if it
    is not much smaller.
    """
    assert learned((64, 512, 1024)).plan(demand(256, 20)).num_tokens == 1024
    assert learned((64, 640, 1024)).plan(demand(256, 20)).num_tokens == 640


def test_mixed_steps_are_longer_if_requests_need_more_prefill() -> None:
    """Of 256 streams with 512 prompt tokens each, two begin in every step."""
    pacing, started, new = learned(), 0, 0
    for _ in range(2000):
        started, new = started + 1024, new + 256
        counts = {"num_started_tokens": started, "num_new_tokens": new}
        tokens = pacing.plan(demand(256, 2, 512, **counts)).num_tokens
    assert 1024 < tokens - 256 < 1300


def test_a_request_after_a_long_idle_time_is_scheduled_normally(monkeypatch) -> None:
    """By then the decayed sums are next to nothing, and a prompt starts before its first token."""
    monkeypatch.setattr(even_steps, "MEMORY", 0.9)  # so that fewer idle turns are as many days
    pacing = learned()
    counts = {"num_started_tokens": 1024, "num_new_tokens": 256}
    for _ in range(10_000):
        pacing.plan(demand(0, 0, **counts))
    counts["num_started_tokens"] += 1024
    assert 64 < pacing.plan(demand(64, 1, 512, **counts)).num_tokens < LARGEST


def test_a_second_burst_is_treated_like_the_first() -> None:
    """The first one used all long gaps that were left."""
    pacing = learned()
    for decoding in (60, 120, 180):
        pacing.plan(demand(decoding, 240 - decoding))
    pacing.plan(demand(240, 0))
    assert pacing.plan(demand(100, 20)).num_tokens < LARGEST
    assert pacing.plan(demand(100, 140)) == (LARGEST, True)


def test_few_token_gaps_are_long_if_fewer_sequences_start_than_decode() -> None:
    """All that decode are in one burst, so a large step is a long gap for each of them."""
    rng, pacing, num_long, num_gaps = random.Random(3), learned(), 0, 0
    for _ in range(20_000):
        rows, starting = rng.choice([2, 20, 40, 200]), rng.choice([0, 1])
        starting *= rows - 1
        num_gaps += rows
        plan = pacing.plan(demand(rows, starting, num_new_tokens=num_gaps))
        num_long += rows * (plan.num_tokens == LARGEST)
    assert 0 < num_long < 2 * LONG_GAPS * num_gaps + FIRST_CREDIT


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_throttled_schedules_give_each_request_its_own_tokens(depth: int, seed: int) -> None:
    """`check` compares all tokens with those of each request alone, and every step is watched: only
    much shorter requests overtake others.
    """
    rng = random.Random(seed)
    engine = ToyEngine(max_slots=6, num_blocks=200, budget=8, depth=depth, paces=True)
    for number in range(40):
        prompt = tuple(rng.randrange(8) for _ in range(rng.randint(1, 20)))
        engine.submit(f"r{number}", prompt, max_tokens=rng.randint(1, 8))
        if rng.random() < 0.6:
            engine.turn(rng.randint(1, 6))
    engine.run()
    engine.check()


class Pauses:
    def plan(self, demand: Demand) -> StepPlan:
        return StepPlan(64, pauses=True)


def test_decode_continues_if_no_prompt_can_be_prefilled() -> None:
    """The pool has room for one of these requests, so the next one waits for its end."""
    engine = ToyEngine(max_slots=4, num_blocks=8, budget=64, paces=True)
    engine.loop._throttle = Pauses()
    for number in range(3):
        engine.submit(f"r{number}", tuple(range(12)), max_tokens=10)
    engine.run()
    engine.check()
