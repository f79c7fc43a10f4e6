"""The budget of a step: what it learns, what it promises to those who stream and to those who
wait.
"""

import random

import pytest

from engine.runtime.budget import (
    FIXED_TOKENS,
    PROMPT_MEMORY,
    TARGET_STEP_S,
    CostLine,
    StepBudget,
)
from engine.runtime.model_runner import PROMPT_TOKENS

MAX_TOKENS, MAX_SLOTS = 2048, 64


def cost(num_decoding: int, num_prompt_tokens: int, per_row: float, per_token: float) -> float:
    fixed = 0.003 + per_row * num_decoding if num_decoding else 0.0
    return fixed + per_token * num_prompt_tokens


def learned(
    per_row: float = 0.0005,
    per_token: float = 0.0003,
    noise: float = 0.0,
    min_tokens: int = 1,
    grain: int = 1,
) -> StepBudget:
    """After a while of mixed work on a machine of these speeds."""
    rng = random.Random(1)
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS, min_tokens=min_tokens, grain=grain)
    budget.record(0, 128, cost(0, 128, per_row, per_token))
    for _ in range(200):
        rows = rng.choice([1, 4, 8, 32])
        prompt = rng.choice([0, 0, 0, 16, 64, 200])
        seconds = cost(rows, prompt, per_row, per_token) * rng.uniform(1 - noise, 1 + noise)
        budget.record(rows, prompt, seconds)
    return budget


def test_a_step_is_as_large_as_memory_allows_without_decode() -> None:
    assert StepBudget(MAX_TOKENS, MAX_SLOTS).tokens(0, 0) == MAX_TOKENS
    assert learned().tokens(0, 5) == MAX_TOKENS


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_with_prefill_keeps_the_target_time(rows: int, noise: float) -> None:
    budget = learned(noise=noise)
    prompt = budget.tokens(rows, rows) - rows
    seconds = cost(rows, prompt, 0.0005, 0.0003)
    assert TARGET_STEP_S * (0.97 - noise) < seconds < TARGET_STEP_S * (1.03 + noise)


def test_prefill_may_take_as_long_as_decode_if_decode_exceeds_the_target() -> None:
    budget = learned(per_row=0.002, per_token=0.001)
    alone = cost(32, 0, 0.002, 0.001)
    assert alone > TARGET_STEP_S
    prompt = budget.tokens(32, 32) - 32
    assert cost(32, prompt, 0.002, 0.001) == pytest.approx(2 * alone, rel=0.05)


@pytest.mark.parametrize("num_running", [1, 40, MAX_SLOTS])
def test_every_running_sequence_gets_a_token_and_prefill_makes_progress(num_running: int) -> None:
    budget = learned(per_row=1e-6, per_token=10.0, min_tokens=12)
    # One of those in prefill gets 12 tokens, all others get one.
    assert budget.tokens(1, num_running) == num_running + 12 - (num_running > 1)


def test_prefill_beside_decode_comes_in_whole_tiles() -> None:
    budget = learned(min_tokens=16, grain=16)
    for rows in (1, 4, 8, 32):
        prompt = budget.tokens(rows, rows) - rows
        assert prompt % 16 == 0 and prompt >= 16
        # The sequence whose prompt is computed runs, but it does not decode.
        assert budget.tokens(rows, rows + 1) == rows + prompt


def test_the_budget_never_exceeds_max_tokens() -> None:
    assert learned(per_token=1e-9).tokens(8, 8) == MAX_TOKENS
    assert StepBudget(4, MAX_SLOTS).tokens(1, MAX_SLOTS) == MAX_SLOTS


def test_the_first_prefill_beside_decode_is_small() -> None:
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    budget.record(1, 0, 0.003)
    assert budget.tokens(1, 1) == 1 + PROMPT_TOKENS


def test_the_cost_of_decode_is_not_attributed_to_prefill() -> None:
    """Sixteen tokens beside thirty-two sequences cost little, though the step takes long."""
    budget = learned()
    before = budget.tokens(32, 32)
    for _ in range(50):
        budget.record(32, 16, cost(32, 16, 0.0005, 0.0003))
    assert budget.tokens(32, 32) == pytest.approx(before, rel=0.05)


