"""Requests continue after the death of their engine: what is submitted again, and what ends."""

import asyncio

import pytest

from engine.core.errors import (
    EngineError,
    InferenceError,
    RequestTimeoutError,
    UnavailableError,
)
from engine.core.interfaces.request import (
    Deltas,
    Fatal,
    Resumed,
    SamplingParams,
    TokenDelta,
)
from engine.core.sandbox.liveness import Vitals
from engine.frontend import request_recovery as survival
from tests.support.fakes.scripted_link import READY, Bench, record_pauses, settle


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return record_pauses(monkeypatch)


async def test_a_revived_request_carries_its_tokens_seed_and_open_choices(pauses):
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    receiver = bench.submit(params=SamplingParams(n=4), timeout_s=60.0, queue_timeout_s=9.0)
    (first,) = bench.client.sent
    ending = TokenDelta("r", 1, (7,), finish_reason="stop")
    deltas = (TokenDelta("r", 0, (5,)), ending, TokenDelta("r", 0, (6,), surprise_limit=1.5))
    bench.client.on_message(Deltas(deltas))
    bench.link.forget("r", 3)
    (again,) = await bench.replace_engine()
    assert again.resumed == (Resumed(0, (5, 6), 1.5), Resumed(2, ()))
    assert again.params == first.params and first.params.seed is not None
    assert 50 < again.timeout_s < 60.0 and again.queue_timeout_s is None
    assert receiver.items == list(deltas), "the client must see nothing of it"
    await bench.link.stop()


async def test_late_deltas_of_an_abandoned_engine_are_dropped(pauses):
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    receiver, first = bench.submit(), bench.client
    first.on_message(Fatal("internal_error", "secret detail"))
    first.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    await bench.replace_engine()
    first.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    bench.client.on_message(Deltas((TokenDelta("r", 0, (7,)),)))
    assert [item.token_ids for item in receiver.items] == [(7,)]
    await bench.link.stop()


async def test_requests_of_a_frozen_engine_move_before_it_exits(pauses):
    """Its requests do not wait for its end, and what it says when it wakes up late is dropped."""
    other = Bench(max_revivals=8)
    await other.start()

    def move(opened) -> bool:
        other.link.take_over(opened)
        return True

    bench = Bench(0.1, max_revivals=8, move=move)
    await bench.start()
    receiver, frozen = bench.submit(), bench.client
    frozen.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    frozen.show([Vitals(None, 10.0, 9.0)] * 2)
    await settle()
    assert frozen.num_killed == 1 and not bench.link.is_up
    (moved,) = other.client.sent
    assert moved.resumed == (Resumed(0, (5,)),)
    frozen.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    other.client.on_message(Deltas((TokenDelta("r", 0, (7,)),)))
    frozen.on_exit(-9)
    await settle()
    assert [item.token_ids for item in receiver.items] == [(5,), (7,)]
    assert len(bench.clients) == 2 and len(other.client.sent) == 1
    await bench.link.stop()
    await other.link.stop()


async def test_a_request_is_resubmitted_once_per_engine_death(pauses):
    bench = Bench(0.1, 0.1, 0.1, max_revivals=2)
    await bench.start()
    receiver, ended = bench.submit("r"), bench.submit("ended")
    bench.link.done("ended")
    for number in range(2):
        bench.client.on_message(Deltas((TokenDelta("r", 0, (number,)),)))
        sent = await bench.replace_engine()
        assert [each.request_id for each in sent] == ["r"]
        bench.client.on_message(READY)
        assert len(sent) == 1 and bench.link.num_revived == number + 1
    bench.client.on_message(Deltas((TokenDelta("r", 0, (9,)),)))
    assert await bench.replace_engine() == [], "two revivals are the limit"
    assert isinstance(receiver.items[-1], UnavailableError) and not ended.items
    await bench.link.stop()


async def test_after_repeated_deaths_requests_are_retried_one_by_one_to_find_the_cause(pauses):
    bench = Bench(0.1, 0.1, 0.1, max_revivals=8)
    await bench.start()
    receivers = {name: bench.submit(name) for name in ("a", "poison", "b", "c")}
    assert len(await bench.replace_engine()) == 4, "the first death makes no suspects"
    bench.client.on_message(Deltas((TokenDelta("c", 0, (5,)),)))
    sent = await bench.replace_engine()
    assert [each.request_id for each in sent] == ["a"], "c has gone on, so it is no suspect"
    bench.client.on_message(Deltas((TokenDelta("a", 0, (5,)),)))
    assert [each.request_id for each in sent] == ["a", "poison"]
    sent = await bench.replace_engine()
    assert isinstance(receivers.pop("poison").items[-1], InferenceError)
    assert [each.request_id for each in sent] == ["b"]
    bench.link.forget("b", None)  # its client has left
    assert [each.request_id for each in sent[1:3]] == ["a", "c"]
    assert not any(isinstance(item, EngineError) for r in receivers.values() for item in r.items)
    await bench.link.stop()


