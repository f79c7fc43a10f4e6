"""The frontend's hold on an engine that does exactly what the test says: no process, no waiting."""

import asyncio

import pytest

from engine.backends.custom.frontend import engine_link as link_module
from engine.backends.custom.frontend import survival
from engine.backends.custom.frontend.engine_link import EngineLink
from engine.backends.custom.ipc.heartbeat import Vitals
from engine.core.errors import (
    EngineError,
    InferenceError,
    RequestTimeoutError,
    ResourceError,
    UnavailableError,
)
from engine.core.interfaces.request import (
    Abort,
    Control,
    ControlReply,
    Deltas,
    EngineStats,
    Fatal,
    GenerateRequest,
    Ready,
    Resumed,
    SamplingParams,
    Stats,
    TokenDelta,
)

READY = Ready(256, 64, 16, 8, "float32", "cpu", 0.1)
HEALTHY = Vitals(step_age_s=None, patience_s=10.0, silent_s=0.1)


class ScriptedClient:
    """Sends nowhere, and shows the vitals that it was given, one for each look."""

    pid = 1

    def __init__(self, on_message, on_exit) -> None:
        self.on_message, self.on_exit = on_message, on_exit
        self.sent: list = []
        self.looks: list[Vitals | None] = []
        self.looked = asyncio.Event()  # all of them
        self.num_woken = self.num_killed = 0
        self.is_gone = self.is_stopped = self.is_started = False

    async def start(self) -> None:
        self.is_started = True

    def send(self, message) -> None:
        if self.is_gone:
            raise UnavailableError("gone")
        self.sent.append(message)

    def vitals(self) -> Vitals | None:
        if self.looks:
            return self.looks.pop(0)
        self.looked.set()
        return HEALTHY

    def show(self, looks: list[Vitals | None]) -> None:
        self.looks = list(looks)
        self.looked.clear()

    def wake(self) -> None:
        self.num_woken += 1

    async def kill(self) -> None:
        self.num_killed += 1

    async def stop(self) -> None:
        self.is_stopped = True


class Delays:
    """A restart policy that says what the test wants, and remembers what it was asked."""

    def __init__(self, *delays: float | None) -> None:
        self._delays = list(delays)

    def delay_after_death(self) -> float | None:
        return self._delays.pop(0)


class Receiver:
    def __init__(self) -> None:
        self.items: list = []

    def deliver(self, item) -> None:
        self.items.append(item)


