"""R11: the engine process is killed while it answers clients."""

import asyncio
import os
import signal
import time

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import Reply, all_begun, ask, completion

NUM_KILLS, NUM_CLIENTS = 10, 32
KILLS_PER_SERVER = 4  # one more within a minute would start the pause between restarts
TOLD_WITHIN_S = 5.0
BACK_WITHIN_S = 60.0  # give up after this time


async def kill_under_load(run: Run, served: Served, number: int) -> float:
    """Kill the engine under load. Returns the seconds until the first good answer; checks every
    client's ending.
    """
    replies = [Reply() for _ in range(NUM_CLIENTS)]
    bodies = [
        completion(f"{number}.{client} The story:", max_tokens=400, stream=client % 4 != 0)
        for client in range(NUM_CLIENTS)
    ]
    asking = [
        asyncio.create_task(ask(served, body, reply=reply))
        for body, reply in zip(bodies, replies, strict=True)
    ]
    await all_begun([reply for client, reply in enumerate(replies) if client % 4])
    os.kill(served.engine_pid(), signal.SIGKILL)
    killed_at = time.monotonic()
    first_good = asyncio.create_task(first_good_reply(served))
    await asyncio.wait(asking, timeout=TOLD_WITHIN_S)
    for client, reply in enumerate(replies):
        run.cases += 1
        if not reply.ended or not reply.is_well_formed:
            run.fail(f"kill {number}, client {client}: {reply.problem or 'no end in time'}")
    await asyncio.gather(*asking)
    return await first_good - killed_at


async def first_good_reply(served: Served) -> float:
    """When the first good answer came; infinite if none did."""
    until = time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < until:
        reply = await ask(served, completion("Hello", max_tokens=1))
        if reply.is_whole:
            return reply.ended
        await asyncio.sleep(0.02)
    return float("inf")


@figure(
    "R11",
    "kill -9 of the engine under 32 clients, ten times",
    minutes=4,
    limits={
        "without_result_or_error_in_5_s": at_most(0),
        "first_good_beyond_load_p95_s": at_most(10),
    },
    in_quick=False,
)
def killed_engine(run: Run) -> Values:
    beyond_load_s: list[float] = []
    for first in range(0, NUM_KILLS, KILLS_PER_SERVER):
        with served_engine() as served:
            load_s = served.samples()["engine_startup_seconds"]
            for number in range(first, min(NUM_KILLS, first + KILLS_PER_SERVER)):
                seconds = asyncio.run(kill_under_load(run, served, number))
                beyond_load_s.append(seconds - load_s)
    run.notes["kills"] = len(beyond_load_s)
    run.notes["first_good_beyond_load_p50_s"] = round(percentile(beyond_load_s, 0.5), 2)
    return {
        "without_result_or_error_in_5_s": len(run.failures),
        "first_good_beyond_load_p95_s": percentile(beyond_load_s, 0.95),
    }
