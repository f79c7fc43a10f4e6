"""An engine in a process of its own: killed, restarted, refused, stopped, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import msgspec
import psutil
import pytest

from engine.cli.ops import top
from engine.core.errors import EngineError, ModelError, ResourceError, UnavailableError
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.frontend import engine_link
from engine.frontend.engine_link import EngineLink
from engine.ipc.child_process import RestartPolicy
from engine.ipc.connection import InlineClient, ProcessClient
from engine.ipc.engine_process import EngineProcess
from engine.ipc.options import EngineOptions
from tests.support.toy_engine.alone import generate_alone
from tests.support.toy_engine.runner import CRASH_TOKEN

pytestmark = pytest.mark.seconds  # each engine is a process

WORKER = "tests.support.toy_engine.worker"


class Inbox:
    """Collects one request's deltas."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = asyncio.Event()
        self.error: EngineError | None = None

    def deliver(self, *items) -> None:
        for item in items:
            if isinstance(item, EngineError):
                self.error = item
            else:
                self.tokens.extend(item.token_ids)
                if item.finish_reason is None:
                    continue
            self.ended.set()


def make_link(
    model_path: str = "toy", restarts: RestartPolicy | None = None, **limits: float
) -> EngineLink:
    options = EngineOptions(model_path=model_path, framework="toy")

    def client(on_message, on_exit):
        return ProcessClient(WORKER, options, on_message, on_exit)

    return EngineLink(client, restarts or RestartPolicy(first_delay_s=0.01), **limits)


def request(number: int, max_tokens: int = 12) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1)
    return GenerateRequest(request_id=f"r{number}", prompt=(1, 2, number % 20), params=params)


async def ask(link: EngineLink, number: int, max_tokens: int = 12) -> Inbox:
    inbox = Inbox()
    link.submit(request(number, max_tokens), inbox)
    await asyncio.wait_for(inbox.ended.wait(), 60)
    return inbox


def expected(number: int, max_tokens: int = 12) -> list[int]:
    asked = request(number, max_tokens)
    return generate_alone(asked.prompt, asked.params, 0, frozenset(), 256)[0]


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_answers_equal_the_oracle_through_a_process():
    link = make_link()
    ready = await link.start()
    assert ready.max_seq_len == 256 and link.pid not in (None, os.getpid())
    inboxes = await asyncio.gather(*(ask(link, n) for n in range(10)))
    assert [inbox.tokens for inbox in inboxes] == [expected(n) for n in range(10)]
    await until(lambda: link.stats is not None and link.stats.num_running == 0)
    assert link.stats.generated_tokens == 120
    await link.stop()


async def test_killing_the_engine_ends_its_requests_and_the_next_engine_works():
    link = make_link()
    await link.start()
    first_pid = link.pid
    inboxes = [Inbox() for _ in range(6)]
    for number, inbox in enumerate(inboxes):
        link.submit(request(number, max_tokens=200), inbox)
    await until(lambda: all(inbox.tokens for inbox in inboxes))
    os.kill(first_pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.gather(*(i.ended.wait() for i in inboxes)), 30)
    assert all(isinstance(inbox.error, UnavailableError) for inbox in inboxes)
    with pytest.raises(UnavailableError):
        link.submit(request(99), Inbox())
    await until(lambda: link.ready is not None)
    assert (link.num_restarts, link.pid != first_pid) == (1, True)
    assert (await ask(link, 7)).tokens == expected(7)
    await link.stop()


async def test_a_lost_device_ends_open_requests_and_restarts_the_engine():
    link = make_link("fragile")
    await link.start()
    inbox, poison = Inbox(), Inbox()
    link.submit(request(1, max_tokens=200), inbox)
    await until(lambda: inbox.tokens)
    link.submit(msgspec.structs.replace(request(2), prompt=(1, CRASH_TOKEN)), poison)
    await asyncio.wait_for(asyncio.gather(inbox.ended.wait(), poison.ended.wait()), 30)
    await until(lambda: link.ready is not None and link.num_restarts == 1)
    assert (await ask(link, 7)).tokens == expected(7)
    await link.stop()


async def test_stopping_while_the_engine_loads_ends_start_with_an_error(monkeypatch):
    monkeypatch.setattr("engine.ipc.connection.STOP_GRACE_S", 0.1)
    link = make_link("slow")
    starting = asyncio.create_task(link.start())
    await until(lambda: link.pid is not None)
    await link.stop()
    with pytest.raises(EngineError):
        await asyncio.wait_for(starting, 30)
    await link.stop()
    assert "stopped" in link.detail


async def test_the_log_level_reaches_the_engine_process():
    link = make_link()
    await link.start()
    before = (await link.set_log_level("error")).message
    assert before == "warning" and (await link.set_log_level(before)).message == "error"
    await link.stop()


