"""Even steps: what decode is promised, what a burst may take, and that no token changes."""

import random

import pytest

from engine.backends.custom.runtime import pacing as even_steps
from engine.backends.custom.runtime.budget import StepBudget
from engine.backends.custom.runtime.pacing import LONG_GAPS, MAX_CREDIT, Pacing
from engine.backends.custom.runtime.roster import Demand
from tests.toy_engine import ToyEngine

LARGEST, MAX_SLOTS = 8192, 1024


def seconds(num_decoding: int, num_prompt_tokens: int) -> float:
    return 1.2e-3 + 5e-6 * num_decoding + 4e-6 * num_prompt_tokens


def learned(sizes: tuple[int, ...] = ()) -> Pacing:
    budget = StepBudget(LARGEST, MAX_SLOTS, 0.2)
    for _ in range(50):
        for rows in (1, 64, 256):
            budget.record(rows, 0, seconds(rows, 0))
            budget.record(rows, 512, seconds(rows, 512))
    return Pacing(budget, sizes)


def demand(num_decoding: int, num_starting: int, length: int = 128, **changes: int) -> Demand:
    counts = {"num_running": num_decoding, "num_prompt_tokens": num_starting * length, **changes}
    return Demand(num_decoding=num_decoding, num_starting=num_starting, **counts)


@pytest.mark.parametrize("rows", [40, 256, 1000])
def test_a_prompt_beside_decode_makes_a_step_less_than_twice_as_long(rows: int) -> None:
    tokens = learned().tokens(demand(rows, 20))
    assert 1.7 < seconds(rows, tokens - rows) / seconds(rows, 0) < 2.0


def test_an_idle_engine_takes_large_steps() -> None:
    assert learned().tokens(demand(0, 60)) == learned().tokens(demand(0, 1)) == LARGEST


def test_the_few_that_decode_let_a_burst_start() -> None:
    pacing = learned()
    assert pacing.tokens(demand(2, 60)) == LARGEST
    assert pacing.tokens(demand(61, 60)) < LARGEST


def test_a_step_is_filled_up_to_the_size_to_which_it_is_padded() -> None:
    assert learned((64, 512, 1024)).tokens(demand(256, 20)) == 1024


def test_steps_are_longer_where_requests_need_more_prefill_to_go_on() -> None:
    """Of 256 streams with 512 prompt tokens each, two begin in every step."""
    pacing, started, new = learned(), 0, 0
    for _ in range(2000):
        started, new = started + 1024, new + 256
        counts = {"num_started_tokens": started, "num_new_tokens": new}
        tokens = pacing.tokens(demand(256, 2, 512, **counts))
    assert 1024 < tokens - 256 < 1300


def test_a_request_after_days_of_idleness_is_like_any_other(monkeypatch) -> None:
    """By then the decayed sums are next to nothing, and a prompt starts before its first token."""
    monkeypatch.setattr(even_steps, "MEMORY", 0.9)  # so that fewer idle turns are as many days
    pacing = learned()
    counts = {"num_started_tokens": 1024, "num_new_tokens": 256}
    for _ in range(10_000):
        pacing.tokens(demand(0, 0, **counts))
    counts["num_started_tokens"] += 1024
    assert 64 < pacing.tokens(demand(64, 1, 512, **counts)) < LARGEST


def test_few_gaps_are_long_whatever_arrives() -> None:
    rng, pacing, num_long, num_gaps = random.Random(3), learned(), 0, 0
    for _ in range(20_000):
        rows, starting = rng.choice([1, 3, 20, 200]), rng.choice([0, 1, 30, 300])
        num_gaps += rows
        num_long += rows * (pacing.tokens(demand(rows, starting)) == LARGEST)
    assert 0 < num_long < LONG_GAPS * num_gaps + MAX_CREDIT


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_all_requests_start_in_order_and_have_the_tokens_of_each_alone(
    depth: int, seed: int
) -> None:
    """`check` compares all tokens with those of each request alone, and every step is watched: no
    request overtakes another.
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
