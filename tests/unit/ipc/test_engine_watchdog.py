"""A frozen process, a step that never ends, and one that is merely slow: told apart and mended."""

import asyncio
import os
import signal
import socket
import time
from types import SimpleNamespace

import msgspec
import pytest

from engine.core import faults
from engine.core.errors import ModelError
from engine.core.faults import Fault
from engine.core.sandbox import liveness
from engine.core.sandbox.liveness import (
    INTERRUPT_SIGNAL,
    StepInterruptedError,
    Watchdog,
)
from engine.frontend import engine_link as link_module
from engine.ipc.connection import ProcessClient
from tests.support.toy_engine.runner import CRASH_TOKEN, IMPATIENT_S
from tests.unit.ipc.test_engine_link import Inbox, ask, expected, make_link, request, until

pytestmark = pytest.mark.seconds  # each engine is a process, and has to seem to hang


@pytest.fixture
def hasty(monkeypatch):
    """The same order of events, sooner. A process ticks twice a second."""
    monkeypatch.setattr(liveness, "FROZEN_AFTER_S", 1.5)
    monkeypatch.setattr(liveness, "WAKE_AFTER_S", 2.0)
    monkeypatch.setattr(liveness, "GIVE_UP_AFTER_S", 3.0)
    monkeypatch.setattr(liveness, "RELAPSED_AFTER_S", 2.0)
    monkeypatch.setattr(link_module, "WATCH_INTERVAL_S", 0.2)


@pytest.fixture
def plan(monkeypatch):
    """Faults in the engine's process."""

    def plan(*planned: Fault) -> None:
        for name, value in faults.environment(*planned).items():
            monkeypatch.setenv(name, value)

    return plan


async def learn(link) -> None:
    """A prompt, so that the engine knows how long its steps take."""
    assert (await ask(link, 1)).tokens == expected(1)


def test_a_hung_step_is_interrupted_even_if_describing_the_loop_fails():
    vitals = SimpleNamespace(is_stalled=False)
    beats = SimpleNamespace(tick=lambda: None, vitals=lambda: vitals)
    before = signal.getsignal(INTERRUPT_SIGNAL)
    watchdog = Watchdog(beats, tick_s=0.01)
    try:
        watchdog.watch(SimpleNamespace(is_computing=True, describe=lambda: 1 / 0))
        with pytest.raises(StepInterruptedError):
            vitals.is_stalled = True
            time.sleep(60)
    finally:
        watchdog._tick_s = None  # its thread sleeps from now on
        signal.signal(INTERRUPT_SIGNAL, before)


async def test_an_idle_frozen_engine_is_detected_and_continues_after_sigcont(hasty):
    link = make_link()
    await link.start()
    os.kill(link.pid, signal.SIGSTOP)
    await until(lambda: link.trouble is not None)
    assert "stopped it" in link.trouble
    await until(lambda: link.trouble is None)  # the link has sent SIGCONT
    assert link.num_restarts == 0
    assert (await ask(link, 7)).tokens == expected(7)
    await link.stop()


