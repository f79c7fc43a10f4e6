"""The whole runner seam, driven through the real runtime by the toy model: no framework, exact
outputs.
"""

import dataclasses

import numpy as np
import pytest

from engine.core.interfaces.request import Abort, Control, Stats
from engine.runtime.sequence import packed
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.runner import CRASH_TOKEN, NAN_TOKEN, VOCAB

PROMPT = (1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request):
    return request.param


def finished(engine: ToyEngine) -> None:
    engine.run()
    engine.check()
    assert engine.pool.num_free + engine.pool.num_evictable == engine.pool.num_usable


def test_batched_requests_equal_each_request_alone(depth):
    engine = ToyEngine(depth=depth, max_slots=8, num_blocks=64)
    engine.submit("greedy", PROMPT, max_tokens=9)
    engine.submit("drawn", PROMPT[:3], max_tokens=12, temperature=0.9, top_p=0.8, top_k=7)
    engine.submit("min-p", (9, 9), max_tokens=5, temperature=1.3, min_p=0.1, seed=3)
    engine.submit("stop", (4, 4, 4), max_tokens=30, eos=tuple(range(0, 8)), min_tokens=3)
    engine.submit("bias", (4,), max_tokens=6, logit_bias={11: 100.0})
    engine.submit("ignore", (4, 4), max_tokens=6, eos=tuple(range(20)), ignore_eos=True)
    finished(engine)
    assert engine.outcomes["bias", 0].tokens == [11] * 6
    assert engine.outcomes["stop", 0].finish_reason == "stop"
    assert len(engine.outcomes["stop", 0].tokens) > 3


def test_penalties_include_the_token_in_flight(depth):
    engine = ToyEngine(depth=depth)
    engine.submit("p", PROMPT, max_tokens=15, presence_penalty=1.5, frequency_penalty=1.0)
    engine.submit("r", PROMPT, max_tokens=15, repetition_penalty=1.8)
    finished(engine)
    assert len(set(engine.outcomes["p", 0].tokens)) == 15, (
        "a presence penalty this high never repeats"
    )


def test_choices_share_one_prefill_and_differ(depth):
    engine = ToyEngine(depth=depth, num_blocks=64, max_slots=8, budget=64)
    prompt = tuple(range(1, 18))
    engine.submit("n", prompt, n=4, max_tokens=6, temperature=1.0)
    finished(engine)
    outputs = [tuple(engine.outcomes["n", c].tokens) for c in range(4)]
    assert len(set(outputs)) > 1
    # Once for the whole prompt, then each other choice its last block, which holds the last token.
    generated = 4 * 6
    assert engine.runner.num_tokens <= len(prompt) + 3 * engine.spec.block_size + generated
    assert [engine.outcomes["n", c].num_cached for c in range(4)] == [0, 16, 16, 16]


def test_logprobs_are_computed_only_where_requested(depth):
    engine = ToyEngine(depth=depth)
    engine.submit("with", PROMPT, max_tokens=4, logprobs=3)
    engine.submit("chosen", PROMPT, max_tokens=4, logprobs=0)
    engine.submit("without", PROMPT, max_tokens=4)
    finished(engine)
    with_top = engine.outcomes["with", 0].logprobs
    assert [len(lp.top_ids) for lp in with_top] == [3] * 4
    assert [lp.top_ids[0] for lp in with_top] == engine.outcomes["with", 0].tokens
    assert all(lp.logprob == pytest.approx(lp.top_logprobs[0]) for lp in with_top)
    assert [lp.top_ids for lp in engine.outcomes["chosen", 0].logprobs] == [()] * 4
    assert engine.outcomes["without", 0].logprobs == []


