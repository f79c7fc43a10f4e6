"""The draft model: it never changes the output, it saves steps, and it stops where it does not pay.

`tests/property` mixes it with everything else that a schedule can have.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from engine.core.errors import ConfigError
from engine.ipc.options import EngineOptions
from engine.runtime.speculation import model_drafts
from engine.runtime.speculation.draft_model import MAX_LAG, DraftModel
from engine.runtime.speculation.drafts import Speculation
from engine.runtime.speculation.model_drafts import ModelDrafts, Rate
from engine.worker import draft as worker
from tests.support.toy_engine.engine import FixedPrice, GuessingRunner, ToyEngine

PROMPT = (1, 2, 3, 4, 5, 6, 7)


def run_request(guessed: float | None, depth: int = 0, **options):
    """Run one request. Returns the engine's counts."""
    engine = ToyEngine(
        num_blocks=64, max_slots=2, depth=depth, speculates=True, guessed=guessed, budget=32
    )
    engine.submit("r", PROMPT, **options)
    engine.run()
    engine.check()
    assert engine.outcomes["r", 0].finish_reason in ("stop", "length")
    return engine.loop.stats()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 7, "min_p": 0.01, "seed": 5},
        {"logprobs": 2},
        {"min_tokens": 12, "eos": tuple(range(0, 20, 2))},
    ],
    ids=lambda params: "-".join(params) or "greedy",
)
@pytest.mark.parametrize("depth", [0, 1])
def test_correct_guesses_save_steps_without_changing_tokens(params, depth):
    plain = run_request(None, depth, max_tokens=20, **params)
    stats = run_request(1.0, depth, max_tokens=20, **params)
    assert stats.num_steps < plain.num_steps - stats.num_model_accepted_tokens / 2
    # The same logits and the same random numbers give the same tokens, also if they are sampled.
    assert stats.num_model_accepted_tokens == stats.num_model_drafted_tokens > 0
    assert stats.num_accepted_tokens >= stats.num_model_accepted_tokens


def test_draft_models_without_penalties_are_only_less_often_accepted():
    stats = run_request(1.0, max_tokens=20, presence_penalty=3.0)
    assert 0 < stats.num_model_accepted_tokens < stats.num_model_drafted_tokens


def test_a_draft_model_that_guesses_wrong_is_soon_not_used(monkeypatch):
    monkeypatch.setattr(FixedPrice, "price", lambda self, num_decoding: 0.3)
    plain = run_request(None, max_tokens=40)
    stats = run_request(0.0, max_tokens=40)
    assert stats.num_model_accepted_tokens == 0 and stats.num_steps == plain.num_steps
    assert 0 < stats.num_model_drafted_tokens < 5


def test_a_wrong_guess_does_not_spoil_later_guesses():
    stats = run_request(0.8, max_tokens=40)
    assert stats.num_model_accepted_tokens > 20


def test_a_sequence_that_does_not_fit_continues_without_the_draft_model():
    """The draft model of the toy engine has 24 blocks of 2 tokens."""
    stats = run_request(1.0, max_tokens=56)
    assert 20 < stats.num_model_accepted_tokens < 45


def test_a_draft_model_that_fails_is_disabled(caplog):
    engine = ToyEngine(num_blocks=64, speculates=True, guessed=1.0, budget=32)
    model = engine.scheduler.find(Speculation).model._model
    launch, calls = model._launch, []

    def fail(rows):
        calls.append(rows)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return launch(rows)

    closed = []
    model._launch, model._runner.close = fail, lambda: closed.append(len(calls))
    engine.submit("r", PROMPT, max_tokens=20)
    engine.run()
    engine.check()
    assert engine.scheduler.find(Speculation).model is None and len(calls) == 3
    model.close()  # as at the end of the process
    assert closed == [3], "its memory is freed at once"
    assert "goes on without it" in caplog.text


