"""The frontend's hold on an engine that does exactly what the test says: no process, no waiting."""

import asyncio

import pytest

from engine.core.errors import (
    EngineError,
    ModelError,
    ResourceError,
    UnavailableError,
)
from engine.core.interfaces.request import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    Fatal,
    Stats,
    TokenDelta,
)
from engine.core.interfaces.stats import EngineStats
from engine.core.sandbox import liveness
from engine.core.sandbox.liveness import Vitals
from engine.frontend import engine_link as link_module
from tests.support.fakes.scripted_link import HEALTHY, READY, Bench, record_pauses, settle


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return record_pauses(monkeypatch)


async def test_deltas_reach_only_their_own_request():
    bench = Bench()
    await bench.start()
    one, other = bench.submit("one"), bench.submit("other")
    deltas = (TokenDelta("other", 1, (7,)), TokenDelta("one", 0, (8,)), TokenDelta("gone", 0, (9,)))
    bench.client.on_message(Deltas(deltas))
    assert (one.items, other.items) == ([deltas[1]], [deltas[0]])
    bench.link.done("one")
    bench.client.on_message(Deltas(deltas))
    assert len(one.items) == 1 and len(other.items) == 2
    await bench.link.stop()


async def test_a_request_that_could_not_be_sent_is_not_tracked():
    bench = Bench()
    await bench.start()
    bench.client.is_gone = True
    with pytest.raises(UnavailableError):
        bench.submit()
    bench.client.is_gone = False
    bench.submit()  # its id is free
    await bench.link.stop()


async def test_aborting_one_choice_keeps_the_others():
    bench = Bench()
    await bench.start()
    receiver = bench.submit()
    bench.link.forget("r", 1)
    bench.client.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    bench.link.forget("r", None)
    bench.client.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    assert [item.token_ids for item in receiver.items] == [(5,)]
    assert bench.client.sent[1:] == [Abort("r", 1), Abort("r", None)]
    bench.client.is_gone = True
    bench.link.forget("r", None)  # never raises
    await bench.link.stop()


async def test_control_replies_are_matched_by_number():
    bench = Bench()
    await bench.start()
    flushing = asyncio.create_task(bench.link.flush_cache())
    levelling = asyncio.create_task(bench.link.set_log_level("debug"))
    await settle()
    flush, level = bench.client.sent
    assert (flush, level) == (Control(1, "flush_cache"), Control(2, "log_level", "debug"))
    bench.client.on_message(ControlReply(9, True, "nobody's"))
    bench.client.on_message(ControlReply(level.control_id, True, "level"))
    bench.client.on_message(ControlReply(flush.control_id, False, "flush"))
    assert (await levelling).message == "level"
    assert await flushing == ControlReply(1, False, "flush")
    await bench.link.stop()


async def test_an_engine_death_fails_open_requests_and_controls(pauses):
    bench = Bench(0.25)
    await bench.start()
    bench.client.on_message(Stats(EngineStats(num_steps=3)))
    receiver, flushing = bench.submit(), asyncio.create_task(bench.link.flush_cache())
    await settle()
    bench.client.on_exit(-9)
    assert [type(item) for item in receiver.items] == [UnavailableError]
    assert (bench.link.ready, bench.link.stats, bench.link.pid) == (None, None, None)
    assert "being restarted" in bench.link.detail
    with pytest.raises(UnavailableError, match="being restarted") as refused:
        bench.submit("late")
    assert refused.value.retry_after == 2.0
    await settle()
    assert flushing.done()
    with pytest.raises(UnavailableError):
        await flushing
    assert len(bench.clients) == 2 and bench.link.num_restarts == 1 and 0.25 in pauses
    assert bench.client.is_started
    bench.client.on_message(READY)
    assert bench.link.detail == "ready"
    await bench.link.stop()
    assert bench.client.is_stopped and "stopped" in bench.link.detail


async def test_after_too_many_deaths_the_restart_waits_for_the_cool_down(pauses):
    bench = Bench(None, 0.5, cool_down_s=77.0)
    await bench.start()
    bench.client.on_exit(1)
    assert "too often" in bench.link.detail and "77 s" in bench.link.detail
    await settle()
    assert 77.0 in pauses and len(bench.clients) == 2
    bench.client.on_message(READY)
    bench.client.on_exit(1)
    assert "too often" not in bench.link.detail, "it has been up since"
    await bench.link.stop()


async def test_an_engine_process_that_cannot_be_created_is_retried(pauses, monkeypatch):
    bench = Bench(0.25, 0.75)
    await bench.start()
    working = bench.link._make_client

    def broken(on_message, on_exit):
        bench.link._make_client = working
        raise OSError("no more processes")

    bench.link._make_client = broken
    bench.client.on_exit(1)
    await settle()
    assert [pause for pause in pauses if pause in (0.25, 0.75)] == [0.25, 0.75]
    assert len(bench.clients) == 2 and bench.link.num_restarts == 2
    await bench.link.stop()


async def test_start_raises_the_error_that_kept_the_engine_from_loading():
    bench = Bench()
    starting = asyncio.create_task(bench.link.start())
    await asyncio.sleep(0)
    bench.client.on_message(Fatal(ResourceError("x").error_code, "it does not fit"))
    with pytest.raises(ResourceError, match="it does not fit"):
        await starting
    await bench.link.stop()


async def test_the_error_of_a_dead_engine_is_logged_and_not_sent_to_clients():
    bench = Bench()
    await bench.start()
    receiver = bench.submit()
    bench.client.on_message(Fatal("internal_error", "secret detail"))
    (error,) = receiver.items
    assert isinstance(error, UnavailableError) and "secret" not in error.message
    assert "is down" in bench.link.detail
    await bench.link.stop()


