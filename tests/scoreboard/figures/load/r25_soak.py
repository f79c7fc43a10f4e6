"""Fifteen minutes of everything at once, after two minutes of warm-up: short and long requests,
clients that disconnect, invalid requests, and an engine that is killed.

Open files, threads and tasks must not grow; they are counted when all work has ended. Memory is
judged by the slope of a fitted line. The engine is killed only in the first third. Its slope is
that of the last process, from two minutes after its start, because a new process touches its memory
for the first time. The server's slope covers the whole soak. Latency is that of small requests in
the two halves of the soak, without those that a killed engine affected.
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field

import psutil

from benchmarks.prompts import words
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.loads.http import judge_all, post, send
from tests.scoreboard.loads.observed import Looks, observed_engine
from tests.scoreboard.meters import MEBIBYTE, slope_per_minute
from tests.scoreboard.served_engine import Served, percentile
from tests.scoreboard.streams import CHAT, COMPLETIONS, MODEL, Reply, completion, request_bytes

WARM_UP_S = 120.0
SOAK_S = 900.0
KILLS = (0.1, 0.2, 0.3)  # as fractions of the soak
SETTLED_S = 120.0  # age from which an engine's memory is representative
AFTER_KILL_S = 20.0
SAMPLE_EVERY_S = 2.0
NUM_SMALL = 4
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Holdings:
    """What the server and its engine have open while idle."""

    files: int
    threads: int
    tasks: int

    def grown_since(self, earlier: "Holdings") -> dict[str, int]:
        return {
            "files": self.files - earlier.files,
            "threads": self.threads - earlier.threads,
            "tasks": self.tasks - earlier.tasks,
        }


@dataclass
class Soak:
    """What was observed. Times are of the monotonic clock."""

    replies: list[Reply] = field(default_factory=list)  # of clients that do not disconnect
    small: list[Reply] = field(default_factory=list)  # those of them whose latency counts
    kills: list[float] = field(default_factory=list)
    server_rss: list[tuple[float, float]] = field(default_factory=list)
    engine_rss: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # by pid
    num_left: int = 0


@figure(
    "R25",
    "a soak of 15 minutes in mixed trouble",
    minutes=18,
    limits={
        "rss_slope_mib_per_min": at_most(1),
        "file_thread_task_drift": at_most(0),
        "p99_drift": at_most(0.1),
        "malformed": at_most(0),
    },
    in_quick=False,
)
def soak(run: Run) -> Values:
    with observed_engine("--log-level", "error") as (served, looks):
        return asyncio.run(_measure(run, served, looks))


async def _measure(run: Run, served: Served, looks: Looks) -> Values:
    await _strain(run, served, WARM_UP_S, "warm-up")
    before = await _holdings(served, looks)
    seen = await _strain(run, served, SOAK_S, "soak")
    drift = (await _holdings(served, looks)).grown_since(before)
    run.cases = len(seen.replies) + seen.num_left
    run.failures += [f"{each.status} {each.problem}" for each in seen.replies if each.problem]
    last_life = list(seen.engine_rss.values())[-1]
    settled = [(at, rss) for at, rss in last_life if at > last_life[0][0] + SETTLED_S]
    slopes = (slope_per_minute(seen.server_rss), slope_per_minute(settled))
    halves = _halves(seen)
    run.notes |= {
        "drift": drift,
        "server_slope": round(slopes[0], 3),
        "engine_slope": round(slopes[1], 3),
        "p99_ms": [round(percentile(half, 0.99) * 1e3) for half in halves],
        "kills": len(seen.kills),
        "left_early": seen.num_left,
        "failed_in_good_form": sum(each.error is not None for each in seen.replies),
    }
    return {
        "rss_slope_mib_per_min": sum(slopes),
        "file_thread_task_drift": max(drift.values()),
        "p99_drift": percentile(halves[1], 0.99) / percentile(halves[0], 0.99) - 1,
        "malformed": len(run.failures),
    }


def _halves(seen: Soak) -> tuple[list[float], list[float]]:
    """Latencies of small requests, in each half."""
    middle = (seen.server_rss[0][0] + seen.server_rss[-1][0]) / 2
    calm = [
        reply
        for reply in seen.small
        if reply.is_whole
        and not any(reply.began - AFTER_KILL_S < kill < reply.ended for kill in seen.kills)
    ]
    return (
        [reply.seconds for reply in calm if reply.ended < middle],
        [reply.seconds for reply in calm if reply.ended >= middle],
    )


async def _holdings(served: Served, looks: Looks) -> Holdings:
    await asyncio.to_thread(served.wait_until_idle, PATIENCE_S)
    await asyncio.sleep(2.0)
    processes = served.processes()
    look = looks.between(time.monotonic() - 2.0, time.monotonic())[-1]
    return Holdings(
        sum(each.num_fds() for each in processes),
        sum(each.num_threads() for each in processes),
        look.num_tasks,
    )


async def _strain(run: Run, served: Served, seconds: float, name: str) -> Soak:
    seen = Soak()
    until = time.monotonic() + seconds
    workers = [_small(served, seen, until, run.random(name, n)) for n in range(NUM_SMALL)]
    workers += [
        _long(served, seen, until, run.random(name, "long")),
        _wrong(served, seen, until, run.random(name, "wrong")),
        _leaving(served, seen, until, run.random(name, "leaving")),
        _sampling(served, seen, until),
        _killing(served, seen, [seconds * part for part in KILLS]),
    ]
    await asyncio.gather(*workers)
    return seen


async def _small(served: Served, seen: Soak, until: float, chooser: random.Random) -> None:
    while time.monotonic() < until:
        prompt = words(chooser.randint(4, 24), chooser.random())
        body = completion(prompt, max_tokens=16, stream=chooser.random() < 0.5)
        reply = await post(served, body)
        judge_all([reply])
        reply.body = b""
        seen.replies.append(reply)
        seen.small.append(reply)
        await asyncio.sleep(chooser.uniform(0.0, 0.2))


async def _long(served: Served, seen: Soak, until: float, chooser: random.Random) -> None:
    while time.monotonic() < until:
        prompt = words(600, chooser.random())
        content = {"messages": [{"role": "user", "content": prompt}], "model": MODEL}
        reply = await post(served, content | {"max_tokens": 48, "stream": True}, CHAT)
        judge_all([reply])
        reply.body = b""
        seen.replies.append(reply)
        await asyncio.sleep(chooser.uniform(0.5, 1.5))


async def _wrong(served: Served, seen: Soak, until: float, chooser: random.Random) -> None:
    """Send invalid requests: bad values, an unknown model, an oversized prompt, invalid JSON."""
    bodies = (
        completion("x", temperature=-1),
        completion("x", model="nobody"),
        completion("x" * 200_000),
        completion("x", n=10**6),
    )
    broken = request_bytes(COMPLETIONS, completion("x")).replace(b'"prompt"', b"{prompt}")
    while time.monotonic() < until:
        choice = chooser.randrange(len(bodies) + 1)
        raw = broken if choice == len(bodies) else request_bytes(COMPLETIONS, bodies[choice])
        reply = await send(served, raw)
        judge_all([reply])
        if reply.problem is None and reply.error is None:
            reply.problem = "what is wrong was answered"
        seen.replies.append(reply)
        await asyncio.sleep(chooser.uniform(0.1, 0.4))


async def _leaving(served: Served, seen: Soak, until: float, chooser: random.Random) -> None:
    """Clients that disconnect at random moments, cleanly or not."""
    while time.monotonic() < until:
        raw = request_bytes(COMPLETIONS, completion(words(40, chooser.random()), max_tokens=200))
        _, writer = await asyncio.open_connection(*served.address)
        writer.write(raw)
        await asyncio.sleep(chooser.choice((0.0, 0.02, 0.2, 0.6)))
        writer.transport.abort() if chooser.random() < 0.5 else writer.close()
        seen.num_left += 1
        await asyncio.sleep(chooser.uniform(0.1, 0.5))


async def _sampling(served: Served, seen: Soak, until: float) -> None:
    server = psutil.Process(served.process.pid)
    while time.monotonic() < until:
        now = time.monotonic()
        seen.server_rss.append((now, server.memory_info().rss / MEBIBYTE))
        for engine in server.children():
            try:
                rss = engine.memory_info().rss / MEBIBYTE
            except psutil.NoSuchProcess:
                continue
            seen.engine_rss.setdefault(engine.pid, []).append((now, rss))
        await asyncio.sleep(SAMPLE_EVERY_S)


async def _killing(served: Served, seen: Soak, after_s: list[float]) -> None:
    began = time.monotonic()
    for moment in after_s:
        await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
        await asyncio.to_thread(served.wait_until, lambda: served.health() == 200, PATIENCE_S)
        seen.kills.append(time.monotonic())
        os.kill(served.engine_pid(), signal.SIGKILL)
