"""R28: an engine is frozen while it loads, and an engine gets a tenth of a processor.

The engine process is killed under load, and the process that replaces it is stopped at a random
moment of its load. Every second one is stopped again whenever it is woken, until it is killed.
Requests continue, and the server is unhealthy for no longer than two restarts take and a frozen
engine may. If every load is frozen, `/livez` says so. A starved engine, whose first grammar comes
then, is not taken for a frozen one.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil

from engine.core.sandbox.liveness import MIN_DOWN_S
from engine.ipc.engine_process import WORKER_MODULE
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, seconds_until, served_engine
from tests.scoreboard.starving import starved
from tests.scoreboard.streams import CHAT, Reply, all_begun, ask, completion

NUM_FREEZES, EACH_SERVER, NUM_STREAMS = 20, 2, 8
RECOVERED_S = 15.0  # a frozen engine may take this long, as in R14
BACK_WITHIN_S = 300.0
PATIENCE_S = 600.0
NUM_STARVED = 6
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}}


def loading_pid(served: Served, before: int) -> int:
    """The process that replaces an engine, as soon as there is one."""
    while True:
        with contextlib.suppress(psutil.Error, ValueError):
            if (pid := served.engine_pid()) != before:
                return pid
        time.sleep(0.005)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def restart_s(served: Served) -> float:
    """How long a restart takes that nothing disturbs."""
    os.kill(served.engine_pid(), signal.SIGKILL)
    seconds_until(lambda: served.health() != 200, BACK_WITHIN_S)
    return seconds_until(lambda: served.health() == 200, BACK_WITHIN_S)


def freeze_load(served: Served, after_s: float, *, is_kept: bool) -> float:
    """Kill the engine, and freeze the next one while it loads. Returns the seconds until the server
    was healthy again.
    """
    pid = served.engine_pid()
    os.kill(pid, signal.SIGKILL)
    struck_at = time.monotonic()
    frozen = loading_pid(served, pid)
    time.sleep(after_s)
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        os.kill(frozen, signal.SIGSTOP)
        while is_kept and psutil.Process(frozen).status() != psutil.STATUS_ZOMBIE:
            os.kill(frozen, signal.SIGSTOP)
            time.sleep(0.1)
    seconds_until(lambda: served.health() == 200, BACK_WITHIN_S)
    return time.monotonic() - struck_at


async def under_load(run: Run, served: Served, after_s: float, is_kept: bool) -> float:
    replies = [Reply() for _ in range(NUM_STREAMS)]
    bodies = [completion(f"{n}. A story:", max_tokens=200, stream=True) for n in range(NUM_STREAMS)]
    asking = [
        asyncio.create_task(ask(served, body, reply=reply, patience_s=PATIENCE_S))
        for body, reply in zip(bodies, replies, strict=True)
    ]
    await all_begun(replies)
    seconds = await asyncio.to_thread(freeze_load, served, after_s, is_kept=is_kept)
    for reply in await asyncio.gather(*asking):
        if not reply.is_whole:
            run.fail(f"a load frozen after {after_s:.2f} s: {reply.problem or reply.error}")
    run.cases += 1
    return seconds


def frozen_loads(run: Run) -> tuple[float, int]:
    """The most seconds for which a server was unhealthy beyond what it may, and how often it was
    not alive meanwhile.
    """
    beyond, num_dead, moments = [], 0, run.random("moments")
    for first in range(0, run.share(NUM_FREEZES, 2), EACH_SERVER):
        with served_engine() as served:
            alone_s = restart_s(served)
            for number in range(first, first + EACH_SERVER):
                is_kept = number % 2 == 1
                after_s = moments.uniform(0, alone_s)
                took_s = asyncio.run(under_load(run, served, after_s, is_kept))
                beyond.append(took_s - 2 * alone_s - RECOVERED_S)
                num_dead += served.get("/livez").status_code != 200
    return max(beyond), num_dead


@contextlib.contextmanager
def every_load_frozen(served: Served) -> Iterator[None]:
    done = threading.Event()

    def freeze() -> None:
        server = psutil.Process(served.process.pid)
        while not done.wait(0.05):
            for child in server.children():
                with contextlib.suppress(psutil.Error):
                    if WORKER_MODULE in child.cmdline():
                        child.suspend()

    thread = threading.Thread(target=freeze)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def overdue(run: Run) -> float:
    """Seconds beyond the bound until a server said that it can't restart its engine."""
    with served_engine() as served:
        kill(served.engine_pid())
        with every_load_frozen(served):
            told_s = seconds_until(lambda: served.get("/livez").status_code == 503, BACK_WITHIN_S)
        back_s = seconds_until(lambda: served.health() == 200, BACK_WITHIN_S)
        if back_s == float("inf") or served.get("/livez").status_code != 200:
            run.fail("the server is not alive again, although its engine could be restarted")
        run.notes["not_alive_after_s"] = round(told_s, 1)
        run.cases += 1
    return told_s - MIN_DOWN_S


async def ask_starved(run: Run, served: Served) -> None:
    message = {"role": "user", "content": "A number?"}
    body = completion("", max_tokens=16) | {"messages": [message], "response_format": GRAMMAR}
    del body["prompt"]
    asked = [ask(served, body, CHAT, patience_s=PATIENCE_S)]
    for number in range(NUM_STARVED):
        plain = completion(f"{number}. A story:", max_tokens=8, stream=True)
        asked.append(ask(served, plain, patience_s=PATIENCE_S))
    for reply in await asyncio.gather(*asked):
        run.cases += 1
        if not reply.is_whole:
            run.fail(f"a starved engine: {reply.problem or reply.error}")


def starved_engine(run: Run) -> int:
    """How often a starved engine was taken for a frozen one."""
    with served_engine() as served:
        engine = served.engine_pid()
        with starved([served.process.pid, engine]) as how:
            run.notes["starved_by"] = how
            asyncio.run(ask_starved(run, served))
        alarms = [line for line in served.log if "silent; waking" in line]
        return int(served.samples()["engine_restarts_total"]) + len(alarms)


@figure(
    "R28",
    "a frozen load: SIGSTOP at any moment of a restart, twenty times; every load frozen; a tenth of"
    " a processor",
    minutes=10,
    limits={
        "requests_lost": at_most(0),
        "unhealthy_over_allowed_s": at_most(0),
        "alive_over_allowed_s": at_most(10),
        "not_alive_too_soon": at_most(0),
        "starved_alarms": at_most(0),
    },
)
def frozen_load(run: Run) -> Values:
    alarms = starved_engine(run)
    beyond_s, num_dead = frozen_loads(run)
    late_s = overdue(run) if not run.quick else 0.0
    return {
        "requests_lost": len(run.failures),
        "unhealthy_over_allowed_s": beyond_s,
        "alive_over_allowed_s": late_s,
        "not_alive_too_soon": num_dead,
        "starved_alarms": alarms,
    }
