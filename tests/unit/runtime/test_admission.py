"""A request's way into the queue: each field of its sequences, each refusal, each deadline."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from engine.core.errors import InvalidRequestError, RateLimitError
from engine.core.interfaces.request import AdapterRef, GenerateRequest, SamplingParams
from engine.runtime.groups.adapter_slots import AdapterSlots
from engine.runtime.insight.request_timing import RequestTimings
from engine.runtime.requests.admission import RequestAdmission
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.runner import VOCAB


def asking(name: str = "r", prompt=(1, 2, 3), params: dict | None = None, **fields):
    given = SamplingParams(**{"max_tokens": 5, "seed": 7} | (params or {}))
    return GenerateRequest(request_id=name, prompt=tuple(prompt), params=given, **fields)


class Compiling:
    """Grammars whose compilations the test ends."""

    def __init__(self) -> None:
        self.futures: dict[str, Future] = {}

    def compile(self, source: str) -> Future:
        self.futures[source] = Future()
        return self.futures[source]


class Bench:
    def __init__(self, max_queued: int = 1000, **spec) -> None:
        self.engine = ToyEngine(**{"num_blocks": 64, "max_slots": 4} | spec)
        self.scheduler = self.engine.scheduler
        self.grammars = Compiling()
        self.admission = RequestAdmission(
            self.engine.spec, self.scheduler, max_queued, self.grammars
        )

    def submit(self, request: GenerateRequest, now: float = 100.0) -> list:
        self.admission.observe(now)  # as the engine does in each turn
        return self.admission.submit(request, now)

    def waiting(self) -> list:
        return sorted(self.scheduler.table.sequences(), key=lambda seq: seq.arrival)


def codes(deltas: list) -> list[tuple]:
    return [(delta.request_id, delta.choice, delta.error_code) for delta in deltas]


def test_every_field_of_a_request_reaches_its_sequences():
    bench = Bench()
    params = {"n": 2, "stop_token_ids": (9,), "score_prompt": True, "logprobs": 0, "max_tokens": 6}
    params["allowed_token_ids"] = (1, 3)
    request = asking(
        params=params,
        eos_ids=(4, 5),
        priority=-2,
        salt="salt",
        tenant="tenant",
        timeout_s=30.0,
        bad_words=((1, 2),),
        dry_breakers=((3,), (4, 5), (4, 6)),
    )
    assert bench.submit(request) == []
    first, second = bench.waiting()
    for choice, seq in enumerate((first, second)):
        assert (seq.request_id, seq.choice, list(seq.tokens)) == ("r", choice, [1, 2, 3])
        assert (seq.num_prompt, seq.max_tokens, seq.params) == (3, 6, request.params)
        assert seq.stop_ids == {4, 5, 9}
        assert (seq.seed, seq.namespace, seq.tenant) == (7, "salt", "tenant")
        assert (seq.priority, seq.pools) == (-2, False)
        assert seq.starts_over == (choice == 0), "only the first choice scores the prompt"
        rules = seq.rules
        assert rules is not None and rules.constraint is None
        assert rules.bad_words == ((1, 2),) and rules.dry_breakers == {3: [()], 4: [(5,), (6,)]}
        assert rules.allowed is not None and rules.allowed.tolist() == [0b1010]
    (deadline,) = bench.admission._checks.deadlines
    assert (deadline.at, deadline.is_end, deadline.queued_at) == (130.0, True, 100.0)
    assert first.arrival < second.arrival and first.tokens is not second.tokens


def test_eos_can_be_ignored_but_stop_token_ids_are_kept():
    bench = Bench()
    bench.submit(asking(params={"ignore_eos": True, "stop_token_ids": (9,)}, eos_ids=(4,)))
    assert bench.waiting()[0].stop_ids == {9}


def test_without_a_seed_each_request_draws_one_for_all_its_choices():
    bench = Bench()
    for name in ("a", "b"):
        bench.submit(asking(name, params={"seed": None, "n": 2}))
    seeds = [seq.seed for seq in bench.waiting()]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert all(0 <= seed < 2**62 for seed in seeds)


@pytest.mark.parametrize(
    ("asked", "pools", "granted"), [(5, False, 5), (None, False, 13), (99, False, 13), (9, True, 1)]
)
def test_max_tokens_is_bounded_by_the_remaining_context(asked, pools, granted):
    bench = Bench(max_seq_len=16)
    assert bench.submit(asking(params={"max_tokens": asked}, pools=pools)) == []
    assert bench.waiting()[0].max_tokens == granted
    assert bench.waiting()[0].pools == pools


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asking(prompt=()), "no tokens"),
        (asking(prompt=(1, VOCAB)), "within 0"),
        (asking(prompt=(-1,)), "within 0"),
        (asking(prompt=(2**40,)), "within 0"),
        (asking(params={"logit_bias": {VOCAB: 1.0}}), "within 0"),
        (asking(params={"stop_token_ids": (-1,)}), "within 0"),
        (asking(eos_ids=(VOCAB,)), "within 0"),
        (asking(prompt=(1,) * 16), "but the prompt has 16"),
        (asking(prompt=(1,) * 17, pools=True), "but the prompt has 17"),
    ],
)
def test_invalid_requests_are_refused_for_every_choice(request_, message):
    bench = Bench(max_seq_len=16)
    deltas = bench.submit(request_)
    assert codes(deltas) == [("r", 0, "invalid_request")]
    assert message in deltas[0].error_message and not bench.waiting()


def test_requests_that_just_fit_are_admitted():
    bench = Bench(max_seq_len=16)
    assert bench.submit(asking("a", prompt=(0,) * 15, params={"n": 2})) == []
    assert bench.submit(asking("b", prompt=(VOCAB - 1,) * 16, pools=True)) == []
    cached = Bench(num_blocks=4, block_size=2, max_seq_len=16)
    assert cached.submit(asking("a", prompt=(1,) * 5, params={"max_tokens": 4})) == []
    deltas = cached.submit(asking("b", prompt=(1,) * 5, params={"max_tokens": 5, "n": 2}))
    assert codes(deltas) == [("b", 0, "invalid_request"), ("b", 1, "invalid_request")]
    assert "room for 9 tokens; the KV cache holds 8" in deltas[0].error_message


def test_the_queue_is_bounded_and_counts_requests_whose_grammar_compiles():
    bench = Bench(max_queued=2)
    bench.submit(asking("a"))
    bench.submit(asking("b", grammar="g"))
    assert codes(bench.submit(asking("c"))) == [("c", 0, "rate_limit_exceeded")]


def test_an_engine_without_grammars_refuses_only_grammar_requests():
    bench = Bench()
    bench.admission.pending._grammars = None
    assert codes(bench.submit(asking("a", grammar="g"))) == [("a", 0, "invalid_request")]
    assert bench.submit(asking("b")) == []


def test_a_compiled_grammar_is_copied_for_each_choice():
    bench = Bench()
    copies = iter(("one", "two"))
    bench.submit(asking(params={"n": 2}, grammar="g", timeout_s=30.0), now=100.0)
    assert bench.admission.admit_ready(101.0) == [] and not bench.waiting()
    bench.grammars.futures["g"].set_result(SimpleNamespace(deep_copy=lambda: next(copies)))
    assert bench.admission.admit_ready(102.0) == []
    assert [seq.rules.constraint.matcher for seq in bench.waiting()] == ["one", "two"]
    timings = bench.scheduler.find(RequestTimings)
    assert all(timings.submitted_at(seq) == 100.0 for seq in bench.waiting())
    assert [entry.at for entry in bench.admission._checks.deadlines] == [130.0]
    assert bench.admission.num_pending == 0


def test_a_grammar_that_fails_or_times_out_ends_only_its_request():
    bench = Bench()
    for name in ("bad", "odd", "late", "patient"):
        timeout_s = 30.0 if name == "late" else None
        bench.submit(asking(name, params={"n": 2}, grammar=name, timeout_s=timeout_s))
    bench.grammars.futures["bad"].set_exception(InvalidRequestError("no such rule"))
    bench.grammars.futures["odd"].set_exception(ZeroDivisionError())
    deltas = bench.admission.admit_ready(130.0)
    assert codes(deltas) == [
        *(("bad", 0, "invalid_request"), ("bad", 1, "invalid_request")),
        *(("odd", 0, "inference_error"), ("odd", 1, "inference_error")),
    ]
    assert deltas[0].error_message == "no such rule"
    assert codes(bench.admission.admit_ready(130.1)) == [("late", c, "timeout") for c in range(2)]
    assert bench.admission.num_pending == 1 and not bench.waiting()


def test_an_adapter_that_does_not_fit_on_the_device_ends_only_its_request():
    bench = Bench()
    places = {"first": MemoryError("no room"), "second": 2}

    def place(ref: AdapterRef) -> int:
        if isinstance(found := places[ref.key], MemoryError):
            raise found
        return found

    slots = AdapterSlots(SimpleNamespace(), open, 2, 1)
    slots.place = place
    bench.admission.pending.adapters = slots
    for name in places:
        refused = bench.submit(asking(name, adapter=AdapterRef(name, f"/x/{name}")))
        assert codes(refused) == ([("first", 0, "inference_error")] if name == "first" else [])
    assert [(seq.request_id, slots.used[seq]) for seq in bench.waiting()] == [("second", 2)]
    assert bench.admission.num_pending == 0


def test_a_request_aborted_while_its_grammar_compiles_never_starts():
    bench = Bench()
    bench.submit(asking(params={"n": 3}, grammar="g"))
    (ended,) = bench.admission.abort("r", 1, 101.0)
    assert (ended.choice, ended.finish_reason) == (1, "abort")
    assert bench.admission.abort("r", 1, 101.0) == []
    bench.grammars.futures["g"].set_result(SimpleNamespace(deep_copy=lambda: None))
    bench.admission.admit_ready(102.0)
    assert [seq.choice for seq in bench.waiting()] == [0, 2]
    assert [delta.choice for delta in bench.admission.abort("r", None, 103.0)] == [0, 2]
    bench.submit(asking("other", params={"n": 2}, grammar="h"))
    ended = bench.admission.abort_pending(104.0)
    assert [(delta.request_id, delta.choice) for delta in ended] == [("other", 0), ("other", 1)]
    assert bench.admission.num_pending == 0


@pytest.mark.parametrize(
    ("timeout_s", "queue_timeout_s", "begun", "ends"),
    [
        (30.0, None, False, {130.0: "timeout"}),
        (30.0, None, True, {130.0: "timeout"}),
        (None, 10.0, False, {110.0: "rate_limit_exceeded"}),
        (None, 10.0, True, {}),
        (30.0, 10.0, False, {110.0: "rate_limit_exceeded"}),
        (30.0, 10.0, True, {130.0: "timeout"}),
        (10.0, 30.0, False, {110.0: "timeout"}),
        (10.0, 10.0, False, {110.0: "timeout"}),
        (None, None, False, {}),
    ],
)
def test_deadlines_and_queue_timeouts_expire_exactly(timeout_s, queue_timeout_s, begun, ends):
    bench = Bench()
    bench.submit(asking(params={"n": 2}, timeout_s=timeout_s, queue_timeout_s=queue_timeout_s))
    if begun:
        bench.scheduler.schedule(64, 101.0)
    found = {}
    for now in (109.9, 110.0, 129.9, 130.0, 1e6):
        for delta in bench.admission.expire(now):
            assert found.setdefault(now, delta.error_code) == delta.error_code
    assert found == ends
    assert len(bench.waiting()) == (0 if ends else 2)
    bench.scheduler.check()


def test_a_queue_timeout_error_says_how_long_the_request_waited():
    bench = Bench()
    bench.submit(asking(queue_timeout_s=10.0), now=100.0)
    (delta,) = bench.admission.expire(112.0)
    assert "waited 12 s" in delta.error_message


def test_queue_time_counts_only_waiting_for_admission():
    """The grammar took 50 seconds. The request may still wait for ten more."""
    bench = Bench()
    bench.submit(asking(grammar="g", queue_timeout_s=10.0, timeout_s=600.0), now=100.0)
    assert bench.admission.expire(150.0) == []
    bench.grammars.futures["g"].set_result(None)
    assert bench.admission.admit_ready(150.0) == []
    assert bench.admission.expire(159.9) == [] and len(bench.waiting()) == 1
    (delta,) = bench.admission.expire(160.0)
    assert "waited 10 s" in delta.error_message


def test_loading_blocks_does_not_count_as_queue_time():
    bench = Bench()
    bench.submit(asking(queue_timeout_s=10.0), now=100.0)
    reading = set(bench.waiting())
    bench.scheduler.kv.is_reading = reading.__contains__
    assert bench.admission.expire(112.0) == []
    reading.clear()
    (delta,) = bench.admission.expire(113.5)
    assert delta.error_code == "rate_limit_exceeded"


def test_refusing_one_choice_refuses_the_whole_request():
    for grammar in (None, "g"):
        bench = Bench()
        make = bench.admission._maker._sequence

        def refuse_the_third(ready, before, shared, queued_at, make=make):
            if before.choice == 2:
                raise RateLimitError("too much at once", retry_after=3.0)
            return make(ready, before, shared, queued_at)

        bench.admission._maker._sequence = refuse_the_third
        found = bench.submit(asking(params={"n": 4}, grammar=grammar))
        if grammar is not None:
            bench.grammars.futures["g"].set_result(None)
            found = bench.admission.admit_ready(101.0)
        refused = [("r", choice, "rate_limit_exceeded") for choice in range(4)]
        assert codes(found) == refused and found[0].retry_after == 3.0
        assert bench.waiting() == []
        bench.scheduler.check()


def test_a_request_that_would_exceed_its_queue_timeout_is_refused_at_once():
    bench = Bench()
    for index in range(40):
        assert bench.submit(asking(f"r{index}", queue_timeout_s=10.0)) == []
    # In three seconds, one sequence started. 36 others wait, so the last waits 108 seconds.
    assert bench.submit(asking("a", queue_timeout_s=10.0)) == []
    bench.scheduler.num_started += 1
    ((name, _, code),) = codes(bench.submit(asking("b", queue_timeout_s=10.0), now=103.0))
    assert (name, code) == ("b", "rate_limit_exceeded")
    assert bench.submit(asking("patient"), now=103.0) == []
    assert bench.submit(asking("c", queue_timeout_s=600.0), now=103.0) == []


def test_retry_after_expects_queued_requests_to_time_out():
    bench = Bench()
    for index in range(40):
        bench.submit(asking(f"r{index}", queue_timeout_s=10.0))
    # They would all begin within two minutes, but at 110 those that have not begun are refused.
    (refused,) = bench.submit(asking("b", queue_timeout_s=10.0), now=103.0)
    assert refused.retry_after == pytest.approx(7.0)
    bench.submit(asking("patient"), now=103.0)
    (refused,) = bench.submit(asking("c", queue_timeout_s=10.0), now=103.0)
    assert refused.retry_after > 100


def flooded(may_wait_s: float = 60.0, **fields) -> Bench:
    """A tenant's 100 sequences wait, and one starts every three seconds."""
    bench = Bench(**fields)
    for index in range(100):
        assert bench.submit(asking(f"r{index}", tenant="flood", queue_timeout_s=may_wait_s)) == []
    bench.admission.observe(100.0)
    bench.scheduler.num_started += 1
    return bench


