"""The runtime with a model whose layers keep states: the toy model's tokens depend on the state in
a sequence's slot, so a state that is lost, stale or another sequence's changes them.
"""

import pytest

from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.runner import CRASH_TOKEN

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
SHARED = (1, 2, 3, 4, 5, 6, 7, 8, 9)


@DEPTHS
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_recurrent_states_continue_after_chunks_and_restart_after_preemption(
    depth: int, num_blocks: int
) -> None:
    engine = ToyEngine(num_blocks, depth=depth, budget=5, has_state=True)
    for number in range(6):
        engine.submit(str(number), (*SHARED[: 3 + number], number), max_tokens=8)
    engine.run()
    engine.check()
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 14)
    assert all(outcome.finish_reason == "length" for outcome in engine.outcomes.values())


@DEPTHS
def test_rows_of_a_failed_step_recompute_their_recurrent_states(depth: int) -> None:
    """The step that fails has changed the states of all its rows. Only the row at fault fails."""
    engine = ToyEngine(depth=depth, budget=8, has_state=True)
    for number in range(3):
        engine.submit(str(number), (*SHARED, number), max_tokens=12)
    engine.turn(8)
    engine.submit("bad", (1, 2, CRASH_TOKEN), max_tokens=2)
    engine.run()
    engine.check()
    reasons = {key[0]: outcome.finish_reason for key, outcome in engine.outcomes.items()}
    assert reasons == {"0": "length", "1": "length", "2": "length", "bad": "error"}


@DEPTHS
def test_a_warm_up_step_changes_no_recurrent_state(depth: int) -> None:
    engine = ToyEngine(depth=depth, max_slots=1, has_state=True)
    engine.submit("one", SHARED, max_tokens=9)
    engine.turn(4)
    engine.loop._recover(None, RuntimeError("nobody's fault"))
    engine.run()
    engine.check()


@DEPTHS
def test_a_second_request_resumes_from_a_state_checkpoint(depth: int) -> None:
    """Only the tokens after the last whole block before the prompt's end are computed again."""
    engine = ToyEngine(depth=depth, budget=5, has_state=True, num_checkpoints=8)
    engine.submit("first", SHARED, max_tokens=3)
    engine.run()
    engine.submit("again", SHARED, max_tokens=5)
    engine.submit("longer", (*SHARED, 11, 12, 13), max_tokens=5)
    engine.run()
    engine.check()
    cached = {key[0]: outcome.num_cached for key, outcome in engine.outcomes.items()}
    assert cached == {"first": 0, "again": 8, "longer": 8}


@DEPTHS
def test_many_requests_share_few_state_checkpoints(depth: int) -> None:
    """Checkpoints are evicted, and sequences run without them, if there are too few."""
    engine = ToyEngine(20, depth=depth, budget=6, has_state=True, num_checkpoints=3)
    for number in range(12):
        engine.submit(str(number), (*SHARED[: 4 + number % 5], number % 3), max_tokens=6)
    engine.run()
    engine.check()
    assert sum(outcome.num_cached for outcome in engine.outcomes.values()) > 0


@DEPTHS
def test_a_failed_step_restarts_from_the_state_checkpoint(depth: int) -> None:
    engine = ToyEngine(depth=depth, budget=8, has_state=True, num_checkpoints=8)
    engine.submit("first", SHARED, max_tokens=2)
    engine.run()
    engine.submit("second", (*SHARED, 10, 11, 12, 13), max_tokens=12)
    engine.turn(4)
    engine.submit("bad", (CRASH_TOKEN,), max_tokens=2)
    engine.run()
    engine.check()
    assert engine.outcomes["second", 0].num_cached == 8
    assert engine.outcomes["second", 0].finish_reason == "length"
