"""Random histories of the real runtime with the toy model. Every invariant is checked after every
rule.

Requests have colliding prefixes, several choices, salts, priorities, and tokens that give NaN or
crash. They meet aborts, evictions, flushes, expiry, restarts, pools that shrink and grow, and
failures of every stage. Some have a grammar that takes a while to compile; some want prompt
logprobs or an embedding. Drafts are taken from outputs that clients expect. In every history, the
delivered tokens equal the oracle's, every accepted choice ends exactly once, no request fails
because of another, and an idle engine holds nothing.
"""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import faults
from engine.core.faults import Fault
from engine.core.interfaces.request import Abort, Control
from engine.runtime.sequence import packed
from engine.runtime.tiers.host import HostTier
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.grammar import END, PatientGrammars, lark, text_of
from tests.support.toy_engine.invariants import Snapshot
from tests.support.toy_engine.runner import (
    CRASH_TOKEN,
    NAN_TOKEN,
    VOCAB,
    prompt_logits,
    prompt_logprobs,
)
from tests.support.toy_engine.tiers import add_tiers

TOKENS = st.integers(0, 2)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=14)
REGEXES = ["(ab|cd)+e", "a{3}b?", "[a-f]+(gh)?", "hello|jail"]
CHAINS = [
    {"typical_p": 0.5},
    {"top_n_sigma": 0.8},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"mirostat": 1, "mirostat_tau": 1.0},
    {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.7},
    {"min_keep": 3, "top_p": 0.2},
    {"dynatemp_range": 0.6},
    {"repetition_penalty": 2.0, "presence_penalty": 0.5, "repeat_last_n": 3},
    {"dry_multiplier": 5.0, "dry_allowed_length": 1},
    {"samplers": ("dry", "min_p", "temperature"), "min_p": 0.1, "dry_multiplier": 4.0},
]
WORDS = [
    {},
    {"allowed_token_ids": (0, 1, 2, 3), "breaker_ids": ((1,), (2, 0))},
    {"bad_ids": ((4,), (0, 1), (2, 2, 2)), "breaker_ids": ((3,),)},
]
MAX_STEPS_TO_END = 3000
# A single failure of these loses at most one choice; a failure of the other stages loses none.
LOSSY = {"allocate", "update", "nonfinite"}
REPEATED = ("forward", "sample", "wait")
STAGES = (*sorted(LOSSY), *REPEATED, "schedule", "publish")


