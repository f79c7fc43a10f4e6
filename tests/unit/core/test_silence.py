"""A silent process is frozen, busy, or starved by its machine: told apart."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.core.grammar.checker import answer_of
from engine.core.sandbox import liveness
from engine.core.sandbox.liveness import Activity, Headway, Silence, activity_of


class Watched:
    """A process that does what the test says, under a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.activity: Activity | None = Activity(0.0)
        monkeypatch.setattr(liveness.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(liveness, "activity_of", lambda pid: self.activity)
        monkeypatch.setattr(liveness, "_family", lambda pid: [pid])
        self.silence = Silence(1)
        self._silent_s = 0.0

    def wait(self, seconds: float, *, cpu_s: float = 0.0, loading: bool = False, **state) -> float:
        """Pass time, in which the process uses `cpu_s` of a processor. Returns what counts."""
        counted = 0.0
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self._silent_s += 0.5
            used = self.activity.cpu_s if self.activity else 0.0
            self.activity = Activity(used + cpu_s / seconds / 2, **state)
            counted = self.silence.counted(self._silent_s, loading)
        return counted

    def tick(self) -> None:
        self._silent_s = 0.0


@pytest.fixture
def watched(monkeypatch) -> Watched:
    return Watched(monkeypatch)


def test_a_stopped_process_is_silent_all_the_time(watched):
    assert watched.wait(7, is_stopped=True) == 7
    assert "stopped" in watched.silence.cause


def test_a_silence_that_the_watcher_slept_through_counts_little(watched):
    """Both were paused, as by a suspended machine, and the watcher goes on first."""
    watched.now += 600
    assert watched.silence.counted(600) <= 2
    assert watched.silence.counted(600.2) <= 2.5
    watched.now += 8
    assert watched.silence.counted(608) <= 3.5


def test_a_sleeping_process_is_silent_unless_it_loads(watched):
    assert watched.wait(7) == 7 and "sleeps" in watched.silence.cause
    watched.tick()
    assert watched.wait(60, loading=True) == 0
    assert watched.wait(7, loading=True) == 7


def test_a_stopped_process_is_silent_even_if_it_loads(watched):
    assert watched.wait(7, loading=True, is_stopped=True) == 7


def test_a_process_starved_of_cpu_is_never_silent(watched):
    """It is ready to run for ten minutes, and gets a hundredth of a processor."""
    assert watched.wait(600, cpu_s=6, wants_processor=True) == 0
    assert "starved" in watched.silence.cause


def test_a_process_that_is_stopped_and_continued_repeatedly_is_alive(watched):
    """It runs for a tenth of the time, and is always seen stopped."""
    assert watched.wait(60, cpu_s=6, is_stopped=True) < 2


def test_a_computing_process_may_be_silent_for_a_while(watched):
    assert watched.wait(20, cpu_s=20, wants_processor=True) == 0
    assert watched.wait(10, cpu_s=10, wants_processor=True) > 7
    assert "computed" in watched.silence.cause


def test_many_threads_count_no_more_cpu_time_than_wall_time(watched):
    assert watched.wait(20, cpu_s=320, wants_processor=True) == 0


def test_a_thread_that_polls_a_lock_does_not_count_as_work(watched):
    assert watched.wait(8, cpu_s=0.04) > 7


def test_a_sign_of_life_ends_the_silence(watched):
    assert watched.wait(6, is_stopped=True) == 6
    watched.tick()
    assert watched.wait(0.5, is_stopped=True) == 0.5
    assert watched.wait(2, is_stopped=True) == 2.5


def test_time_in_which_the_watcher_was_delayed_does_not_count(watched):
    assert watched.wait(2, is_stopped=True) == 2
    watched.now += 300
    watched._silent_s += 300
    assert watched.silence.counted(watched._silent_s) == 3


def test_a_process_that_has_ended_is_not_counted_as_frozen(watched):
    watched.activity = None
    assert watched.silence.counted(9.0) == 0


def test_loading_progress_is_seen_by_cpu_or_disk_activity(watched):
    headway = Headway(1)
    for state in ({"awaits_disk": True}, {"wants_processor": True}):
        watched.now += 6
        watched.activity = Activity(0.0, **state)
        assert headway.look() == 6 and headway.idle_s == 0
    watched.activity = Activity(0.01)  # a thread that ticks
    for passed in (6, 12):
        watched.now += 6
        assert headway.look() == 0 and headway.idle_s == passed
    watched.now += 6
    watched.activity = Activity(0.5)
    assert headway.look() == 6 and headway.idle_s == 0


@contextmanager
def running(program: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


SLEEPS = "import time; print(flush=True); time.sleep(60)"
SPINS_BESIDE = (
    "import threading, time; print(flush=True)\n"
    "def spin():\n    while True: pass\n"
    "threading.Thread(target=spin, daemon=True).start(); time.sleep(60)"
)


def test_process_activity_is_read_from_proc():
    with running(SLEEPS) as pid:
        until(lambda: not activity_of(pid).wants_processor)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: activity_of(pid).is_stopped)
    assert activity_of(pid) is None
    with running(SPINS_BESIDE) as pid:
        until(lambda: activity_of(pid).wants_processor and activity_of(pid).cpu_s > 0.1)


async def test_an_answer_is_awaited_until_its_process_is_frozen():
    async def answer() -> int:
        return 7

    async def never() -> int:
        await asyncio.sleep(3600)
        return 0

    with running(SLEEPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        assert await answer_of(answer(), pid, 0.0) == 7
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer_of(never(), pid, 1.0), 60)
