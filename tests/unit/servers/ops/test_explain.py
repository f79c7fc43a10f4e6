"""Each request here is slow for one reason, and the explanation names it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.core.interfaces.backend import UsageEvent
from engine.core.interfaces.request import Deltas
from engine.core.interfaces.timeline import (
    MAX_CHUNKS,
    WAITS,
    DecodeWork,
    PrefillChunk,
    Preparation,
    Timeline,
)
from engine.routing.decisions import Decision, Failed
from engine.runtime import loop
from engine.runtime.insight.request_timing import BLOCKS, EngineClock, RequestTiming
from engine.runtime.requests import grammar as grammar_module
from engine.servers.http.request_log import RequestRecord
from engine.servers.ops.explain import causes_of
from engine.servers.ops.requests import spans_of
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.grammar import PatientGrammars, lark

STEP_S, TOKEN_S = 0.01, 0.002


class ClockedEngine:
    """The toy engine, whose steps take an exact time of a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(loop, "time", clock)
        self.toy = ToyEngine(**options)
        self.timelines: dict[str, Timeline] = {}
        forward, send = self.toy.runner.forward, self.toy.channel.send

        def slow_forward(inputs: Any) -> Any:
            self.now += STEP_S + TOKEN_S * int(inputs.query_start[-1])
            return forward(inputs)

        def noted(message: Any) -> None:
            if isinstance(message, Deltas):
                ended = [each for each in message.deltas if each.timeline is not None]
                self.timelines |= {each.request_id: each.timeline for each in ended}
            send(message)

        self.toy.runner.forward = slow_forward
        self.toy.channel.send = noted

    def submit(self, name: str, prompt: range | tuple[int, ...], max_tokens: int, **options: Any):
        tokens = [token % 20 for token in prompt]
        self.toy.submit(name, tokens, max_tokens=max_tokens, **options)

    def run(self) -> Timeline:
        self.toy.run()
        self.toy.check()
        return self.timelines["slow"]


def record_of(timeline: Timeline) -> RequestRecord:
    """The record of a request that took no time outside of the engine."""
    record = RequestRecord("req-1", started=timeline.submitted_at)
    at = timeline.submitted_at
    record.body_at = record.accepted_at = at
    record.notes.add_preparation(Preparation(at, at, at, at, timeline.num_prompt))
    record.notes.add_timeline(timeline)
    record.answered_at = record.ended_at = timeline.ended_at
    return record


def slots(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, max_slots=1)
    engine.submit("busy", (1, 2), 30)
    engine.toy.turn()
    engine.submit("slow", (3, 4), 2)
    return engine.run()


def budget(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=4, max_seq_len=256, num_blocks=256)
    engine.submit("busy", range(200), 1)
    engine.toy.turn()
    engine.submit("slow", range(3, 153), 2)
    return engine.run()


def blocks(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, num_blocks=12)
    engine.submit("busy", range(8), 16)
    engine.toy.turn()
    engine.submit("slow", range(5, 21), 2)
    return engine.run()


def turn(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, max_slots=1)
    engine.submit("first", (1, 2), 2, tenant="greedy")
    engine.toy.turn()
    engine.submit("slow", (3, 4), 2, tenant="greedy")
    for number in range(3):
        engine.submit(f"other{number}", (5, 6, number), 20, tenant="modest")
    return engine.run()


def priority(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, max_slots=1)
    engine.submit("first", (1, 2), 2)
    engine.toy.turn()
    engine.submit("slow", (3, 4), 2, priority=5)
    engine.submit("urgent", (5, 6), 40)
    return engine.run()


def prefix(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=4, max_seq_len=256, num_blocks=256)
    engine.submit("leader", range(100), 2)
    engine.toy.turn()
    engine.submit("slow", (*range(100), 7), 2)
    return engine.run()


def tier(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch)
    engine.toy.kv.is_loading = lambda seq: engine.now < 103.0
    engine.submit("slow", (1, 2), 2)
    while engine.now < 103.0:
        engine.toy.turn()
        engine.now += 0.1
    return engine.run()


