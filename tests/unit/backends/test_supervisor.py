"""Keeping a child up: readiness, deaths, restarts, the open circuit, and one that hangs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.backends.external import supervisor as supervisor_module
from engine.backends.external.child_logs import ChildLog
from engine.backends.external.supervisor import Patience, Supervisor
from engine.core.errors import ModelError, UnavailableError
from engine.ipc.child_process import RestartPolicy

QUICK = Patience(
    start_timeout_s=5.0,
    probe_interval_s=0.001,
    watch_interval_s=0.005,
    hang_after_s=0.05,
    circuit_open_s=0.05,
)


class FakeChild:
    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.is_stopped = False

    def note_processes(self) -> None:
        pass

    async def stop(self) -> None:
        self.is_stopped = True


class FakeEndpoint:
    """Ready as long as `answer` is None."""

    def __init__(self) -> None:
        self.answer: str | None = None
        self.refusal: Exception | None = None
        self.calls: list[str] = []

    async def problem(self) -> str | None:
        return self.answer

    async def up(self) -> None:
        self.calls.append("up")
        if self.refusal is not None:
            raise self.refusal

    async def down(self) -> None:
        self.calls.append("down")


class Stage:
    """A supervisor, and all children that it has begun."""

    def __init__(self, patience: Patience = QUICK, max_deaths: int = 5) -> None:
        self.children: list[FakeChild] = []
        self.endpoint = FakeEndpoint()
        self.log = ChildLog("toy")
        self.begin_error: OSError | None = None
        restarts = RestartPolicy(max_deaths=max_deaths, first_delay_s=0.001, max_delay_s=0.002)
        self.supervisor = Supervisor(
            "Toy", self._begin, self.endpoint, self.log, patience, restarts
        )

    async def _begin(self) -> FakeChild:
        if self.begin_error is not None:
            raise self.begin_error
        self.children.append(FakeChild())
        return self.children[-1]

    def die(self, status: int = 1) -> None:
        self.children[-1].ended.set_result(status)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_child_is_ready_when_its_probe_succeeds() -> None:
    stage = Stage()
    stage.endpoint.answer = "nothing listens yet"
    starting = asyncio.create_task(stage.supervisor.start())
    await until(lambda: bool(stage.children))
    stage.log.begin().data_received(b"INFO Loading layer 7\n")
    assert stage.supervisor.detail == "Toy is loading (0 s): Loading layer 7"
    assert not stage.supervisor.is_ready
    stage.endpoint.answer = None
    await starting
    assert stage.supervisor.is_ready and stage.supervisor.detail == "ready"
    await stage.supervisor.stop()
    assert stage.endpoint.calls == ["up", "down"]
    assert stage.children[0].is_stopped


async def test_a_child_that_exits_at_its_first_start_is_not_restarted() -> None:
    stage = Stage()
    stage.endpoint.answer = "nothing listens yet"
    starting = asyncio.create_task(stage.supervisor.start())
    await until(lambda: bool(stage.children))
    stage.log.begin().data_received(b"OSError: no such model\n")
    stage.die(2)
    with pytest.raises(
        ModelError, match="Toy ended while loading, with exit status 2: OSError: no"
    ):
        await starting
    assert stage.children[0].is_stopped
    assert len(stage.children) == 1


@pytest.mark.parametrize(
    ("answer", "told"), [("/health answers 503", "/health answers 503"), (None, "does not answer")]
)
async def test_a_first_start_that_times_out_is_stopped(answer: str | None, told: str) -> None:
    stage = Stage(Patience(start_timeout_s=0.05, probe_interval_s=0.001))
    stage.endpoint.answer = answer
    if answer is None:
        stage.endpoint.up = asyncio.Event().wait  # type: ignore[method-assign, assignment]
    with pytest.raises(ModelError, match=rf"not ready after 0.05 s \(start_timeout_s\): .*{told}"):
        await stage.supervisor.start()
    assert stage.children[0].is_stopped


async def test_an_error_of_the_endpoint_ends_the_start() -> None:
    stage = Stage()
    stage.endpoint.refusal = UnavailableError("it lacks chat")
    with pytest.raises(UnavailableError, match="it lacks chat"):
        await stage.supervisor.start()
    assert stage.children[0].is_stopped


async def test_a_cancelled_start_leaves_no_process() -> None:
    stage = Stage()
    stage.endpoint.answer = "loading"
    starting = asyncio.create_task(stage.supervisor.start())
    await until(lambda: bool(stage.children))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert stage.children[0].is_stopped


async def test_a_child_that_dies_is_restarted() -> None:
    stage = Stage()
    await stage.supervisor.start()
    stage.die(137)
    await until(lambda: len(stage.children) == 2 and stage.supervisor.is_ready)
    assert stage.children[0].is_stopped
    assert stage.supervisor.num_restarts == 1
    assert stage.endpoint.calls == ["up", "down", "up"]
    await stage.supervisor.stop()


async def test_a_restart_that_fails_is_tried_again() -> None:
    stage = Stage()
    await stage.supervisor.start()
    stage.begin_error = OSError("no memory")
    stage.die()
    await until(lambda: stage.supervisor.num_restarts == 2)
    assert "no memory" in stage.supervisor.detail
    stage.begin_error = None
    await until(lambda: stage.supervisor.is_ready)
    await stage.supervisor.stop()


async def test_too_many_deaths_open_the_circuit_breaker_and_one_retry_closes_it() -> None:
    stage = Stage(max_deaths=3)
    await stage.supervisor.start()
    for count in (2, 3):
        stage.die()
        await until(lambda count=count: len(stage.children) == count and stage.supervisor.is_ready)
    stage.die()
    await until(lambda: "died too often" in stage.supervisor.detail)
    assert len(stage.children) == 3
    await until(lambda: stage.supervisor.is_ready)
    assert len(stage.children) == 4
    await stage.supervisor.stop()


async def test_a_child_that_hangs_is_restarted() -> None:
    stage = Stage()
    await stage.supervisor.start()
    stage.endpoint.answer = "it does not answer in time"
    await until(lambda: stage.children[0].is_stopped)
    stage.endpoint.answer = None
    await until(lambda: stage.supervisor.is_ready)
    assert len(stage.children) == 2
    await stage.supervisor.stop()


async def test_stopping_during_the_restart_delay_starts_nothing() -> None:
    stage = Stage(max_deaths=1)
    await stage.supervisor.start()
    stage.die()
    await until(lambda: "died too often" in stage.supervisor.detail)
    await stage.supervisor.stop()
    await stage.supervisor.stop()
    assert stage.supervisor.detail == "Toy has been stopped."
    assert len(stage.children) == 1


def test_restart_delays_double_until_too_many_deaths() -> None:
    now = [100.0]
    policy = RestartPolicy(
        max_deaths=5, window_s=10, first_delay_s=1.0, max_delay_s=3.0, clock=lambda: now[0]
    )
    for expected in (1.0, 2.0, 3.0, 3.0):
        delay = policy.delay_after_death()
        assert delay is not None and 0.8 * expected <= delay <= 1.2 * expected
    assert policy.delay_after_death() is None
    now[0] += 11
    again = policy.delay_after_death()
    assert again is not None and again <= 1.2


async def test_a_child_that_answers_between_silent_probes_is_not_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stage = Stage(replace(QUICK, hang_after_s=10.0))
    child = FakeChild()
    answers = iter(["busy", None, "busy", None, "busy"])

    async def problem() -> str | None:
        now[0] += 7.0
        answer = next(answers, "ended")
        if answer == "ended":
            now[0] -= 7.0
            child.ended.set_result(0)
        return answer

    monkeypatch.setattr(stage.endpoint, "problem", problem)
    assert "no answer" not in await stage.supervisor._until_down(child)
