"""Drafts: where they come from, when a step has some, and that the output never depends on them.

`tests/property` mixes them with everything else that a schedule can have.
"""

from dataclasses import replace

import pytest

from engine.core.errors import ConfigError
from engine.runtime.budget import MAX_STRETCH, TARGET_STEP_S, StepBudget
from engine.runtime.sequence import packed
from engine.runtime.speculation import drafts
from engine.runtime.speculation.drafts import (
    MAX_MATCH,
    Drafter,
    Odds,
    Speculation,
    cached_rest,
    fair_shares,
    longest_match,
    speculates,
)
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.grammar import END, PatientGrammars, lark
from tests.support.toy_engine.runner import NAN_TOKEN

PROMPT = (1, 2, 3, 4, 5, 6, 7)
NOT_IN_OUTPUT = 0  # a token that the output after PROMPT does not have


def run_request(engine: ToyEngine, **options) -> tuple[int, int]:
    """Run one request whose output is expected. Returns the numbers of steps and of accepted
    tokens.
    """
    engine.submit("r", PROMPT, expects=0, **options)
    engine.turn()
    if isinstance(engine.loop._grammars, PatientGrammars):
        engine.loop._grammars.finish()
    engine.run()
    engine.check()
    stats = engine.loop.stats()
    assert engine.outcomes["r", 0].finish_reason in ("stop", "length")
    return stats.num_steps, stats.num_accepted_tokens


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"presence_penalty": 0.9, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.7, "temperature": 0.8},
        {"logprobs": 2},
        {"min_tokens": 6, "eos": tuple(range(0, 20, 2))},
        {"logit_bias": {4: 2.0}, "allowed_token_ids": tuple(range(9))},
        {"score_prompt": True, "logprobs": 1},
    ],
    ids=lambda params: "-".join(params) or "greedy",
)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_predicted_output_takes_fewer_steps_and_gives_the_same_tokens(params, depth):
    plain, _ = run_request(ToyEngine(max_slots=2, depth=depth), max_tokens=12, **params)
    engine = ToyEngine(max_slots=2, depth=depth, speculates=True, budget=32)
    num_steps, num_accepted = run_request(engine, max_tokens=12, **params)
    # With overlapped steps, penalties would have to count a token that the host does not know.
    has_drafts = depth == 0 or not engine.requests["r"].params.has_penalties
    assert (num_steps < plain and num_accepted > 0) == has_drafts
    if params.get("logprobs"):
        assert len(engine.outcomes["r", 0].logprobs) == len(engine.outcomes["r", 0].tokens)


def test_a_draft_follows_the_grammar():
    options = {"grammar": lark("[a-f]{9}(gh)?"), "eos": (END,), "max_tokens": 12}
    plain, _ = run_request(ToyEngine(grammars=PatientGrammars()), **options)
    engine = ToyEngine(grammars=PatientGrammars(), speculates=True, budget=32)
    num_steps, num_accepted = run_request(engine, **options)
    assert num_steps < plain and num_accepted > 0


@pytest.mark.parametrize(
    "params",
    [{"dry_multiplier": 3.0}, {"bad_ids": ((4, 5),)}, {"mirostat": 2}, {"repeat_last_n": 2}],
    ids=lambda params: next(iter(params)),
)
def test_sampling_parameters_that_depend_on_all_tokens_disable_drafts(params):
    engine = ToyEngine(speculates=True, budget=32)
    run_request(engine, max_tokens=10, presence_penalty=0.1, **params)
    assert engine.loop.stats().num_drafted_tokens == 0


def test_wrong_drafts_are_soon_not_tried(monkeypatch):
    """A sequence whose guesses always look good and are always wrong loses little time."""
    engine = ToyEngine(num_blocks=64, speculates=True, budget=32)
    monkeypatch.setattr(engine.scheduler.find(Speculation)._budget, "price", lambda count: 0.5)
    monkeypatch.setattr(Drafter, "follow", lambda self: setattr(self, "match", MAX_MATCH))
    monkeypatch.setattr(Drafter, "guess", lambda self, count: [NOT_IN_OUTPUT] * count)
    engine.submit("r", PROMPT, max_tokens=40)
    engine.run()
    engine.check()
    stats = engine.loop.stats()
    assert stats.num_drafted_tokens == 2 and stats.num_accepted_tokens == 0


def test_nan_in_a_draft_does_not_fail_the_request():
    engine = ToyEngine(speculates=True, budget=32)
    tokens = engine_output(8)
    engine.submit("r", PROMPT, max_tokens=8)
    engine.channel.inbox[-1] = replace_expected(engine, (*tokens[:3], NAN_TOKEN, *tokens[4:]))
    engine.run()
    engine.check()
    assert engine.outcomes["r", 0].tokens == tokens
    assert engine.loop.stats().num_nonfinite == 0


def engine_output(count: int) -> list[int]:
    engine = ToyEngine()
    engine.submit("r", PROMPT, max_tokens=count)
    return engine.expected("r", 0)[0]


def replace_expected(engine: ToyEngine, expected: tuple[int, ...]):
    from msgspec import structs

    return structs.replace(engine.requests["r"], expected=expected)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_an_answer_is_drafted_from_the_same_earlier_request(block_size):
    engine = ToyEngine(num_blocks=64, block_size=block_size, speculates=True, budget=32)
    for name in ("first", "second"):
        engine.submit(name, PROMPT, max_tokens=30)
        engine.run()
        engine.check()
    stats = engine.loop.stats()
    assert stats.num_accepted_tokens >= 15 // block_size
    assert stats.num_steps < 2 * 30 - stats.num_accepted_tokens + 2