def grammar(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    grammars = PatientGrammars()
    engine = ClockedEngine(monkeypatch, grammars=grammars)
    engine.submit("slow", (1, 2), 4, grammar=lark("[a-f]{3}"))
    engine.toy.turn()
    engine.now += 2.0
    grammars.finish()
    return engine.run()


def mask(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    grammars = PatientGrammars()
    engine = ClockedEngine(monkeypatch, grammars=grammars)
    finish = grammar_module.MaskJob.finish

    def slow_finish(job: Any, rows: Any) -> Any:
        engine.now += 0.5
        return finish(job, rows)

    monkeypatch.setattr(grammar_module.MaskJob, "finish", slow_finish)
    engine.submit("slow", (1, 2), 20, grammar=lark("[a-f]{18}"))
    engine.toy.turn()
    grammars.finish()
    return engine.run()


def eviction(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=64)
    engine.submit("before", range(40), 1)
    engine.toy.run()
    engine.toy.kv.flush()
    engine.submit("slow", range(40), 1)
    return engine.run()


def divergence(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=64)
    engine.submit("before", range(40), 1)
    engine.toy.run()
    engine.submit("slow", (*range(19), *range(12, 42)), 1)
    timeline = engine.run()
    assert (timeline.num_cached, timeline.divergence.at) == (18, 19)
    assert timeline.divergence.token_ids[:3] == (12, 13, 14)
    assert timeline.divergence.cached_ids[:3] == (19, 0, 1)
    return timeline


def cold(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=64)
    engine.submit("slow", range(40), 1)
    return engine.run()


def cache_off(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=64, sharing=False)
    engine.submit("slow", range(40), 1)
    return engine.run()


def shared_prefill(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=16, max_seq_len=256, num_blocks=256)
    engine.submit("slow", range(8), 1)
    engine.toy.turn()
    engine = ClockedEngine(monkeypatch, budget=16, max_seq_len=256, num_blocks=256)
    engine.submit("senior", range(200), 1)
    engine.submit("slow", (9, *range(30)), 1, tenant="other")
    return engine.run()


def preemption(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, num_blocks=16)
    engine.submit("busy", (1, 2, 3), 28)
    engine.submit("slow", (4, 5, 6), 20)
    timeline = engine.run()
    assert timeline.num_pauses >= 1
    return timeline


def mixed(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch, budget=64, max_seq_len=256, num_blocks=512, max_slots=8)
    engine.submit("slow", (1, 2), 40)
    engine.toy.turn(10)
    for number in range(6):
        engine.submit(f"other{number}", (number, *range(240)), 1)
    return engine.run()


def decode(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    engine = ClockedEngine(monkeypatch)
    engine.submit("slow", (1, 2), 40)
    timeline = engine.run()
    assert timeline.decode.num_steps == 39
    assert timeline.decode.by_rows[0] == 39
    return timeline


IN_ENGINE = [
    *(
        slots,
        budget,
        blocks,
        turn,
        priority,
        prefix,
        tier,
        grammar,
        mask,
        eviction,
        divergence,
        cold,
    ),
    *(cache_off, shared_prefill, preemption, mixed, decode),
]


@pytest.mark.parametrize("case", IN_ENGINE, ids=lambda case: case.__name__)
def test_the_cause_of_a_slow_request_inside_the_engine_is_named(
    case: Callable[[pytest.MonkeyPatch], Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = case(monkeypatch)
    record = record_of(timeline)
    main = causes_of(record, [])[0]
    assert main.kind == case.__name__, causes_of(record, [])
    # What it waited for adds up to its whole wait, and the message survives its way to the server.
    assert timeline.started_at is not None
    waited = timeline.started_at - timeline.queued_at
    assert sum(timeline.waits) == pytest.approx(waited, abs=1e-9)
    encoded = msgspec.msgpack.encode(timeline)
    assert msgspec.msgpack.decode(encoded, type=Timeline) == timeline


QUICK = Timeline(
    choice=0,
    submitted_at=10.0,
    queued_at=10.0,
    started_at=10.001,
    first_token_at=10.02,
    ended_at=10.1,
    finish_reason="stop",
    waits=(0.001,) + (0.0,) * (len(WAITS) - 1),
    num_prompt=20,
    num_generated=5,
    chunks=(PrefillChunk(10.001, 10.02, 0, 20, 1, 20),),
    decode=DecodeWork(4, 4, 0.08, 0, 0.0, 0.0, (4,)),
)


def change(record: RequestRecord, kind: str) -> list[dict[str, Any]]:
    """Make a quick request slow, in a way that the engine does not see. Returns the router's
    decisions.
    """
    decision = Decision(request_id="a", http_request_id="", model="m", policy="least_busy")
    prepared = record.notes.preparations[0]
    before = {"upload": 2.0, "tokenize": 2.0, "load": 2.0, "replica_busy": 2.0}
    before |= {"replica_failed": 2.0, "step": 2.0, "revival": 2.0}
    record.started -= before.get(kind, 0.0)
    if kind != "upload":
        record.body_at = record.started
    if kind in ("tokenize", "step", "revival"):
        record.accepted_at = record.started
        prepared = msgspec.structs.replace(prepared, began_at=record.started)
    elif kind in ("load", "replica_busy", "replica_failed"):
        record.accepted_at = record.started
        decision.waited_s = 2.0 if kind == "replica_busy" else 0.0
        decision.failed = (Failed("one", "gone", 2.0),) if kind == "replica_failed" else ()
    if kind in ("step", "revival"):
        at = record.started
        prepared = Preparation(at, at, at, at, 20)
    if kind == "revival":
        record.usage = UsageEvent(20, 5, 0, num_revivals=1)
    if kind == "client":
        record.ended_at = record.ended_at + 2.0
    if kind == "images":
        held = msgspec.structs.replace(QUICK, submitted_at=8.0, num_images=1)
        record.notes.timelines = [held]
        record.started = record.body_at = record.accepted_at = 8.0
        prepared = Preparation(8.0, 8.0, 8.0, 8.0, 20)
    record.notes.preparations = [prepared]
    if kind == "backend":
        record.notes.preparations, record.notes.timelines = [], []
        record.ttft_s = 0.05
    return [decision.body()]


@pytest.mark.parametrize(
    "kind",
    [
        *("upload", "tokenize", "load", "replica_busy", "replica_failed", "step", "revival"),
        *("client", "images", "backend"),
    ],
)
def test_the_cause_of_a_slow_request_outside_the_engine_is_named(kind: str) -> None:
    record = record_of(QUICK)
    decisions = change(record, kind)
    causes = causes_of(record, decisions)
    assert causes[0].kind == kind, causes
    spans = spans_of(record)
    total = sum(each["end_s"] - each["start_s"] for each in spans)
    assert total == pytest.approx(record.ended_at - record.started, abs=1e-4)


def test_a_timeline_keeps_a_bounded_number_of_prefill_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ClockedEngine(monkeypatch, budget=4, max_seq_len=256, num_blocks=256)
    engine.submit("slow", range(200), 1)
    chunks = engine.run().chunks
    assert len(chunks) == MAX_CHUNKS
    assert sum(each.count for each in chunks) == 200
    assert chunks[-1].start == 4 * (MAX_CHUNKS - 1)


def test_time_held_for_a_shared_prefix_is_not_attributed_to_other_waits() -> None:
    clock = EngineClock()
    seq = SimpleNamespace(arrival=0, tenant="", priority=0, num_matched=1)
    clock.plan(10.0)
    watch = RequestTiming(clock, 0, 10.0, None)
    leader = RequestTiming(clock, 0, 10.0, None)
    watch.hold(leader)
    clock.block(BLOCKS)
    clock.plan(12.0)
    leader.first_token(12.0)
    clock.block(BLOCKS)
    clock.plan(12.5)
    waits, _ = watch._waited(seq, 12.5)
    assert dict(zip(WAITS, waits, strict=True)) == {
        **dict.fromkeys(WAITS, 0.0),
        "prefix": 2.0,
        "blocks": 0.5,
    }