async def test_an_unanswered_control_message_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(engine_link, "CONTROL_TIMEOUT_S", 0.05)
    link = make_link()
    await link.start()
    child = psutil.Process(link.pid)
    child.suspend()
    with pytest.raises(UnavailableError):
        await link.flush_cache()
    # A snapshot has a limit of its own, so that `engine top` gets an answer in its time.
    assert engine_link.SNAPSHOT_TIMEOUT_S < top.TIMEOUT_S
    monkeypatch.setattr(engine_link, "CONTROL_TIMEOUT_S", 60.0)
    monkeypatch.setattr(engine_link, "SNAPSHOT_TIMEOUT_S", 0.05)
    with pytest.raises(UnavailableError):
        await link.snapshot()
    assert not link._replies
    child.resume()
    await link.stop()


async def test_an_engine_that_dies_too_often_stays_down_for_the_cool_down():
    link = make_link(restarts=RestartPolicy(max_deaths=2, first_delay_s=0.01), cool_down_s=1.0)
    await link.start()
    os.kill(link.pid, signal.SIGKILL)
    await until(lambda: link.num_restarts == 1 and link.ready is not None)
    os.kill(link.pid, signal.SIGKILL)
    await until(lambda: "too often" in link.detail)
    with pytest.raises(UnavailableError, match="too often"):
        link.submit(request(1), Inbox())
    await until(lambda: link.ready is not None)
    assert (await ask(link, 7)).tokens == expected(7)
    await link.stop()


async def test_the_reason_for_a_failed_load_is_raised_without_internal_details():
    with pytest.raises(ResourceError, match="it does not fit"):
        await make_link("unloadable").start()
    with pytest.raises(EngineError) as caught:
        await make_link("broken").start()
    assert "secret detail" not in caught.value.message


async def test_an_engine_process_that_dies_silently_is_a_model_error():
    options = EngineOptions(model_path="x", framework="x")
    link = EngineLink(
        lambda on_message, on_exit: ProcessClient("tests.no_such", options, on_message, on_exit),
        RestartPolicy(),
    )
    with pytest.raises(ModelError):
        await link.start()


async def test_stop_leaves_no_child_and_ends_open_requests():
    link = make_link()
    await link.start()
    child, inbox = psutil.Process(link.pid), Inbox()
    link.submit(request(1, max_tokens=200), inbox)
    await link.stop()
    await asyncio.wait_for(inbox.ended.wait(), 30)
    assert isinstance(inbox.error, UnavailableError)
    assert not child.is_running()


async def test_aborted_requests_free_their_blocks():
    link = make_link()
    await link.start()
    for number in range(5):
        link.submit(request(number, max_tokens=200), Inbox())
        link.forget(f"r{number}", None)
    await until(lambda: link.stats and link.stats.num_running == link.stats.num_waiting == 0)
    reply = await link.flush_cache()
    assert reply.ok
    await until(lambda: link.stats.num_free_blocks == link.stats.num_blocks)
    await link.stop()


async def test_an_engine_link_works_with_an_engine_in_a_thread():
    options = EngineOptions(model_path="toy", framework="toy")
    link = EngineLink(
        lambda on_message, on_exit: InlineClient(WORKER, options, on_message), RestartPolicy()
    )
    await link.start()
    assert (await ask(link, 3)).tokens == expected(3)
    assert link.trouble is None
    await link.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_the_child_does_not_outlive_a_killed_parent():
    script = textwrap.dedent("""
        import asyncio
        from tests.unit.ipc.test_engine_link import make_link

        async def main():
            link = make_link()
            await link.start()
            print(link.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_restart_backoff_grows_is_capped_and_gives_up():
    now = [0.0]
    policy = RestartPolicy(max_deaths=4, window_s=10, max_delay_s=0.3, clock=lambda: now[0])
    delays = [policy.delay_after_death() for _ in range(3)]
    assert delays[0] < delays[1] <= 0.3 * 1.2
    assert policy.delay_after_death() is None
    now[0] = 100.0
    assert policy.delay_after_death() is not None


async def test_a_process_started_ahead_becomes_the_engine(monkeypatch):
    options = EngineOptions(model_path="toy", framework="toy")
    process = EngineProcess(WORKER)
    send, sent = process._send, []
    monkeypatch.setattr(process, "_send", lambda message: (sent.append(message), send(message)))
    process.begin(options)
    link = EngineLink(
        lambda on_message, on_exit: ProcessClient(WORKER, options, on_message, on_exit, process),
        RestartPolicy(),
    )
    await asyncio.wait_for(link.start(), 60)
    assert link.pid == process.process.pid
    assert sent == [options], "an engine that has its options can't read them again"
    assert (await ask(link, 1)).tokens == expected(1)
    await link.stop()


def test_an_unused_engine_process_can_be_discarded():
    process = EngineProcess(WORKER)
    process.discard()
    assert process.process.poll() is not None
    process.begin(EngineOptions(model_path="toy", framework="toy"))  # too late, and no error
    process.discard()
