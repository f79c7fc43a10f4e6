"""Requests that continue from an engine that died, in the engine that takes them over."""

from msgspec.structs import replace

from engine.core.interfaces.request import Resumed
from engine.runtime.budget import StepBudget
from tests.support.toy_engine.engine import ToyEngine

PROMPTS = [tuple(range(3, 15)), tuple(range(4, 16)), tuple(range(5, 17))]
NUM_TOKENS = 30


class StingyBudget(StepBudget):
    """Beside decode, each step computes one token of prompts."""

    def tokens(self, num_decoding: int, num_running: int) -> int:
        return num_running + 1 if num_decoding else super().tokens(0, num_running)


def resume(engine: ToyEngine, name: str, prompt: tuple[int, ...], num_before: int) -> None:
    """Submit a request of which another engine generated the first tokens."""
    engine.submit(name, prompt, max_tokens=NUM_TOKENS)
    before, _ = engine.expected(name, 0)
    request = engine.channel.inbox.pop()
    resumed = (Resumed(0, tuple(before[:num_before])),)
    engine.channel.inbox.append(replace(request, resumed=resumed))
    engine.outcomes[name, 0].tokens.extend(before[:num_before])


def num_turns(engine: ToyEngine) -> int:
    """Iterations until each request has a new token."""
    known = {key: len(outcome.tokens) for key, outcome in engine.outcomes.items()}
    for turn in range(1, 200):
        engine.turn()
        if all(len(outcome.tokens) > known[key] for key, outcome in engine.outcomes.items()):
            return turn
    raise AssertionError("they never continue")


def test_all_requests_of_a_dead_engine_are_recomputed_together():
    engine = ToyEngine(num_blocks=200, budget=64)
    engine.loop._budget = StingyBudget(64, 4)
    engine.submit("own", (1, 2), max_tokens=60)
    engine.turn(3)
    for number, prompt in enumerate(PROMPTS):
        resume(engine, str(number), prompt, num_before=20)
    # 96 tokens need two steps of 64, and the tokens of the last step are known one step later.
    assert num_turns(engine) <= 3
    engine.run()
    engine.check()
    assert not engine.scheduler.table.is_catching_up


def test_new_requests_after_a_restart_are_prefilled_beside_decode():
    engine = ToyEngine(num_blocks=200, budget=64)
    engine.loop._budget = StingyBudget(64, 4)
    engine.submit("own", (1, 2), max_tokens=60)
    engine.turn(3)
    resume(engine, "resumed", PROMPTS[0], num_before=20)
    engine.turn(3)
    engine.submit("new", PROMPTS[1], max_tokens=3)
    assert num_turns(engine) > 3, "its prompt must not slow down the others"
    engine.run()
    engine.check()