class RuntimeMachine(RuleBasedStateMachine):
    num_rules = 0  # over all machines of a run

    @initialize(
        num_blocks=st.integers(1, 64),
        block_size=st.sampled_from([1, 2, 16]),
        max_slots=st.integers(1, 5),
        depth=st.sampled_from([0, 1]),
        budget=st.integers(1, 24),
        policy=st.sampled_from(["lru", "lfu", "fifo"]),
        sharing=st.sampled_from([True, True, True, False]),
        max_cached_blocks=st.sampled_from([None, None, 0, 3]),
        target_blocks=st.sampled_from([None, None, 0, 5]),
        max_cached_sequences=st.sampled_from([None, None, 1, 2]),
        ttl_s=st.sampled_from([None, 10.0]),
        window=st.sampled_from([None, None, 1, 3, 6, 17]),
        num_window_blocks=st.integers(1, 40),
        speculates=st.booleans(),
        paces=st.booleans(),
        guessed=st.sampled_from([None, None, 0.0, 0.8, 1.0]),
        tier_bytes=st.sampled_from([None, None, None, None, 1500, 2**20]),
    )
    def start(self, tier_bytes, **options):
        self.time = 0.0
        self.options = options
        # It outlives an engine that is replaced by a new one.
        self.tier = None if tier_bytes is None else HostTier(tier_bytes, "lru", None)
        self.engine = self._new_engine()
        self.count = 0
        self.num_unpublished = 0  # failures that were injected

    def _new_engine(self):
        self.grammars = PatientGrammars()
        engine = ToyEngine(
            max_seq_len=40, clock=lambda: self.time, grammars=self.grammars, **self.options
        )
        if self.tier is not None:
            add_tiers(engine, [self.tier])
        return engine

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        salt=st.sampled_from(["", "", "a"]),
        tenant=st.sampled_from(["", "", "b", "c"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        max_tokens=st.integers(1, 8),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        penalty=st.sampled_from([0.0, 0.0, 0.7]),
        logprobs=st.sampled_from([None, None, 2]),
        stops=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 2]),
    )
    def submit(self, prompt, penalty, stops, **params):
        self._submit(
            prompt,
            presence_penalty=penalty,
            eos=tuple(range(0, VOCAB, 3)) if stops else (),
            **params,
        )

    @rule(
        prompt=PROMPTS,
        regex=st.sampled_from(REGEXES),
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 8),
        temperature=st.sampled_from([0.0, 1.0]),
        min_tokens=st.sampled_from([0, 2]),
        logprobs=st.sampled_from([None, 2]),
        ignore_eos=st.booleans(),
    )
    def submit_constrained(self, prompt, regex, **params):
        self._submit(prompt, grammar=lark(regex), eos=(END,), **params)

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 6),
        logprobs=st.sampled_from([0, 2]),
        regex=st.sampled_from([None, None, *REGEXES]),
    )
    def submit_scored(self, prompt, regex, **params):
        grammar = None if regex is None else lark(regex)
        self._submit(prompt, grammar=grammar, eos=(END,), score_prompt=True, **params)

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 2]),
        max_tokens=st.integers(1, 8),
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        chain=st.sampled_from(CHAINS),
        words=st.sampled_from(WORDS),
        logprobs=st.sampled_from([None, None, 2]),
    )
    def submit_chain(self, prompt, chain, words, **params):
        self._submit(prompt, **chain, **words, **params)

    @rule(prompt=PROMPTS, regex=st.sampled_from(REGEXES), chain=st.sampled_from(CHAINS))
    def submit_constrained_chain(self, prompt, regex, chain):
        self._submit(prompt, grammar=lark(regex), eos=(END,), max_tokens=6, **chain)

    @rule(prompt=PROMPTS, salt=st.sampled_from(["", "a"]))
    def submit_pooled(self, prompt, salt):
        self._submit(prompt, salt=salt, pools=True, max_tokens=1)

    @rule()
    def grammars_compile(self):
        self.grammars.finish()
        self.engine.turn()

    @rule(prompt=PROMPTS, where=st.integers(0, 13), bad=st.sampled_from([NAN_TOKEN, CRASH_TOKEN]))
    def submit_poison(self, prompt, where, bad):
        prompt = [*prompt]
        prompt.insert(min(where, len(prompt)), bad)
        self._submit(prompt, max_tokens=3)

    @rule(count=st.integers(1, 6))
    def turn(self, count):
        before = self._progress()
        had_work = self.engine.scheduler.has_work
        self.engine.turn(count)
        is_whole = not (self.engine.hostages or self.engine.window_hostages)
        if had_work and count >= 4 and is_whole:
            assert self._progress() - before, "work is pending and nothing moves"

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole):
        request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        n = self.engine.requests[request_id].params.n
        choice = None if whole else data.draw(st.integers(0, n - 1))
        outcomes = [self.engine.outcomes[request_id, c] for c in range(n)]
        were_aborted = [outcome.finish_reason == "abort" for outcome in outcomes]
        for _ in range(data.draw(st.integers(1, 2))):  # aborting twice frees once
            self.engine.channel.inbox.append(Abort(request_id, choice))
        self.engine.turn()
        for c, outcome in enumerate(outcomes):
            if choice in (None, c):
                assert outcome.finish_reason is not None
            else:
                assert (outcome.finish_reason == "abort") == were_aborted[c]

    @rule(
        stage=st.sampled_from(STAGES),
        at=st.integers(1, 4),
        count=st.integers(1, 3),
        memory=st.booleans(),
    )
    def a_stage_fails(self, stage, at, count, memory):
        """A stage fails once; requests that it was not working on must not notice."""
        action = "mark" if stage == "nonfinite" else "memory" if memory else "raise"
        crashes = any(
            CRASH_TOKEN in self.engine.requests[request_id].prompt and not outcome.finish_reason
            for (request_id, _), outcome in self.engine.outcomes.items()
        )
        with faults.planned(Fault(stage, action, at=at)) as plan:
            self.engine.turn(count)
        # If a kernel fails on another row, this row is repeated alone; a second failure then fails
        # it.
        is_lossy = stage in LOSSY or (stage in REPEATED and crashes)
        self.engine.num_pardons += plan.num_strikes * is_lossy
        self.num_unpublished += plan.num_strikes * (stage == "publish")

    @rule(prompt=PROMPTS, n=st.integers(1, 3))
    def taking_in_fails(self, prompt, n):
        self.engine.turn()  # so that the fault hits no other request
        self._submit(prompt, n=n, max_tokens=3)
        with faults.planned(Fault("intake")):
            self.engine.turn()
        self.engine.num_pardons += n

    @rule(count=st.integers(1, 20))
    def shrink(self, count):
        self.engine.shrink(count)

    @rule()
    def grow(self):
        self.engine.grow()

    @precondition(lambda self: self.engine.pool.num_evictable)
    @rule()
    def insert_again(self):
        """INV-15: inserting what the tree already has changes nothing."""
        for namespace, tokens, blocks, _ in Snapshot(self.engine).paths:
            self.engine.kv.radix.insert(namespace, packed(tokens), blocks, only_own=True)

    @precondition(lambda self: self.engine.windows is not None)
    @rule(count=st.integers(1, 10))
    def evict_windowed(self, count):
        windows = self.engine.windows
        before = windows.pool.num_evictable
        assert windows.column.evict(count) == min(count, before)

    @rule(count=st.integers(1, 10))
    def evict(self, count):
        before = self.engine.pool.num_evictable
        assert self.engine.kv.radix.evict(count) == min(count, before)

    @rule()
    def flush(self):
        was_idle = not self.engine.scheduler.has_work and not self.engine.channel.inbox
        self.engine.channel.inbox.append(Control(1, "flush_cache"))
        self.engine.turn()
        if was_idle:
            num_hostages = len(self.engine.hostages)
            assert self.engine.pool.num_free == self.engine.pool.num_usable - num_hostages
            if self.engine.windows is not None:
                pool, taken = self.engine.windows.pool, len(self.engine.window_hostages)
                assert pool.num_free == pool.num_usable - taken

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def time_passes(self, seconds):
        self.time += seconds
        self.engine.kv.radix.expire()

    @rule()
    def restart(self):
        """The engine dies, and its clients submit their open requests again."""
        open_ids = {
            request_id
            for (request_id, _), outcome in self.engine.outcomes.items()
            if outcome.finish_reason is None
        }
        old, self.engine = self.engine, self._new_engine()
        self.num_unpublished = 0
        for request_id in open_ids:
            request = old.requests[request_id]
            self.engine.requests[request_id] = request
            for choice in range(request.params.n):
                self.engine.outcomes[request_id, choice] = type(old.outcomes[request_id, 0])()
            self.engine.channel.inbox.append(request)

    @rule()
    def run_to_the_end(self):
        """No starvation: without new arrivals everything ends, and nothing stays held."""
        engine = self.engine
        engine.grow()
        engine.turn()  # reads the submitted requests, so that their grammars are compiled
        self.grammars.finish()
        engine.run(MAX_STEPS_TO_END)
        assert engine.pool.num_free + engine.pool.num_evictable == engine.pool.num_usable
        if engine.windows is not None:
            pool = engine.windows.pool
            assert pool.num_free + pool.num_evictable == pool.num_usable
        assert not engine.scheduler.has_work
        for (request_id, choice), outcome in engine.outcomes.items():
            self._check_ending(request_id, choice, outcome)

    def _check_ending(self, request_id, choice, outcome):
        request, engine = self.engine.requests[request_id], self.engine
        expected_tokens, expected_reason = engine.expected(request_id, choice)
        fits = engine.kv.can_ever_fit(len(request.prompt) + request.params.max_tokens - 1)
        # Failures with this code are counted elsewhere.
        if not fits and outcome.error_code != "inference_error":
            assert outcome.error_code == "invalid_request" and not outcome.tokens
        elif expected_reason == "error" and outcome.finish_reason != "abort":
            assert outcome.error_code == "inference_error" and not outcome.tokens
        elif outcome.finish_reason not in ("abort", "error"):  # these endings are checked elsewhere
            assert (outcome.tokens, outcome.finish_reason) == (expected_tokens, expected_reason)
        assert outcome.num_cached < len(request.prompt), "nothing of the prompt was computed"
        if request.grammar is not None and outcome.finish_reason == "stop":
            assert any(re.fullmatch(each, text_of(outcome.tokens)) for each in REGEXES)
        if request.params.logprobs is not None:
            assert len(outcome.logprobs) == len(outcome.tokens)
        if request.params.score_prompt and choice == 0 and outcome.tokens:
            got = [score.logprob for score in outcome.prompt_logprobs]
            np.testing.assert_allclose(got, prompt_logprobs(request.prompt), atol=1e-4)
        if request.pools and outcome.finish_reason == "stop":
            vector = np.frombuffer(outcome.vector, np.float32)
            np.testing.assert_allclose(vector, prompt_logits(request.prompt)[-1], rtol=1e-6)

    @invariant()
    def everything_holds(self):
        RuntimeMachine.num_rules += 1
        self.engine.check()
        assert self.engine.kv.num_unpublished == self.num_unpublished

    def _submit(self, prompt, **options):
        self.count += 1
        expects = (None, 0, 3)[self.count % 3] if not options.get("pools") else None
        self.engine.submit(f"r{self.count}", prompt, expects=expects, **options)

    def _progress(self):
        """Counts of which one grows whenever something moves. Their sum may shrink: a preemption
        can undo more than the other sequences compute meanwhile.
        """
        scheduler = self.engine.scheduler
        live = scheduler.table.sequences()
        counts = Counter({(s.request_id, s.choice): s.num_confirmed for s in live})
        counts["ended"] = sum(o.finish_reason is not None for o in self.engine.outcomes.values())
        counts["generated"] = scheduler.num_generated_tokens
        counts["preempted"] = scheduler.num_preemptions
        return counts