def test_a_flood_of_one_tenant_does_not_refuse_another():
    bench = flooded()
    ((_, _, code),) = codes(
        bench.submit(asking("more", tenant="flood", queue_timeout_s=60.0), now=103.0)
    )
    assert code == "rate_limit_exceeded"
    assert bench.submit(asking("b", tenant="other", queue_timeout_s=60.0), now=103.0) == []


def test_a_flood_of_high_priority_requests_does_not_refuse_another_tenant():
    bench = Bench()
    for index in range(100):
        urgent = asking(f"r{index}", tenant="flood", priority=-100, queue_timeout_s=60.0)
        assert bench.submit(urgent) == []
    bench.scheduler.num_started += 1
    assert bench.submit(asking("b", tenant="other", queue_timeout_s=60.0), now=103.0) == []


@pytest.mark.parametrize(
    ("fields", "num_before"),
    [
        ({"tenant": "flood"}, 100),
        ({"tenant": "flood", "priority": -1}, 0),
        ({"tenant": "other", "priority": 1}, 100),
    ],
)
def test_a_refusal_has_a_retry_after(fields, num_before):
    bench = flooded(may_wait_s=600.0)
    limit_s = 0.5 if num_before == 0 else 60.0
    (delta,) = bench.submit(asking("more", queue_timeout_s=limit_s, **fields), now=103.0)
    assert delta.retry_after == pytest.approx((num_before + 0.5) * 3.0)
    assert f"about {delta.retry_after:.0f} s" in delta.error_message


def test_a_queue_full_of_one_tenant_still_admits_others():
    bench = Bench(max_queued=16)
    taken = [bench.submit(asking(f"r{i}", tenant="flood")) == [] for i in range(16)]
    assert taken == [True] * 14 + [False] * 2
    assert bench.submit(asking("b", tenant="other")) == []
    assert bench.submit(asking("c", tenant="third")) == []
    ((_, _, code),) = codes(bench.submit(asking("d", tenant="fourth")))
    assert code == "rate_limit_exceeded"


def test_a_burst_is_not_refused_before_throughput_is_known():
    bench = Bench()
    for index in range(500):
        assert bench.submit(asking(f"r{index}", queue_timeout_s=1.0), now=100.0 + index / 500) == []