def test_one_slow_step_changes_the_budget_little_and_a_slower_machine_is_learned() -> None:
    budget = learned()
    before = budget.tokens(8, 8) - 8
    budget.record(8, 0, 5.0)
    budget.record(8, 60, 5.0)
    assert before / 4 < budget.tokens(8, 8) - 8 < before * 2
    for _ in range(60):
        budget.record(8, 0, cost(8, 0, 0.0005, 0.003))
        budget.record(8, 60, cost(8, 60, 0.0005, 0.003))
    assert budget.tokens(8, 8) - 8 <= before / 8


def test_unseen_batch_sizes_are_interpolated_linearly() -> None:
    """Steps of 17 sequences always carry prompts, so none that only continues is ever seen."""
    budget = learned(per_row=0.002)
    alone = cost(17, 0, 0.002, 0.0003)
    prompt = budget.tokens(17, 17) - 17
    assert cost(17, prompt, 0.002, 0.0003) == pytest.approx(2 * alone, rel=0.05)


def test_a_single_observed_batch_size_uses_the_assumed_base_cost() -> None:
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    for _ in range(20):
        budget.record(4, 0, 0.02)
        budget.record(0, 100, 0.03)
    # The base counts as FIXED_TOKENS sequences, so eight take 12 / 8 of the time of four.
    assert FIXED_TOKENS == 4
    assert budget.decode_s(8) == pytest.approx(0.03)
    assert budget.tokens(8, 8) - 8 == pytest.approx(0.03 / 0.0003, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_similar_batch_sizes_do_not_make_drafts_look_expensive(seed: int) -> None:
    """Without drafts, all steps have about as many rows. Slow seconds of the machine then look like
    the cost of a row, and without this no draft would ever be tried again.
    """
    rng = random.Random(seed)
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    for step in range(400):
        rows = rng.choice([6, 7, 8, 8])
        slow = random.Random(seed + step // 30).choice([1.0, 1.0, 1.3])
        budget.record(rows, 0, (0.005 + 0.0004 * rows) * slow)
    assert budget.price(8) < 0.75


def test_faster_steps_than_predicted_never_break_the_budget() -> None:
    """What prompts added fades towards nothing, below what a division can bear."""
    budget = StepBudget(512, 64)
    budget.record(4, 0, 1.0)
    for _ in range(5000):
        budget.record(4, 16, 1e-9)
        assert 4 < budget.tokens(4, 4) <= 512


@pytest.mark.parametrize(("max_tokens", "then"), [(2048, 1024), (100, 64), (64, 64)])
def test_an_out_of_memory_step_halves_the_budget(max_tokens: int, then: int) -> None:
    budget = StepBudget(max_tokens, MAX_SLOTS)
    budget.shrink()
    assert budget.tokens(0, 0) == then


def test_prefill_only_steps_are_not_charged_the_cost_of_decode() -> None:
    """The fixed cost of continuing, which the line has at zero sequences, is no part of theirs."""
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    for rows in (1, 4, 8, 16):
        budget.record(rows, 0, 0.010 + 0.001 * rows)
    for _ in range(50):
        budget.record(0, 100, 0.020)
    assert budget.step_s(4, 4 + 100) == pytest.approx(0.014 + 0.020, rel=0.01)


def test_no_step_time_is_predicted_before_any_prefill() -> None:
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    budget.record(1, 0, 0.5)
    assert budget.step_s(1, 1) is None


def test_an_unexpectedly_slow_step_counts_as_at_most_twice_the_estimate() -> None:
    budget = StepBudget(MAX_TOKENS, MAX_SLOTS)
    budget.record(0, 100, 0.01)
    budget.record(0, 100, 10.0)
    # What is left of the first, and twice its cost, over as many tokens.
    kept = PROMPT_MEMORY * 100
    expected = (PROMPT_MEMORY * 0.01 + 0.02) / (kept + 100) * 180
    assert budget.step_s(0, 180) == pytest.approx(expected)


def test_a_cost_line_through_zero_has_no_share_for_zero_sequences() -> None:
    line = CostLine()
    for count, seconds in ((1, 0.001), (4, 0.1)):
        line.add(count, seconds)
    assert line.at(0) == 0.0 and line.share(0) is None and line.share(2) == pytest.approx(1.0)
