"""R14: the engine process is frozen. Probes report it, it recovers, and a busy engine raises no
alarm.

It is frozen while idle, and in the middle of streams, which then continue where they were.
"""

import asyncio
import os
import signal
import time

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, seconds_until, served_engine
from tests.scoreboard.streams import Reply, all_begun, ask, completion, look

NUM_ROUNDS, NUM_STREAMS = 2, 8
LOAD_S, NUM_CLIENTS = 600.0, 48
PROBE_INTERVAL_S = 0.1
GIVEN_UP_S = 60.0


async def freeze(run: Run, served: Served, *, busy: bool) -> tuple[float, float]:
    """Seconds until /health was 503, and until it was 200 again."""
    replies = [Reply() for _ in range(NUM_STREAMS if busy else 0)]
    bodies = [
        completion(f"{n}. A story:", max_tokens=200, stream=True) for n in range(len(replies))
    ]
    asking = [
        asyncio.create_task(ask(served, body, reply=reply))
        for body, reply in zip(bodies, replies, strict=True)
    ]
    await all_begun(replies)
    os.kill(served.engine_pid(), signal.SIGSTOP)
    told_s = await asyncio.to_thread(seconds_until, lambda: served.health() == 503, GIVEN_UP_S)
    well_s = told_s + await asyncio.to_thread(
        seconds_until, lambda: served.health() == 200, GIVEN_UP_S
    )
    for reply in await asyncio.gather(*asking):
        if not reply.is_whole:
            run.fail(f"a stream of a frozen engine: {reply.problem or reply.error}")
    if not (await ask(served, completion("Hello", max_tokens=1))).is_whole:
        run.fail("it is healthy and does not answer")
    run.cases += 1
    return told_s, well_s


async def false_alarms(run: Run, served: Served, seconds: float) -> int:
    """Number of probes under full load that were not 200."""
    until = time.monotonic() + seconds
    statuses: list[int] = []

    async def probe() -> None:
        while time.monotonic() < until:
            statuses.append((await look(served, "/health")).status)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def client(number: int) -> None:
        while time.monotonic() < until:
            body = completion(f"{number}. A story:", max_tokens=32, stream=True)
            reply = await ask(served, body, patience_s=GIVEN_UP_S * 5)
            if not reply.is_whole:
                run.fail(f"under full load: {reply.problem or reply.error}")

    await asyncio.gather(probe(), *(client(number) for number in range(NUM_CLIENTS)))
    run.notes["probes"] = len(statuses)
    run.cases += len(statuses)
    return sum(status != 200 for status in statuses)


@figure(
    "R14",
    "a frozen engine is told and recovers; full load for ten minutes is no alarm",
    minutes=12,
    limits={
        "unhealthy_after_s": at_most(5),
        "recovered_after_s": at_most(15),
        "false_alarms": at_most(0),
        "requests_harmed": at_most(0),
    },
    in_quick=False,
)
def frozen_engine(run: Run) -> Values:
    told, well = [], []
    with served_engine() as served:
        for busy in (False, True) * NUM_ROUNDS:
            told_s, well_s = asyncio.run(freeze(run, served, busy=busy))
            told.append(told_s)
            well.append(well_s)
        alarms = asyncio.run(false_alarms(run, served, LOAD_S))
    return {
        "unhealthy_after_s": max(told),
        "recovered_after_s": max(well),
        "false_alarms": alarms,
        "requests_harmed": len(run.failures),
    }