class Bench:
    """A link, and every client that it made."""

    def __init__(
        self, *delays: float | None, cool_down_s: float = 60.0, max_revivals: int = 0
    ) -> None:
        self.clients: list[ScriptedClient] = []
        self.link = EngineLink(self._make, Delays(*delays), cool_down_s, max_revivals)

    def _make(self, on_message, on_exit) -> ScriptedClient:
        self.clients.append(ScriptedClient(on_message, on_exit))
        return self.clients[-1]

    @property
    def client(self) -> ScriptedClient:
        return self.clients[-1]

    async def start(self) -> None:
        starting = asyncio.create_task(self.link.start())
        await asyncio.sleep(0)
        self.client.on_message(READY)
        assert await starting == READY and self.client.is_started

    def submit(self, name: str = "r", **fields) -> Receiver:
        receiver = Receiver()
        fields = {"params": SamplingParams()} | fields
        self.link.submit(GenerateRequest(request_id=name, prompt=(1,), **fields), receiver)
        return receiver

    async def replace_engine(self) -> list[GenerateRequest]:
        """Let the engine die and a new one load. Returns the requests that the new one gets."""
        self.client.on_exit(-9)
        await settle()
        self.client.on_message(READY)
        return self.client.sent


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Every pause that is made, none of which lasts."""
    made: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(link_module.asyncio, "sleep", pause)
    return made


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_deltas_reach_the_request_that_they_belong_to():
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


async def test_a_request_that_could_not_be_sent_is_not_waited_for():
    bench = Bench()
    await bench.start()
    bench.client.is_gone = True
    with pytest.raises(UnavailableError):
        bench.submit()
    bench.client.is_gone = False
    bench.submit()  # its id is free
    await bench.link.stop()


async def test_forgetting_a_choice_keeps_the_others():
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


async def test_replies_are_matched_by_their_numbers():
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


async def test_a_death_ends_requests_and_controls_and_is_told_in_words(pauses):
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


async def test_dying_too_often_the_pause_is_the_cool_down(pauses):
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


async def test_a_process_that_can_not_be_made_is_tried_again(pauses, monkeypatch):
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


async def test_what_keeps_an_engine_from_loading_is_raised_by_start():
    bench = Bench()
    starting = asyncio.create_task(bench.link.start())
    await asyncio.sleep(0)
    bench.client.on_message(Fatal(ResourceError("x").error_code, "it does not fit"))
    with pytest.raises(ResourceError, match="it does not fit"):
        await starting
    await bench.link.stop()


async def test_what_ended_a_loaded_engine_is_for_its_log_and_not_for_clients():
    bench = Bench()
    await bench.start()
    receiver = bench.submit()
    bench.client.on_message(Fatal("INTERNAL_ERROR", "secret detail"))
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


async def test_a_death_while_stopping_starts_nothing(pauses):
    bench = Bench(0.25)
    await bench.start()
    receiver = bench.submit()
    await bench.link.stop()
    assert "shutting down" in receiver.items[0].message
    bench.client.on_exit(1)
    await settle()
    assert len(bench.clients) == 1


async def test_a_revived_request_has_its_tokens_its_seed_and_its_open_choices(pauses):
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


async def test_late_deltas_of_an_engine_that_was_given_up_are_dropped(pauses):
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    receiver, first = bench.submit(), bench.client
    first.on_message(Fatal("INTERNAL_ERROR", "secret detail"))
    first.on_message(Deltas((TokenDelta("r", 0, (5,)),)))
    await bench.replace_engine()
    first.on_message(Deltas((TokenDelta("r", 0, (6,)),)))
    bench.client.on_message(Deltas((TokenDelta("r", 0, (7,)),)))
    assert [item.token_ids for item in receiver.items] == [(7,)]
    await bench.link.stop()


async def test_a_request_is_revived_once_for_each_death(pauses):
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


async def test_suspects_are_tried_one_after_another_and_only_the_guilty_ends(pauses):
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


async def test_the_wait_for_a_new_engine_has_an_end(pauses, monkeypatch):
    monkeypatch.setattr(survival, "MAX_WAIT_S", 0.02)
    bench = Bench(0.1, max_revivals=8)
    await bench.start()
    receivers = [bench.submit("long"), bench.submit("short", timeout_s=0.01)]
    bench.client.on_exit(-9)
    async with asyncio.timeout(20):
        while not all(receiver.items for receiver in receivers):
            await settle()
    assert [type(r.items[0]) for r in receivers] == [UnavailableError, RequestTimeoutError]
    await settle()
    bench.client.on_message(READY)
    assert not bench.client.sent
    await bench.link.stop()


def silent(seconds: float) -> Vitals:
    return Vitals(None, 10.0, seconds)


def step(age_s: float, patience_s: float = 10.0) -> Vitals:
    return Vitals(age_s, patience_s, 0.1)


@pytest.mark.parametrize(
    ("looks", "num_woken", "num_killed"),
    [
        ([silent(4.9)] * 9, 0, 0),
        ([silent(5.1), silent(5.6), silent(6.1)], 1, 0),
        ([silent(5.1), HEALTHY, silent(5.1)], 2, 0),
        ([silent(7.9)] * 9, 1, 0),
        ([silent(8.1), HEALTHY, silent(8.1), HEALTHY], 2, 0),  # once may be our own fault
        ([silent(8.1), silent(8.6)], 1, 1),
        ([step(19.0)] * 9, 0, 0),
        ([step(21.0), step(21.5)], 0, 1),
        ([step(21.0, patience_s=30.0)] * 9, 0, 0),
        ([None, None], 0, 0),
    ],
    ids=range(10),
)
async def test_the_silent_are_woken_and_who_does_not_go_on_is_killed(
    looks, num_woken, num_killed, monkeypatch
):
    monkeypatch.setattr(link_module, "WATCH_INTERVAL_S", 0)
    bench = Bench()
    await bench.start()
    bench.client.show(looks)
    async with asyncio.timeout(20):
        while not (bench.client.looked.is_set() or bench.client.num_killed):
            await asyncio.sleep(0)
    assert (bench.client.num_woken, bench.client.num_killed) == (num_woken, num_killed)
    await bench.link.stop()


async def test_a_loading_engine_may_be_silent(monkeypatch):
    monkeypatch.setattr(link_module, "WATCH_INTERVAL_S", 0)
    bench = Bench()
    starting = asyncio.create_task(bench.link.start())
    await asyncio.sleep(0)
    bench.client.show([silent(100.0)] * 9)
    for _ in range(100):
        await asyncio.sleep(0)
    assert bench.client.looked.is_set(), "nobody looks any more"
    assert bench.client.num_woken == bench.client.num_killed == 0 and bench.link.trouble is None
    await bench.link.stop()
    with pytest.raises(EngineError):
        await starting


@pytest.mark.parametrize(
    ("vitals", "trouble"),
    [
        (silent(2.9), None),
        (silent(3.1), "does not run"),
        (step(9.9), None),
        (step(10.1), "no progress"),
        (Vitals(None, 10.0, None), None),
        (None, None),
    ],
    ids=str,
)
async def test_trouble_in_words(vitals, trouble):
    bench = Bench()
    await bench.start()
    bench.link._watching.cancel()
    bench.client.show([vitals, vitals])
    found = bench.link.trouble
    assert found is None if trouble is None else trouble in found
    assert bench.link.step_age_s == (None if vitals is None else vitals.step_age_s)
    await bench.link.stop()
