"""Prompts of 1 MiB beside 64 streams: probes must still be answered.

The prompts are longer than the context, so each is read, parsed, tokenized and refused. Four
clients send them one after the other: as plain text, as a chat, and as token ids.
"""

import asyncio
import time

from benchmarks.prompts import words
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.loads.http import judge_all, post, send
from tests.scoreboard.loads.observed import Looks, observed_engine
from tests.scoreboard.meters import probing
from tests.scoreboard.served_engine import Served, percentile
from tests.scoreboard.streams import CHAT, COMPLETIONS, MODEL, Reply, completion, request_bytes

SETTLE_S = 3.0  # once ready, a server imports its rarely used modules
SECONDS = 30.0
NUM_STREAMS = 64
START_APART_S = 0.05
NUM_SENDERS = 4
MEBIBYTE = 2**20


@figure(
    "R19",
    "prompts of 1 MiB beside 64 streams",
    minutes=1,
    limits={
        "livez_p99_ms": at_most(100),
        "longest_stall_ms": at_most(50),
        "other_failures": at_most(0),
    },
    in_quick=False,
)
def long_prompts(run: Run) -> Values:
    with observed_engine("--log-level", "warning") as (served, looks):
        return asyncio.run(_measure(run, served, looks))


async def _measure(run: Run, served: Served, looks: Looks) -> Values:
    await asyncio.sleep(SETTLE_S)
    began = time.monotonic()
    until = began + SECONDS
    async with probing(served) as probes:
        streams, refused = await asyncio.gather(_streams(served, until), _prompts(served, until))
    seen = looks.between(began, time.monotonic())
    judge_all([*streams, *refused])
    for reply in streams:
        if not reply.is_whole:
            run.fail(f"a stream: {reply.problem or reply.error}")
    for reply in refused:
        if reply.status != 400 or not reply.is_well_formed:
            run.fail(f"a long prompt: {reply.status} {reply.problem}")
    run.failures += probes.failures
    run.cases = len(refused)
    run.notes |= {
        "streams": len(streams),
        "probes": len(probes.seconds),
        "slowest_livez_ms": round(max(probes.seconds) * 1e3, 1),
        "longest_without_processor_ms": round(max(look.late_s for look in seen) * 1e3, 1),
    }
    return {
        "livez_p99_ms": percentile(probes.seconds, 0.99) * 1e3,
        "longest_stall_ms": max(look.stall_s for look in seen) * 1e3,
        "other_failures": len(run.failures),
    }


async def _streams(served: Served, until: float) -> list[Reply]:
    """Streams of different lengths, started one by one, so that they do not all restart at once."""

    async def client(number: int) -> list[Reply]:
        await asyncio.sleep(number * START_APART_S)
        replies = []
        while time.monotonic() < until:
            body = completion(f"{number}, {len(replies)}", max_tokens=64 + number, stream=True)
            replies.append(await post(served, body))
        return replies

    everybody = await asyncio.gather(*(client(number) for number in range(NUM_STREAMS)))
    return [reply for replies in everybody for reply in replies]


async def _prompts(served: Served, until: float) -> list[Reply]:
    text = words(MEBIBYTE // 4, "long")[:MEBIBYTE]
    requests = [
        request_bytes(COMPLETIONS, completion(text)),
        request_bytes(CHAT, {"model": MODEL, "messages": [{"role": "user", "content": text}]}),
        request_bytes(COMPLETIONS, completion("") | {"prompt": [1000] * (MEBIBYTE // 6)}),
    ]

    async def sender(number: int) -> list[Reply]:
        replies = []
        while time.monotonic() < until:
            replies.append(await send(served, requests[(number + len(replies)) % len(requests)]))
        return replies

    everybody = await asyncio.gather(*(sender(number) for number in range(NUM_SENDERS)))
    return [reply for replies in everybody for reply in replies]