async def test_waiting_for_a_new_engine_is_bounded(pauses, monkeypatch):
    monkeypatch.setattr(survival, "MAX_WAIT_S", 0.02)
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    receivers = [bench.submit("long"), bench.submit("short", timeout_s=0.01)]
    bench.client.on_exit(-9)
    async with asyncio.timeout(60):
        while not all(receiver.items for receiver in receivers):
            await settle()
    assert [type(r.items[0]) for r in receivers] == [UnavailableError, RequestTimeoutError]
    await settle()
    bench.client.on_message(READY)
    assert not bench.client.sent
    await bench.link.stop()


async def test_new_requests_wait_for_the_next_engine(pauses):
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    bench.client.is_gone = True  # it has died, but this is not reported yet
    early = bench.submit("early")
    bench.client.on_exit(-9)
    late = bench.submit("late", params=SamplingParams(seed=3), timeout_s=60.0, queue_timeout_s=9.0)
    assert bench.link.accepts and not bench.link.is_up
    await settle()
    bench.client.on_message(READY)
    sent = {each.request_id: each for each in bench.client.sent}
    assert sent.keys() == {"early", "late"} and not any(each.resumed for each in sent.values())
    assert 50 < sent["late"].timeout_s < 60.0 and 8 < sent["late"].queue_timeout_s < 9.0
    assert sent["late"].params.seed == 3 and not early.items and not late.items
    assert bench.link.num_revived == 0, "nothing of them was computed before"
    assert bench.link.num_revivals("late") == 0
    await bench.link.stop()


async def test_a_new_request_waits_no_longer_than_its_queue_timeout(pauses):
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    bench.client.on_exit(-9)
    receiver = bench.submit(queue_timeout_s=0.01)
    async with asyncio.timeout(60):
        while not receiver.items:
            await settle()
    assert isinstance(receiver.items[0], UnavailableError)
    bench.client.on_message(READY)
    assert not bench.client.sent
    await bench.link.stop()


@pytest.mark.parametrize(
    ("delay", "max_revivals"), [(None, 8), (0.1, 0)], ids=["died too often", "survive is off"]
)
async def test_new_requests_are_refused_if_no_engine_can_be_expected(pauses, delay, max_revivals):
    bench = Bench(delay, max_revivals=max_revivals)
    await bench.start()
    bench.client.on_exit(-9)
    assert not bench.link.accepts
    with pytest.raises(UnavailableError) as refused:
        bench.submit()
    assert refused.value.retry_after is not None
    await bench.link.stop()


async def test_hand_over_moves_all_open_requests_to_the_new_engine(pauses):
    old, new = Bench(max_revivals=8), Bench(0.1, max_revivals=8)
    await old.start()
    await new.start()
    receiver, first = old.submit("r"), old.client
    first.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    assert old.link.hand_over(new.link) == 1 and not old.link.num_open
    (moved,) = new.client.sent
    assert moved.resumed == (Resumed(0, (5,)),) and receiver.engine is new.link
    first.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    new.client.on_message(Deltas((TokenDelta("r", 0, (7,)),)))
    assert [item.token_ids for item in receiver.items] == [(5,), (7,)]
    late = old.submit("late")
    assert [each.request_id for each in new.client.sent] == ["r", "late"]
    assert late.engine is new.link
    await old.link.stop()
    assert not any(isinstance(item, EngineError) for item in receiver.items + late.items)
    assert len(await new.replace_engine()) == 2, "they survive its death, too"
    await new.link.stop()


async def test_interrupted_requests_move_to_a_replica_and_stay_there(pauses):
    other = Bench(0.1, 0.1, max_revivals=8)
    await other.start()
    moved = []

    def move(opened) -> bool:
        moved.append(opened.request.request_id)
        other.link.take_over(opened)
        return True

    bench = Bench(0.1, 0.1, max_revivals=8, move=move)
    await bench.start()
    receiver = bench.submit("r")
    bench.client.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    bench.client.on_exit(-9)
    bench.submit("new")
    assert moved == ["r", "new"] and not bench.link.num_open
    again, new = other.client.sent
    assert again.resumed == (Resumed(0, (5,)),) and new.resumed is None
    assert receiver.engine is other.link and other.link.num_revived == 1
    other.client.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    assert len(await other.replace_engine()) == 2
    await settle()
    bench.client.on_message(READY)
    assert not bench.client.sent, "they are at home in the other one now"
    await other.link.stop()
    await bench.link.stop()


async def test_a_request_that_killed_two_engines_is_not_sent_to_another_replica(pauses):
    moved = []
    bench = Bench(0.1, 0.1, max_revivals=8, move=moved.append)
    await bench.start()
    bench.submit("a")
    bench.submit("b")
    await bench.replace_engine()
    assert len(moved) == 2, "one death may have any cause"
    await bench.replace_engine()
    assert len(moved) == 2, "now both are suspects"
    await bench.link.stop()