def test_the_grammar_mask_reaches_the_runner(depth):
    engine = ToyEngine(depth=depth)
    allowed = [3, 17]
    build = engine.loop._step_runner._builder.sampling

    def masked(batch):
        sampling = build(batch)
        mask = np.zeros((len(sampling.slots), -(-VOCAB // 32)), np.uint32)
        for token in allowed:
            mask[:, token // 32] |= np.uint32(1 << (token % 32))
        return dataclasses.replace(sampling, mask=mask)

    engine.loop._step_runner._builder.sampling = masked
    engine.submit("m", PROMPT, max_tokens=8, temperature=2.0)
    engine.run()
    assert set(engine.outcomes["m", 0].tokens) <= set(allowed)


def test_a_nonfinite_row_fails_alone_and_is_never_cached(depth):
    engine = ToyEngine(depth=depth, num_blocks=64, max_slots=8)
    engine.submit("ok", PROMPT, max_tokens=8)
    engine.submit("bad", (1, 2, 3, NAN_TOKEN, 5, 6), max_tokens=8)
    engine.submit("also", (8, 8), max_tokens=8, temperature=1.0)
    finished(engine)
    bad = engine.outcomes["bad", 0]
    assert (bad.finish_reason, bad.error_code) == ("error", "inference_error")
    assert engine.kv.radix.match("", packed((1, 2, 3, NAN_TOKEN))) == engine.kv.radix.match(
        "", packed((1, 2))
    )
    assert engine.loop.stats().num_nonfinite == 1


def test_a_row_that_crashes_the_step_is_found_and_fails_alone(depth):
    engine = ToyEngine(depth=depth, num_blocks=64, max_slots=8)
    for i in range(5):
        engine.submit(f"ok{i}", (i, 1, 2, 3), max_tokens=8, repetition_penalty=1.3)
    engine.turn(2)
    engine.submit("bad", (1, CRASH_TOKEN), max_tokens=8)
    finished(engine)
    assert engine.outcomes["bad", 0].error_code == "inference_error"
    assert all(engine.outcomes[f"ok{i}", 0].finish_reason == "length" for i in range(5))


def test_preemption_changes_no_output(depth):
    engine = ToyEngine(depth=depth, num_blocks=9, max_slots=4, budget=8)
    for i in range(4):
        engine.submit(f"s{i}", (i, 1, 2), max_tokens=10, temperature=1.0, presence_penalty=0.5)
    finished(engine)
    assert engine.scheduler.num_preemptions > 0


def test_requests_can_be_aborted_in_every_state(depth):
    engine = ToyEngine(depth=depth, max_slots=2)
    for i in range(4):
        engine.submit(f"r{i}", (i, 1, 2, 3), max_tokens=20)
    engine.submit("n", (9, 1, 2, 3), max_tokens=20, n=2)
    engine.turn(3)
    for request_id in ("r0", "r3", "unknown"):  # running, waiting, never seen
        engine.channel.inbox.append(Abort(request_id))
    engine.channel.inbox.append(Abort("n", choice=1))
    finished(engine)
    assert engine.outcomes["r0", 0].finish_reason == "abort"
    assert engine.outcomes["r3", 0].finish_reason == "abort"
    assert engine.outcomes["n", 1].finish_reason == "abort"
    assert engine.outcomes["n", 0].finish_reason == "length"


def test_requests_that_can_never_fit_are_refused(depth):
    engine = ToyEngine(depth=depth, num_blocks=8, block_size=2, max_seq_len=64)
    engine.submit("fits", (1, 2, 3), max_tokens=13)
    engine.submit("too-long", (1, 2, 3), max_tokens=40)
    engine.submit("over-context", tuple([1] * 64), max_tokens=1)
    engine.submit("empty", (), max_tokens=1)
    engine.submit("foreign-id", (VOCAB,), max_tokens=1)
    engine.run()
    assert engine.outcomes["fits", 0].finish_reason == "length"
    for request_id in ("too-long", "over-context", "empty", "foreign-id"):
        assert engine.outcomes[request_id, 0].error_code == "invalid_request", request_id


def test_flush_cache_frees_all_unreferenced_blocks(depth):
    engine = ToyEngine(depth=depth)
    engine.submit("a", PROMPT, max_tokens=4)
    finished(engine)
    assert engine.pool.num_evictable > 0
    engine.channel.inbox.append(Control(1, "flush_cache"))
    engine.turn()
    assert engine.pool.num_free == engine.pool.num_usable


def test_different_salts_never_share_blocks(depth):
    engine = ToyEngine(depth=depth, num_blocks=64)
    engine.submit("a", PROMPT, max_tokens=2, salt="alice")
    engine.run()
    engine.submit("b", PROMPT, max_tokens=2, salt="bob")
    engine.submit("a2", PROMPT, max_tokens=2, salt="alice")
    finished(engine)
    assert engine.outcomes["b", 0].num_cached == 0
    assert engine.outcomes["a2", 0].num_cached == 6


def test_stats_are_sent_as_soon_as_the_engine_is_idle(depth):
    engine = ToyEngine(depth=depth)
    engine.loop._stats_sent_at = float("inf")  # no report falls due by time
    engine.submit("one", PROMPT, max_tokens=1)
    for _ in range(3):  # it may begin and end in a single turn
        engine.loop.turn(0.0)
    reports = [m.stats for m in engine.channel.outbox if isinstance(m, Stats)]
    assert reports and reports[-1].generated_tokens == 1 and reports[-1].num_running == 0


def test_stats_are_sent_when_the_last_request_is_aborted_between_steps(depth):
    engine = ToyEngine(depth=depth)
    engine.submit("a", (1, 2, 3), max_tokens=30)
    engine.turn(3)
    engine.loop._send_stats(force=True)
    engine.channel.inbox.append(Abort("a"))
    for _ in range(2):  # a step may still be in flight
        engine.loop.turn(0.0)
    reports = [each.stats for each in engine.channel.outbox if isinstance(each, Stats)]
    assert reports[0].num_referenced_blocks > 0
    assert (reports[-1].num_running, reports[-1].num_referenced_blocks) == (0, 0)