def test_a_draft_ends_where_the_draft_model_computes_nan(monkeypatch):
    engine = ToyEngine(num_blocks=64, speculates=True, guessed=1.0, budget=32)
    runner = engine.scheduler.find(Speculation).model._model._runner
    sample = runner.sample

    def broken(handle, sampling):
        pending = sample(handle, sampling)
        output = pending.wait()
        finite = output.finite & (sampling.position[0] % 4 != 0)
        return SimpleNamespace(wait=lambda: replace(output, finite=finite))

    monkeypatch.setattr(runner, "sample", broken)
    engine.submit("r", PROMPT, max_tokens=20)
    engine.run()
    engine.check()
    assert engine.loop.stats().num_model_accepted_tokens > 0


def test_all_draft_model_slots_are_released():
    engine = ToyEngine(num_blocks=64, max_slots=4, speculates=True, guessed=0.8, budget=32)
    for first, name in enumerate("abcd"):
        engine.submit(name, (first, *PROMPT), max_tokens=12, temperature=1.0, seed=ord(name))
    model, counts = engine.scheduler.find(Speculation).model, []
    for _ in range(12):
        engine.turn()
        counts.append(len(model._model._copies))
    assert max(counts) == 2, "there are two slots"
    engine.run()
    engine.check()
    assert not model._model._copies and not model._rates
    model.check()


class Prices:
    """A model whose step takes a second, and a draft model with these prices."""

    def __init__(self, token_s: float, prompt_s: float) -> None:
        self._prices = token_s, prompt_s
        self.missing = 0

    def lag(self, seq) -> int:
        return self.missing

    def token_s(self, num_sequences: int) -> float:
        return self._prices[0]

    def prompt_s(self, num_tokens: int) -> float:
        return self._prices[1] * num_tokens


def drafts_at(token_s: float, prompt_s: float = 0.0) -> ModelDrafts:
    made = ModelDrafts(Prices(token_s, prompt_s), SimpleNamespace(step_s=lambda rows, tokens: 1.0))
    assert made.begin(1)
    return made


class Request:
    """As much of a sequence as decides about guesses for it."""

    def __init__(self, num_generated: int = 0) -> None:
        self.max_tokens, self.num_generated = 1000, num_generated


SEQ = Request()


def test_the_number_of_guesses_follows_cost_and_acceptance():
    cheap, dear = drafts_at(0.05), drafts_at(0.4)
    many, few = (each.offer(SEQ, 0.1, 8.0, 16).count for each in (cheap, dear))
    assert many > few > 0
    assert drafts_at(0.7).offer(SEQ, 0.1, 8.0, 16).count == 0, "a guess costs more than it saves"
    assert cheap.offer(SEQ, 0.1, 0.16, 16).count == 1, "no more credit"
    cheap.verified(SEQ, 8, 8, 0.1)
    assert cheap.offer(SEQ, 0.1, 8.0, 16).count > many
    for _ in range(12):
        cheap.verified(SEQ, 8, 0, 0.1)
    cheap._add(20.0)  # the account is not what limits the next guesses
    assert cheap.offer(SEQ, 0.1, 8.0, 16).count < many
    assert cheap.offer(Request(), 0.1, 8.0, 16).count > 0, "a new sequence has the chances of all"


def test_the_draft_model_prefills_a_prompt_only_if_that_pays():
    made = drafts_at(0.05, prompt_s=0.05)
    made._model.missing = MAX_LAG + 1
    assert made.offer(SEQ, 0.1, 8.0, 16).count > 0
    ending = Request(num_generated=999)
    assert made.offer(ending, 0.1, 8.0, 16).count == 0, "too few tokens are left"
    made._model.missing = 100_000
    assert made.offer(SEQ, 0.1, 8.0, 16).count == 0, "it takes too long"
    made._model.missing = MAX_LAG + 1
    made.verified(SEQ, 32, 0, 0.1)  # a loss of most of the first time
    made._rates[SEQ] = Rate(0.9, 4.0)
    assert made.offer(SEQ, 0.1, 8.0, 16).count == 0
    for _ in range(500):
        assert made.begin(1)  # each step allows for a part of its time
    assert made.offer(SEQ, 0.1, 8.0, 16).count > 0


def test_a_draft_model_with_an_empty_account_is_not_asked():
    made = drafts_at(0.2)
    assert made.begin(1)
    made._add(-10.0)
    assert not made.begin(1)
    made._add(10.0)
    assert made.begin(1)