@pytest.mark.slow
async def test_an_engine_frozen_during_a_step_loses_nothing_after_sigcont(hasty):
    link = make_link()
    await link.start()
    inbox = Inbox()
    link.submit(request(3, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)
    os.kill(link.pid, signal.SIGSTOP)
    await until(lambda: link.trouble is not None)
    await asyncio.wait_for(inbox.ended.wait(), 60)
    assert inbox.error is None and inbox.tokens == expected(3, 200)
    await link.stop()


@pytest.mark.slow
async def test_an_engine_that_stays_frozen_is_killed_and_its_request_continues(hasty, monkeypatch):
    monkeypatch.setattr(ProcessClient, "wake", lambda self: None)
    link = make_link(max_revivals=8)
    await link.start()
    inbox = Inbox()
    link.submit(request(1, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)
    os.kill(link.pid, signal.SIGSTOP)
    await asyncio.wait_for(inbox.ended.wait(), 30)
    assert inbox.error is None and inbox.tokens == expected(1, 200)
    assert link.num_restarts == 1 and link.trouble is None
    await link.stop()


async def test_an_engine_that_is_stopped_repeatedly_is_replaced(hasty):
    """Each time it is woken it ticks once, and its requests would wait for ever."""
    link = make_link(max_revivals=8)
    await link.start()
    inbox, pid = Inbox(), link.pid
    link.submit(request(1, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)

    async def keep_stopping() -> None:
        while link.pid == pid:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)

    stopping = asyncio.create_task(keep_stopping())
    await asyncio.wait_for(inbox.ended.wait(), 30)
    await stopping
    assert inbox.error is None and inbox.tokens == expected(1, 200)
    assert link.num_restarts == 1 and link.trouble is None
    await link.stop()


async def freeze_the_next_load(link, after_s: float) -> int:
    """Kill the engine, and stop the process that replaces it while that loads."""
    first = link.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: link.pid not in (None, first))
    await asyncio.sleep(after_s)
    os.kill(link.pid, signal.SIGSTOP)
    assert link.ready is None, "it had loaded"
    return link.pid


@pytest.mark.parametrize("after_s", [0.0, 0.2])
async def test_an_engine_frozen_while_loading_gets_sigcont(hasty, after_s):
    """Also before it has imported its modules, when it knows no signal."""
    link = make_link(max_revivals=8)
    await link.start()
    inbox = Inbox()
    link.submit(request(1, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)
    pid = await freeze_the_next_load(link, after_s)
    await until(lambda: "stopped it" in link.detail)
    await asyncio.wait_for(inbox.ended.wait(), 30)
    assert inbox.error is None and inbox.tokens == expected(1, 200)
    assert (link.pid, link.num_restarts) == (pid, 1)
    await link.stop()


async def test_an_engine_that_stays_frozen_while_loading_is_replaced(hasty, monkeypatch):
    monkeypatch.setattr(ProcessClient, "wake", lambda self: None)
    link = make_link(max_revivals=8)
    await link.start()
    inbox = Inbox()
    link.submit(request(1, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)
    pid = await freeze_the_next_load(link, 0.0)
    await asyncio.wait_for(inbox.ended.wait(), 30)
    assert inbox.error is None and inbox.tokens == expected(1, 200)
    assert link.pid != pid and link.num_restarts == 2
    await link.stop()


async def test_a_first_load_that_stays_frozen_ends_start_with_the_reason(hasty, monkeypatch):
    monkeypatch.setattr(ProcessClient, "wake", lambda self: None)
    link = make_link("slow")
    starting = asyncio.create_task(link.start())
    await until(lambda: link.pid is not None)
    os.kill(link.pid, signal.SIGSTOP)
    with pytest.raises(ModelError, match="stopped it"):
        await asyncio.wait_for(starting, 30)
    await link.stop()


async def test_an_engine_whose_frontend_does_not_read_waits_without_loss(monkeypatch, capfd):
    """As while the frontend is stopped. It is no step that hangs."""

    def socketpair() -> tuple[socket.socket, socket.socket]:
        pair = real()
        for each in pair:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return pair

    real = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", socketpair)
    link = make_link("impatient")
    await link.start()
    inboxes = [Inbox() for _ in range(8)]
    for number, inbox in enumerate(inboxes):
        link.submit(request(number, max_tokens=200), inbox)
    await until(lambda: inboxes[-1].tokens)
    link._client._connection.transport.pause_reading()
    await asyncio.sleep(4 * IMPATIENT_S)
    assert not any(inbox.ended.is_set() for inbox in inboxes)
    link._client._connection.transport.resume_reading()
    for number, inbox in enumerate(inboxes):
        await asyncio.wait_for(inbox.ended.wait(), 60)
        assert inbox.error is None and inbox.tokens == expected(number, 200)
    assert link.num_restarts == 0 and "does not end" not in capfd.readouterr().err
    await link.stop()


async def test_a_device_wait_that_never_ends_is_interrupted_and_repeated(plan, capfd):
    plan(Fault("forward", "sleep", at=8, seconds=60.0))
    link = make_link("impatient")
    await link.start()
    inboxes = await asyncio.gather(*(ask(link, n, 30) for n in range(4)))
    assert [inbox.tokens for inbox in inboxes] == [expected(n, 30) for n in range(4)]
    assert link.num_restarts == 0
    written = capfd.readouterr().err
    assert "num_running" in written and "liveness.py" in written, "stacks and state in the log"
    await link.stop()


async def test_a_request_that_always_hangs_fails_alone(plan):
    unused = min(set(range(3, 20)) - set(expected(2, 10)))
    plan(Fault("forward", "sleep", times=1 << 30, seconds=60.0, within=unused))
    link = make_link("impatient")
    await link.start()
    assert (await ask(link, 2, 10)).tokens == expected(2, 10)
    poison, innocent = Inbox(), Inbox()
    link.submit(request(unused), poison)  # the last token of its prompt
    link.submit(request(22, 10), innocent)  # the same prompt
    await asyncio.wait_for(asyncio.gather(poison.ended.wait(), innocent.ended.wait()), 60)
    assert (poison.tokens, innocent.tokens) == ([], expected(2, 10))
    assert link.num_restarts == 0
    await link.stop()


@pytest.mark.slow
async def test_a_hanging_kernel_is_ended_by_killing_the_process(monkeypatch):
    link = make_link("stuck")
    await link.start()
    await learn(link)
    inbox = Inbox()
    link.submit(msgspec.structs.replace(request(2), prompt=(1, CRASH_TOKEN)), inbox)
    await until(lambda: link.trouble is not None)
    assert "no progress" in link.trouble
    await asyncio.wait_for(inbox.ended.wait(), 60)
    assert inbox.error is not None and inbox.error.status == 503
    await until(lambda: link.ready is not None)
    assert (await ask(link, 7)).tokens == expected(7)
    await link.stop()


async def test_a_slow_step_raises_no_alarm(hasty, plan):
    """Longer than a frozen process may be silent, shorter than what can't be honest."""
    plan(Fault("forward", "sleep", at=6, seconds=2.5))
    link = make_link()
    await link.start()
    asking = asyncio.create_task(ask(link, 5, 30))
    troubles = set()
    while not asking.done():
        troubles.add(link.trouble)
        await asyncio.sleep(0.05)
    assert troubles == {None} and asking.result().tokens == expected(5, 30)
    assert link.num_restarts == 0
    await link.stop()
