"""Grammars, prompt scores and vectors through the loop and the seam, over the toy model."""

import re
import threading
import time

import numpy as np
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.request import Abort, Stop
from engine.runtime.requests import grammar as grammar_module
from engine.runtime.requests.grammar import Grammars
from engine.runtime.samplers import prompt_logprobs as prompt_logprobs_module
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.grammar import END, PatientGrammars, lark, text_of, vocabulary
from tests.support.toy_engine.runner import prompt_logits, prompt_logprobs


def finish(engine: ToyEngine) -> None:
    """Grammars compile in real time: turn until everything has ended."""
    deadline = time.monotonic() + 30
    while not all(outcome.finish_reason for outcome in engine.outcomes.values()):
        assert time.monotonic() < deadline, engine.outcomes
        engine.turn()
    engine.turn(2)


SCHEDULES = [
    {"depth": 0},
    {"depth": 1},
    {"depth": 1, "num_blocks": 14, "max_slots": 4},  # preempts
    {"depth": 0, "budget": 4, "max_slots": 4},
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_grammar_rows_match_and_do_not_affect_other_rows(schedule):
    engine = ToyEngine(grammars=Grammars(vocabulary), **schedule)
    regexes = ["(ab|cd)+e", "a{3}b?", "[a-f]+(gh)?", "hello|jail"]
    for index, regex in enumerate(regexes):
        engine.submit(
            f"g{index}",
            [1, 2, 3, index],
            eos=(END,),
            grammar=lark(regex),
            temperature=1.0,
            max_tokens=12,
        )
        engine.submit(f"free{index}", [1, 2, 3, index], temperature=1.0, max_tokens=12)
    finish(engine)
    for index, regex in enumerate(regexes):
        outcome = engine.outcomes[f"g{index}", 0]
        if outcome.finish_reason == "stop":
            assert re.fullmatch(regex, text_of(outcome.tokens)), (regex, outcome)
        else:
            assert outcome.finish_reason == "length" and len(outcome.tokens) == 12
        free = engine.outcomes[f"free{index}", 0]
        assert (free.tokens, free.finish_reason) == engine.expected(f"free{index}", 0)
    engine.scheduler.check()


def test_grammar_output_does_not_depend_on_the_schedule():
    texts = []
    for schedule in SCHEDULES:
        engine = ToyEngine(grammars=Grammars(vocabulary), **schedule)
        for index in range(3):
            engine.submit(
                f"r{index}", [4, index], eos=(END,), grammar=lark("([a-d]e)+f"), temperature=1.0
            )
        finish(engine)
        texts.append([text_of(engine.outcomes[f"r{index}", 0].tokens) for index in range(3)])
    assert all(each == texts[0] for each in texts)


def test_a_complete_grammar_output_ends_without_an_end_token():
    engine = ToyEngine(grammars=Grammars(vocabulary))
    engine.submit("a", [1, 2], eos=(END,), grammar=lark("abc"))
    finish(engine)
    outcome = engine.outcomes["a", 0]
    assert (text_of(outcome.tokens), outcome.finish_reason) == ("abc", "stop")
    assert END not in outcome.tokens


def test_each_choice_has_its_own_grammar_state():
    engine = ToyEngine(grammars=Grammars(vocabulary))
    engine.submit(
        "a", [1, 2], eos=(END,), grammar=lark("[a-k]{5}"), n=3, temperature=2.0, max_tokens=9
    )
    finish(engine)
    texts = [text_of(engine.outcomes["a", choice].tokens) for choice in range(3)]
    assert all(re.fullmatch("[a-k]{5}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_grammar_that_does_not_compile_fails_only_its_request():
    engine = ToyEngine(grammars=Grammars(vocabulary))
    engine.submit("bad", [1, 2], eos=(END,), grammar="start: missing_rule")
    engine.submit("good", [1, 2, 3], max_tokens=4)
    finish(engine)
    assert engine.outcomes["bad", 0].error_code == "invalid_request"
    assert engine.outcomes["good", 0].tokens == engine.expected("good", 0)[0]


def test_a_request_can_be_aborted_while_its_grammar_compiles():
    may_compile = threading.Event()
    grammars = Grammars(lambda: (may_compile.wait(), vocabulary())[1])
    engine = ToyEngine(grammars=grammars)
    engine.submit("a", [1, 2], eos=(END,), grammar=lark("abc"), n=2)
    engine.turn()
    engine.channel.inbox.append(Abort("a"))
    finish(engine)
    assert {o.finish_reason for o in engine.outcomes.values()} == {"abort"}
    may_compile.set()
    grammars.compile(lark("abc")).result()  # the one that was abandoned
    engine.turn(3)
    assert engine.scheduler.table.num_running == engine.scheduler.table.num_waiting == 0


def test_cached_compiled_grammars_are_bounded(monkeypatch):
    monkeypatch.setattr(grammar_module, "MAX_COMPILED", 4)
    grammars = Grammars(vocabulary)
    first = grammars.compile(lark("a"))
    assert grammars.compile(lark("a")) is first
    for letter in "bcdef":
        grammars.compile(lark(letter))
    assert grammars.compile(lark("a")) is not first
    assert len(grammars._compiled) == 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prompt_tokens_are_scored(schedule):
    engine = ToyEngine(**schedule)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.submit("before", prompt, max_tokens=3)  # its blocks are cached, and must not be used
    engine.run()
    for index in range(3):
        engine.submit(
            f"s{index}", [*prompt, index], max_tokens=4, logprobs=2, score_prompt=True, n=2
        )
        engine.submit(f"plain{index}", [*prompt, index, 1], max_tokens=6, temperature=1.0)
    engine.run()
    for index in range(3):
        outcome = engine.outcomes[f"s{index}", 0]
        got = [score.logprob for score in outcome.prompt_logprobs]
        np.testing.assert_allclose(got, prompt_logprobs([*prompt, index]), atol=1e-5)
        assert all(len(score.top_ids) == 2 for score in outcome.prompt_logprobs)
        assert engine.outcomes[f"s{index}", 1].prompt_logprobs is None
    engine.check()


def test_a_pooled_request_returns_the_hidden_state_of_its_last_token():
    engine = ToyEngine(depth=1)
    prompt = [3, 1, 4, 1, 5]
    engine.submit("v", prompt, pools=True, max_tokens=1)
    engine.submit("text", prompt, max_tokens=5)
    for _ in range(30):
        engine.turn()
    outcome = engine.outcomes["v", 0]
    assert outcome.tokens == [] and outcome.finish_reason == "stop"
    np.testing.assert_allclose(
        np.frombuffer(outcome.vector, np.float32), prompt_logits(prompt)[-1].astype(np.float32)
    )
    text = engine.outcomes["text", 0]
    assert (text.tokens, text.finish_reason) == engine.expected("text", 0)


def test_one_choice_can_be_aborted_while_the_grammar_compiles():
    grammars = PatientGrammars()
    engine = ToyEngine(grammars=grammars)
    engine.submit("a", [1, 2], eos=(END,), grammar=lark("abc"), n=3)
    engine.turn()
    engine.channel.inbox += [Abort("a", 1), Abort("a", 1)]
    engine.turn()
    grammars.finish()
    finish(engine)
    endings = [engine.outcomes["a", choice].finish_reason for choice in range(3)]
    assert endings == ["stop", "abort", "stop"]


def test_an_engine_that_stops_ends_the_requests_whose_grammar_compiles():
    grammars = PatientGrammars()
    engine = ToyEngine(grammars=grammars)
    engine.submit("a", [1, 2], eos=(END,), grammar=lark("abc"), n=2)
    engine.turn()
    engine.channel.inbox.append(Stop())
    engine.loop.run()
    engine._collect()
    grammars.finish()
    assert {outcome.finish_reason for outcome in engine.outcomes.values()} == {"abort"}


def test_a_transient_compile_failure_is_not_cached():
    class Panic(BaseException):
        """As the library's panics are: no Exception."""

    def load():
        if failures:
            raise failures.pop()
        return vocabulary()

    # Each of them is tried twice.
    failures = [Panic("a broken invariant"), OSError("a file is gone")] * 2
    grammars = Grammars(load)
    engine = ToyEngine(grammars=grammars)
    for name, expected in (("a", "inference_error"), ("b", "inference_error"), ("c", None)):
        engine.submit(name, [1, 2], eos=(END,), grammar=lark("abc"))
        finish(engine)
        assert engine.outcomes[name, 0].error_code == expected
    with pytest.raises(InvalidRequestError):
        grammars.compile("start: missing_rule").result()
    bad = grammars.compile("start: missing_rule")
    assert grammars.compile("start: missing_rule") is bad


@pytest.mark.parametrize("depth", [0, 1])
def test_a_grammar_that_becomes_too_complex_is_an_error(monkeypatch, depth):
    from llguidance import LLParserLimits

    monkeypatch.setattr(grammar_module, "parser_limits", lambda: LLParserLimits(step_lexer_fuel=30))
    engine = ToyEngine(grammars=Grammars(vocabulary), depth=depth)
    grammar = lark("a([a-f]{3,60}|b[a-q]{2,90}c)+g")
    engine.submit("a", [1, 2], eos=(END,), grammar=grammar, max_tokens=12)
    finish(engine)
    outcome = engine.outcomes["a", 0]
    assert (outcome.finish_reason, outcome.error_code) == ("error", "invalid_request")
    assert END not in outcome.tokens


def test_a_prompt_preempted_in_flight_is_scored_once():
    engine = ToyEngine(depth=1, num_blocks=6, max_slots=2, budget=6)
    prompts = [[1, 2, 3, 4, 5, index] for index in range(3)]
    for index, prompt in enumerate(prompts):
        engine.submit(f"plain{index}", [9, index], max_tokens=6)
        engine.submit(f"s{index}", prompt, max_tokens=4, logprobs=2, score_prompt=True)
    engine.run()
    assert engine.scheduler.num_preemptions
    for index, prompt in enumerate(prompts):
        got = [score.logprob for score in engine.outcomes[f"s{index}", 0].prompt_logprobs]
        np.testing.assert_allclose(got, prompt_logprobs(prompt), atol=1e-5)
    engine.check()


def test_scored_rows_of_a_step_are_bounded_over_all_sequences(monkeypatch):
    monkeypatch.setattr(prompt_logprobs_module, "MAX_SCORED", 5)
    engine = ToyEngine(budget=40, num_blocks=60)
    widest, forward = 0, engine.runner.forward

    def watched(inputs):
        nonlocal widest
        widest = max(widest, len(inputs.logit_rows))
        return forward(inputs)

    monkeypatch.setattr(engine.runner, "forward", watched)
    for index in range(4):
        engine.submit(f"s{index}", [index, *range(10)], logprobs=0, score_prompt=True, max_tokens=2)
    engine.run()
    assert widest <= 5 + 3  # each of the others moves by one token
    for index in range(4):
        assert len(engine.outcomes[f"s{index}", 0].prompt_logprobs) == 10


def test_an_input_that_fills_the_context_can_be_pooled():
    engine = ToyEngine(max_seq_len=12)
    engine.submit("fills", range(12), pools=True, max_tokens=1)
    engine.submit("over", range(13), pools=True, max_tokens=1)
    engine.submit("text", range(12), max_tokens=1)
    for _ in range(10):
        engine.turn()
    assert engine.outcomes["fills", 0].vector is not None
    assert engine.outcomes["over", 0].error_code == "invalid_request"
    assert engine.outcomes["text", 0].error_code == "invalid_request"