def test_a_preemption_is_not_counted_as_lack_of_progress():
    machine = RuntimeMachine()
    options = {"policy": "lru", "sharing": False, "window": None, "num_window_blocks": 1}
    options |= {"max_cached_blocks": None, "max_cached_sequences": None, "ttl_s": None}
    sizes = {"num_blocks": 30, "block_size": 1, "max_slots": 2, "budget": 24, "depth": 0}
    machine.start(tier_bytes=None, speculates=False, guessed=None, **options, **sizes)
    prompt = [index % 3 for index in range(14)]
    machine._submit(prompt, n=2, max_tokens=7)
    machine.turn(count=2)
    num_computed = [seq.num_confirmed for seq in machine.engine.scheduler.table.sequences()]
    machine.turn(count=4)
    assert machine.engine.scheduler.num_preemptions == 1
    live = machine.engine.scheduler.table.sequences()
    assert sum(s.num_confirmed for s in live) < sum(num_computed)
    machine.run_to_the_end()


@pytest.mark.parametrize("num_histories", [20, pytest.param(100, marks=pytest.mark.seconds)])
def test_scheduler_invariants_hold_in_random_histories(num_histories):
    RuntimeMachine.num_rules = 0
    RuntimeMachine.TestCase.settings = settings(
        max_examples=num_histories,
        stateful_step_count=50,
        deadline=None,
        # Shrinking takes longer than a test may. The next run repeats a failing history first.
        phases=[Phase.reuse, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    RuntimeMachine.TestCase().runTest()
    assert RuntimeMachine.num_rules >= 25 * num_histories


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_scheduler_invariants_hold_over_100_000_random_steps():
    from tests.property.run_machine import run

    result = run(steps=100_000, first_seed=1)
    assert result["steps"] >= 100_000 and not result["violations"], result["failure"]
