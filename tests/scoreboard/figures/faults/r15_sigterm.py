"""R15: SIGTERM during streams: they finish well, and no new request is accepted."""

import asyncio
import signal
import time
from typing import Any

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, served_engine
from tests.scoreboard.streams import Reply, all_begun, ask, completion

NUM_STREAMS, NUM_TOKENS = 32, 64
NUM_NEWCOMERS, NEXT_AFTER_S = 50, 0.01
GRACE_S = 120


async def end_under_load(run: Run, served: Served) -> tuple[list[Reply], float]:
    """The answers, and how long after the signal new requests were still accepted."""
    replies = [Reply() for _ in range(NUM_STREAMS)]
    asking = [
        asyncio.create_task(ask(served, story(number), reply=reply))
        for number, reply in enumerate(replies)
    ]
    await all_begun(replies)
    served.process.send_signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    refused_s = await knock(run, served, signalled_at)
    return await asyncio.gather(*asking), refused_s


async def knock(run: Run, served: Served, signalled_at: float) -> float:
    """Send new requests one after the other. Returns the seconds from the signal to the first
    refusal after which no request was accepted.
    """
    knocking = []
    for _ in range(NUM_NEWCOMERS):
        knocking.append(asyncio.create_task(ask(served, completion("Hello", max_tokens=1))))
        await asyncio.sleep(NEXT_AFTER_S)
    new_tenants = await asyncio.gather(*knocking)
    for each in new_tenants:
        if not each.is_whole and (not each.is_well_formed or each.status != 503):
            run.fail(f"a newcomer was told {each.status}: {each.problem}")
    taken = [number for number, each in enumerate(new_tenants) if each.is_whole]
    run.notes["taken_after_the_signal"] = len(taken)
    first_refused = taken[-1] + 1 if taken else 0
    if first_refused == NUM_NEWCOMERS:
        return float("inf")
    return new_tenants[first_refused].ended - signalled_at


def story(number: int) -> dict[str, Any]:
    return completion(f"Story {number}:", max_tokens=NUM_TOKENS, stream=True)


@figure(
    "R15",
    "SIGTERM with 32 streams",
    minutes=1,
    limits={
        "streams_cut": at_most(0),
        "refused_within_ms": at_most(100),
        "refused_badly": at_most(0),
        "exit_code": at_most(0),
    },
    in_quick=False,
)
def sigterm(run: Run) -> Values:
    with served_engine(env={"LLM_ENGINE_SERVER__DRAIN_TIMEOUT_S": str(GRACE_S)}) as served:
        replies, refused_s = asyncio.run(end_under_load(run, served))
        exit_code = served.process.wait(GRACE_S)
    run.cases = len(replies)
    refused_badly = len(run.failures)
    cut = [reply for reply in replies if not reply.is_whole]
    for reply in cut:
        run.fail(f"a stream was cut: {reply.problem or reply.error}")
    return {
        "streams_cut": len(cut),
        "refused_within_ms": 1000 * refused_s,
        "refused_badly": refused_badly,
        "exit_code": abs(exit_code),
    }