@pytest.mark.parametrize("num_decoding", [1, 8])
def test_a_useless_draft_model_costs_little(num_decoding):
    """All time that guesses take, and all that verifying them takes, is within the allowance."""
    made = drafts_at(0.2 / num_decoding, prompt_s=0.01)
    sequences = [Request() for _ in range(num_decoding)]
    cost_s = 0.0
    for step in range(2000):
        for seq in sequences if made.begin(num_decoding) else ():
            made._model.missing = 100 if step % 50 == 0 else 1
            made._rates.clear()  # every sequence looks as promising as a first one
            made._shared = Rate(0.95, 8.0)
            offer = made.offer(seq, 0.1, 8.0, 16)
            if not offer.count:
                continue
            spent_s = made._model.prompt_s(100) if step % 50 == 0 else 0.0
            spent_s += offer.count * made._model.token_s(1)
            made._add(-spent_s)
            made.verified(seq, offer.count, 0, 0.1)
            cost_s += spent_s + offer.count * 0.1 * made._token_s
    assert 0 < cost_s < 0.01 * 2000


def test_a_bad_draft_model_is_retried_much_later(monkeypatch):
    monkeypatch.setattr(model_drafts, "FORGETTING", 0.001)  # fewer steps than in use
    made = drafts_at(0.05)
    for _ in range(40):
        made.verified(SEQ, 4, 0, 0.1)
    made._add(20.0)  # the account is not what stops it
    other = Request()
    tries = [made.offer(other, 0.1, 8.0, 16).count > 0 for _ in range(3000)]
    assert not any(tries[:50]) and any(tries)


def test_a_draft_model_is_not_used_before_step_times_are_known():
    made = ModelDrafts(Prices(0.1, 0.1), SimpleNamespace(step_s=lambda rows, tokens: None))
    assert not made.begin(1), "nothing is known about the times of steps"


def test_a_warmed_up_draft_model_knows_its_cost():
    spec = ToyEngine().spec
    model = DraftModel(GuessingRunner(spec, 1.0), max_tokens=64)
    assert not model.token_s(1) and not model.prompt_s(10)
    model.warm()
    assert model.token_s(1) > 0 and model.prompt_s(10) > 0


OPTIONS = EngineOptions(model_path="m", framework="native", draft_model="d")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"framework": "jax"}, "--backend native or --backend torch"),
        ({"speculation": "off"}, r"performance\.speculation"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_options_that_conflict_with_a_draft_model_are_named(changes, says):
    with pytest.raises(ConfigError, match=says):
        worker.plan_draft(SimpleNamespace(), structs.replace(OPTIONS, **changes))


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        ([b"a", b"b"], [b"a", b"b"], None),
        ([b"a", b"b"], [b"a", b"b", b"", b""], None),
        ([b"a", b"b", b""], [b"a", b"b"], None),
        ([b"a", b"b"], [b"a", b"c"], "token 1 is 'b' in one and 'c' in the other"),
        ([b"a", b"b"], [b"a", b"b", b"c"], "more tokens"),
    ],
)
def test_a_draft_model_needs_the_same_vocabulary(monkeypatch, ours, theirs, says):
    def load_text(path: Path):
        tokens = ours if path.name == "m" else theirs
        return SimpleNamespace(vocabulary=lambda: SimpleNamespace(tokens=tokens))

    monkeypatch.setattr("engine.frontend.text_model.load_text", load_text)
    if says is None:
        worker.check_vocabulary(Path("m"), Path("d"))
        return
    with pytest.raises(ConfigError, match=says):
        worker.check_vocabulary(Path("m"), Path("d"))


def test_the_acceptance_rate_of_old_guesses_fades(monkeypatch):
    monkeypatch.setattr(model_drafts, "FORGETTING", 0.001)
    rate = Rate(0.5, 4.0)
    for _ in range(200):
        rate.add(3, has_wrong=True)
    assert rate.chance == pytest.approx(0.75, abs=0.01)
    for _ in range(10_000):
        rate.forget()
    assert rate.chance == pytest.approx(model_drafts.PRIOR_CHANCE, abs=0.01)
