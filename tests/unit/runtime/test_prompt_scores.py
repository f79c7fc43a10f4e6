"""A prompt's own log-probabilities: the oracle's, however its steps are cut, mixed or repeated."""

import numpy as np
import pytest

from engine.runtime.samplers import prompt_logprobs as prompt_logprobs_module
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.runner import VOCAB, prompt_logits, prompt_logprobs

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


def check_scores(engine: ToyEngine, name: str, num_top: int) -> None:
    prompt = engine.requests[name].prompt
    found = engine.outcomes[name, 0].prompt_logprobs
    assert len(found) == len(prompt) - 1
    np.testing.assert_allclose(
        [each.logprob for each in found], prompt_logprobs(prompt), rtol=1e-5, atol=1e-5
    )
    best = [np.argsort(-row, kind="stable")[:num_top] for row in prompt_logits(prompt)[:-1]]
    assert [list(each.top_ids) for each in found] == [list(map(int, ids)) for ids in best]
    assert all(len(each.top_logprobs) == num_top for each in found)
    assert all(list(each.top_logprobs) == sorted(each.top_logprobs)[::-1] for each in found)


def finish(engine: ToyEngine) -> None:
    engine.run()
    engine.check()


@pytest.mark.parametrize("budget", [4, 5, 64])
def test_prompt_logprobs_equal_the_oracle_for_every_chunking(depth, budget):
    engine = ToyEngine(depth=depth, budget=budget, num_blocks=64)
    engine.submit("scored", PROMPT, max_tokens=4, logprobs=2, score_prompt=True)
    engine.submit("chosen", PROMPT[:5], max_tokens=3, logprobs=0, score_prompt=True)
    engine.submit("plain", PROMPT, max_tokens=4)
    finish(engine)
    check_scores(engine, "scored", 2)
    check_scores(engine, "chosen", 0)
    assert engine.outcomes["plain", 0].prompt_logprobs is None


def test_the_number_of_scored_tokens_per_step_is_bounded(depth, monkeypatch):
    monkeypatch.setattr(prompt_logprobs_module, "MAX_SCORED", 3)
    engine = ToyEngine(depth=depth, budget=64, num_blocks=64, max_slots=4)
    for number in range(3):
        engine.submit(f"s{number}", (number, *PROMPT), max_tokens=3, logprobs=1, score_prompt=True)
    most, sampling = [], engine.runner.sample

    def sample(handle, inputs):
        most.append(int((inputs.forced >= 0).sum()))
        return sampling(handle, inputs)

    engine.runner.sample = sample
    finish(engine)
    for number in range(3):
        check_scores(engine, f"s{number}", 1)
    assert 3 <= max(most) <= 3 + 2, "one more for each row that must move"


def test_sampling_is_unaffected_by_scored_rows_in_the_same_step(depth):
    """Each of their parameters has its row among those of forced tokens."""
    engine = ToyEngine(depth=depth, budget=6, num_blocks=128, max_slots=8)
    engine.submit("drawn", (3,), max_tokens=14, temperature=0.9, top_k=9, top_p=0.9, seed=3)
    engine.submit("likely", (4,), max_tokens=14, temperature=1.5, min_p=0.05, seed=5)
    engine.submit("biased", (5,), max_tokens=14, logit_bias={11: 6.0, 12: 6.5}, temperature=0.7)
    engine.submit("penalized", (6, 6), max_tokens=14, repetition_penalty=1.5, presence_penalty=2.0)
    engine.submit("chain", (6, 7), max_tokens=14, temperature=0.9, mirostat=2, mirostat_tau=2.0)
    engine.submit("short", (7,), max_tokens=14, min_tokens=6, eos=tuple(range(12)))
    engine.submit("told", (8,), max_tokens=14, logprobs=3, temperature=1.0)
    engine.turn(3)
    own = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "logit_bias": {1: 50.0}}
    scored = {"logprobs": 1, "score_prompt": True}
    engine.submit("scored", PROMPT, max_tokens=4, temperature=0.8, **own, **scored)
    engine.submit("typical", PROMPT, max_tokens=4, temperature=0.8, typical_p=0.5, **scored)
    engine.submit("vector", PROMPT, pools=True)
    finish(engine)
    check_scores(engine, "scored", 1)
    check_scores(engine, "typical", 1)
    told = engine.outcomes["told", 0]
    assert [len(each.top_ids) for each in told.logprobs] == [3] * 14
    vector = np.frombuffer(engine.outcomes["vector", 0].vector, np.float32)
    np.testing.assert_allclose(vector, prompt_logits(PROMPT)[-1].astype(np.float32))


def test_pooling_works_beside_scored_rows(depth):
    engine = ToyEngine(depth=depth, budget=64, num_blocks=64)
    engine.submit("scored", PROMPT, max_tokens=2, logprobs=0, score_prompt=True)
    engine.submit("vector", (7, 8), pools=True)
    finish(engine)
    check_scores(engine, "scored", 0)
    vector = np.frombuffer(engine.outcomes["vector", 0].vector, np.float32)
    np.testing.assert_allclose(vector, prompt_logits((7, 8))[-1].astype(np.float32))


def test_a_sequence_preempted_while_scored_is_scored_again(depth):
    engine = ToyEngine(depth=depth, num_blocks=16, max_slots=4, budget=6)
    for number in range(3):
        engine.submit(f"old{number}", (number, 1), max_tokens=12)
    engine.turn(2)
    engine.submit("scored", PROMPT, max_tokens=6, logprobs=1, score_prompt=True)
    for _ in range(200):
        engine.turn()
        scores = engine.scheduler.find(prompt_logprobs_module.PromptScores)
        begun = [] if scores is None else list(scores.of.items())
        if begun and 0 < len(begun[0][1]) < len(PROMPT) - 1:
            break
    else:
        raise AssertionError("it was never in the midst of its prompt")
    engine.shrink(16)  # nobody can grow: the youngest must go
    engine.turn(3)
    engine.grow()
    finish(engine)
    assert engine.scheduler.num_preemptions > 0 and begun[0][0].queue.num_preemptions > 0
    check_scores(engine, "scored", 1)


def test_scores_of_a_failed_step_are_repeated_and_reported_once(depth):
    engine = ToyEngine(depth=depth, num_blocks=64, budget=4)
    engine.submit("scored", PROMPT, max_tokens=3, logprobs=1, score_prompt=True)
    engine.turn(2)
    forward = engine.runner.forward

    def failing(inputs):
        engine.runner.forward = forward
        raise RuntimeError("this once")

    engine.runner.forward = failing
    engine.submit("mate", (3, 4), max_tokens=3)
    finish(engine)
    assert engine.runner.forward is forward
    check_scores(engine, "scored", 1)


def test_one_choice_is_scored_without_using_the_prefix_cache(depth):
    engine = ToyEngine(depth=depth, num_blocks=64, max_slots=8)
    engine.submit("before", PROMPT, max_tokens=2)
    engine.run()
    engine.submit("scored", PROMPT, max_tokens=3, n=3, logprobs=1, score_prompt=True)
    finish(engine)
    check_scores(engine, "scored", 1)
    outcomes = [engine.outcomes["scored", choice] for choice in range(3)]
    assert [each.prompt_logprobs is None for each in outcomes] == [False, True, True]
    assert [each.num_cached for each in outcomes] == [0, 10, 10]


def test_scored_tokens_must_be_in_the_vocabulary():
    engine = ToyEngine()
    engine.submit("scored", (1, 2, 3), max_tokens=1, logprobs=VOCAB, score_prompt=True)
    finish(engine)
    check_scores(engine, "scored", VOCAB)