async def test_an_engine_that_never_loaded_is_not_started_again(pauses):
    bench = Bench(0.25)
    starting = asyncio.create_task(bench.link.start())
    await asyncio.sleep(0)
    bench.client.on_exit(1)
    with pytest.raises(EngineError):
        await starting
    await settle()
    assert len(bench.clients) == 1 and bench.link.num_restarts == 0


async def test_an_engine_that_dies_while_stopping_is_not_restarted(pauses):
    bench = Bench(0.25)
    await bench.start()
    receiver = bench.submit()
    await bench.link.stop()
    assert "shutting down" in receiver.items[0].message
    bench.client.on_exit(1)
    await settle()
    assert len(bench.clients) == 1


def silent(seconds: float) -> Vitals:
    return Vitals(None, 10.0, seconds)


def step(age_s: float, patience_s: float = 10.0) -> Vitals:
    return Vitals(age_s, patience_s, 0.1)


@pytest.mark.parametrize(
    ("looks", "num_woken", "num_killed"),
    [
        ([silent(3.9)] * 9, 0, 0),
        ([silent(4.1), silent(4.6), silent(5.1)], 1, 0),
        ([silent(4.1), HEALTHY, silent(2.9), silent(2.9)], 1, 0),
        ([silent(4.1), HEALTHY, silent(3.1), HEALTHY], 1, 0),
        ([silent(4.1), HEALTHY, silent(3.1), silent(3.6)], 1, 1),  # something stops it again
        ([silent(6.9)] * 9, 1, 0),
        ([silent(7.1), HEALTHY, silent(7.1), HEALTHY], 1, 0),  # once may be our own fault
        ([silent(7.1), silent(7.6)], 1, 1),
        ([step(19.0)] * 9, 0, 0),
        ([step(21.0), step(21.5)], 0, 1),
        ([step(21.0, patience_s=30.0)] * 9, 0, 0),
        ([None, None], 0, 0),
    ],
    ids=range(12),
)
async def test_a_silent_engine_gets_sigcont_and_is_killed_if_it_stays_silent(
    looks, num_woken, num_killed, monkeypatch
):
    monkeypatch.setattr(link_module, "WATCH_INTERVAL_S", 0)
    bench = Bench()
    await bench.start()
    bench.client.show(looks)
    async with asyncio.timeout(60):
        while not (bench.client.looked.is_set() or bench.client.num_killed):
            await asyncio.sleep(0)
    assert (bench.client.num_woken, bench.client.num_killed) == (num_woken, num_killed)
    await bench.link.stop()


async def test_a_frozen_loading_engine_is_killed_and_start_says_why(monkeypatch):
    monkeypatch.setattr(link_module, "WATCH_INTERVAL_S", 0)
    bench = Bench()
    starting = asyncio.create_task(bench.link.start())
    await asyncio.sleep(0)
    bench.client.show([silent(4.1), silent(7.1), silent(7.6)])
    with pytest.raises(ModelError, match="does not go on"):
        await asyncio.wait_for(starting, 60)
    assert bench.client.num_woken == bench.client.num_killed == 1 and bench.link.trouble is None
    await bench.link.stop()


async def test_a_restart_that_takes_too_long_is_reported_until_an_engine_is_ready(
    pauses, monkeypatch
):
    bench = Bench(*[0.25] * 9)
    await bench.start()
    bench.client.on_exit(-9)
    assert not bench.link.is_overdue
    monkeypatch.setattr(liveness, "MIN_DOWN_S", 0.0)
    monkeypatch.setattr(liveness, "TIMES_LONGER", 0.0)
    assert bench.link.is_overdue
    await settle()
    bench.client.on_exit(-9)
    await settle()
    assert bench.link.is_overdue and len(bench.clients) == 3
    bench.client.on_message(READY)
    assert not bench.link.is_overdue
    await bench.link.stop()


class FakeClock:
    now = 1000.0

    def __call__(self):
        return self.now


class SteadyHeadway:
    """A load that did something for a minute at each look."""

    idle_s = 0.0

    def __init__(self, pid):
        self.pid = pid

    def look(self):
        return 60.0


def test_progress_of_a_finished_load_does_not_delay_the_alarm(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(liveness.time, "monotonic", clock)
    monkeypatch.setattr(liveness, "Headway", SteadyHeadway)
    told = liveness.Downtime()
    told.down()
    told.load(1)
    clock.now += liveness.MIN_DOWN_S + 50
    assert told.is_overdue
    assert told.too_long() is None and not told.is_overdue  # this load may still end well
    told.load(2)
    assert told.is_overdue


async def test_a_load_without_progress_is_killed_although_the_heartbeat_ticks(pauses, monkeypatch):
    monkeypatch.setattr(liveness, "LOAD_STALLED_S", -1.0)
    bench = Bench(0.25, max_revivals=3)
    starting = asyncio.create_task(bench.link.start())
    with pytest.raises(ModelError, match="Nothing was done"):
        await asyncio.wait_for(starting, 60)
    assert bench.client.num_killed == 1
    await bench.link.stop()


@pytest.mark.parametrize(
    ("vitals", "trouble"),
    [
        (silent(2.9), None),
        (silent(3.1), "does not go on"),
        (step(9.9), None),
        (step(10.1), "no progress"),
        (Vitals(None, 10.0, None), None),
        (None, None),
    ],
    ids=str,
)
async def test_trouble_describes_a_silent_engine_or_a_hung_step(vitals, trouble):
    bench = Bench()
    await bench.start()
    bench.link._watching.cancel()
    bench.client.show([vitals, vitals])
    found = bench.link.trouble
    assert found is None if trouble is None else trouble in found
    assert bench.link.step_age_s == (None if vitals is None else vitals.step_age_s)
    await bench.link.stop()