def test_the_drafted_answer_is_of_the_same_prompt_and_namespace():
    engine = ToyEngine(num_blocks=64, block_size=2)
    engine.submit("r", PROMPT, max_tokens=9)
    engine.submit("other", (*PROMPT[:6], 9), max_tokens=9)
    engine.run()
    output = engine.outcomes["r", 0].tokens
    for length in range(5):
        known = packed((*PROMPT, *output[:length]))
        assert cached_rest(engine.kv, "", known) == packed(output[length:-2])
    for tokens in ((*PROMPT, output[0] + 1), (8, *PROMPT), (*PROMPT[:5], 8)):
        assert not len(cached_rest(engine.kv, "", packed(tokens)))
    assert not len(cached_rest(engine.kv, "another", packed(PROMPT)))


def test_the_longest_and_latest_lookup_match_wins():
    text = packed([5, 1, 2, 3, 8, 0, 1, 2, 3, 9, 5, 1, 2, 3])
    assert longest_match(text, text) == (4, 4)
    assert longest_match(text[1:], text[1:]) == (3, 8)
    assert longest_match(packed([1, 2, 4]), text) == (0, 0)
    assert longest_match(packed([1, 2, 3]), packed([1, 2, 3])) == (0, 0)


def test_only_the_end_of_a_long_text_is_searched(monkeypatch):
    monkeypatch.setattr(drafts, "MAX_SEARCHED", 8)
    assert longest_match(packed([1, 2, 3]), packed([1, 2, 3, 4, 9, 9, 9, 9, 9])) == (0, 0)
    assert longest_match(packed([1, 2, 3]), packed([9, 9, 1, 2, 3, 4, 9, 9, 9])) == (3, 5)


def test_lookup_drafts_follow_the_longest_match_and_repeat():
    tokens = packed([7, 1, 2, 3, 1, 2, 3])
    drafter = Drafter(tokens, packed(), Odds())
    drafter.follow()
    assert drafter.guess(5) == [1, 2, 3, 1, 2]
    tokens.extend([1, 2])
    drafter.follow()
    assert drafter.guess(2) == [3, 1] and drafter.match == 5
    tokens.append(9)
    drafter.follow()
    assert drafter.match == 0


def test_the_expected_acceptance_falls_with_wrong_guesses():
    odds = Odds()
    assert odds.worthwhile(match=8, price=0.2, limit=16) > 2
    for _ in range(30):
        odds.add(8, is_right=False)
    assert odds.worthwhile(match=8, price=0.2, limit=16) == 0
    assert odds.worthwhile(match=32, price=0.2, limit=16) == 16


def test_the_speculation_setting_decides_when_drafts_are_verified():
    base = ToyEngine().spec
    exact = replace(base, verifies_drafts=True, has_exact_drafts=True)
    inexact = replace(base, verifies_drafts=True)
    settings = ("auto", "on", "off")
    assert [speculates(exact, each) for each in settings] == [True, True, False]
    assert [speculates(inexact, each) for each in settings] == [False, True, False]
    assert not speculates(base, "auto")
    with pytest.raises(ConfigError, match=r"performance\.speculation"):
        speculates(base, "on")


def measured_budget(base: float, per_row: float, per_token: float) -> StepBudget:
    """After steps on a machine of these speeds, in seconds."""
    budget = StepBudget(512, 64)
    for _ in range(50):
        for rows in (1, 4, 8, 24):
            budget.record(rows, 0, base + per_row * rows)
            budget.record(rows, 48, base + per_row * rows + 0.004 + per_token * 48)
    return budget


@pytest.mark.parametrize(("base", "per_row"), [(0.001, 0.0001), (0.005, 0.0006), (0.05, 0.006)])
@pytest.mark.parametrize("num_decoding", [2, 8, 24])
def test_drafts_of_several_sequences_keep_the_step_short(base, per_row, num_decoding):
    budget = measured_budget(base, per_row, per_token=0.0002)
    alone = base + per_row * num_decoding
    room = budget.draft_tokens(num_decoding, 0)
    limit = min(max(TARGET_STEP_S, 2 * alone), MAX_STRETCH * alone)
    assert alone + per_row * room == pytest.approx(limit, rel=0.05)
    beside = budget.draft_tokens(num_decoding, 48)
    assert beside == pytest.approx(max(0, room - (0.004 + 0.0002 * 48) / per_row), abs=2)


@pytest.mark.parametrize("counts", [[], [3], [1, 16, 2, 16], [5, 5, 5], [16] * 8, [1, 1, 9]])
@pytest.mark.parametrize("room", [0, 1, 7, 16, 100])
def test_draft_tokens_are_shared_fairly_among_sequences(counts, room):
    shares = fair_shares(counts, room)
    assert sum(shares) == min(room, sum(counts))
    for share, count in zip(shares, counts, strict=True):
        assert share == count or share >= max(shares) - 1


def test_the_cost_of_a_draft_token_is_learned_from_steps():
    budget = StepBudget(64, 16)
    assert budget.price(1) < 0.5 < budget.price(32)
    for _ in range(20):
        for count in (1, 2, 4):
            budget.record(count, 0, 0.010 + 0.001 * count)
    assert budget.price(1) == pytest.approx(1 / 11, rel=0.15)
    assert budget.price(10) == pytest.approx(10 / 20, rel=0.15)
