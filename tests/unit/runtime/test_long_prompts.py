"""What a long prompt may cost a short one, and the reverse. Waits are counted in steps."""

import pytest

from engine.runtime.sequence_table import MAX_PASSED
from tests.support.toy_engine.engine import ToyEngine


def turns_until_first_token(engine: ToyEngine, name: str, limit: int = 200) -> int:
    for number in range(limit):
        if engine.outcomes[name, 0].tokens:
            return number
        engine.turn()
    raise AssertionError("it never began")


def long_prompt(length: int, number: int = 0) -> list[int]:
    return [(number + index * 7) % 19 for index in range(length)]


def wide_engine(length: int, **options) -> ToyEngine:
    given = {"num_blocks": 4 * length, "max_slots": 8, "max_seq_len": 2 * length, "budget": 16}
    return ToyEngine(**given | options)


@pytest.mark.parametrize("num_decoding", [0, 2])
@pytest.mark.parametrize("num_long", [1, 4])
def test_the_wait_of_a_short_prompt_is_independent_of_a_long_prompts_length(num_long, num_decoding):
    waits = set()
    for length in (200, 800, 2400):
        engine = wide_engine(num_long * length, budget=16 + num_decoding)
        for number in range(num_decoding):
            engine.submit(f"decode{number}", [number, 1], max_tokens=length)
        engine.turn(3)
        for number in range(num_long):
            engine.submit(f"long{number}", long_prompt(length, number), max_tokens=2)
        engine.turn(2)
        engine.submit("short", [9, 8, 7, 6, 5], max_tokens=2)
        waits.add(turns_until_first_token(engine, "short"))
        assert not engine.outcomes["long0", 0].tokens
    assert len(waits) == 1 and max(waits) <= 3


def test_a_long_prompt_makes_progress_beside_endless_short_ones():
    """Short prompts take at most three quarters of each step from a long one."""
    engine = wide_engine(800)
    engine.submit("long", long_prompt(800), max_tokens=2)
    engine.turn()
    number, turns = 0, 0
    while not engine.outcomes["long", 0].tokens and turns < 1000:
        engine.submit(f"short{number}", [number % 19, 3, number // 19 % 19, 5], max_tokens=1)
        engine.turn()
        number, turns = number + 1, turns + 1
    assert turns <= 800 / (16 / 4)


def test_the_next_long_prompt_is_not_passed_forever():
    engine = wide_engine(1600)
    engine.submit("long", long_prompt(400), max_tokens=2)
    engine.turn()
    engine.submit("next", long_prompt(400, 1), max_tokens=2)
    number = turns = 0
    while not engine.outcomes["next", 0].tokens and turns < 1000:
        engine.submit(f"short{number}", [number % 19, 3, number // 19 % 19, 5], max_tokens=1)
        engine.turn()
        number, turns = number + 1, turns + 1
    assert turns <= 2 * 400 / (16 / 4) + 16


def test_prefill_reserved_for_short_prompts_is_used_by_the_long_one_if_free():
    """A long one waits behind another one. No step is smaller because of that."""
    engine = wide_engine(800)
    engine.submit("long", long_prompt(320), max_tokens=1)
    engine.submit("next", long_prompt(320, 1), max_tokens=1)
    assert turns_until_first_token(engine, "long") <= 320 // 16 + 1


def test_a_short_prompt_overtakes_one_that_lacks_blocks():
    engine = ToyEngine(num_blocks=64, block_size=2, max_slots=4, max_seq_len=128, budget=64)
    engine.submit("busy", long_prompt(60), max_tokens=60)
    engine.turn(2)
    engine.submit("large", long_prompt(100, 1), max_tokens=2)
    engine.turn()
    engine.submit("short", [1, 2, 3], max_tokens=2)
    assert turns_until_first_token(engine, "short") <= 3
    assert not engine.outcomes["large", 0].tokens
    engine.run()
    engine.check()


def test_a_prompt_short_of_blocks_is_overtaken_by_at_most_its_own_number_of_tokens():
    engine = ToyEngine(num_blocks=64, block_size=2, max_slots=4, max_seq_len=128, budget=64)
    engine.submit("busy", long_prompt(60), max_tokens=60)
    engine.turn(2)
    engine.submit("large", long_prompt(100, 1), max_tokens=2)
    number = 0
    while not engine.outcomes["large", 0].tokens:
        engine.submit(f"short{number}", [number % 19, 3, number // 19 % 19], max_tokens=20)
        engine.turn()
        number += 1
        assert number < 400
    first = [name for (name, _), each in engine.outcomes.items() if each.tokens]
    assert len([name for name in first if name.startswith("short")]) <= 100 / 23 + MAX_PASSED
    engine.run()
    engine.check()
