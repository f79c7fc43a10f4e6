"""R11: the engine process is killed while it answers clients, and every answer continues."""

import asyncio
import os
import signal
import time
from typing import Any

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import CHAT, COMPLETIONS, Reply, all_begun, ask, completion

NUM_KILLS, NUM_CLIENTS = 50, 32
KILLS_PER_SERVER = 4  # one more within a minute would start the pause between restarts
BACK_WITHIN_S = 60.0  # give up after this time
NUM_TOKENS = 96
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 60}
LIST = {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]}
FUNCTION = {"name": "count", "description": "Counts.", "parameters": LIST}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}
# What each kind of client asks for besides its prompt. Answers of the last three kinds may be
# short.
KINDS: tuple[dict[str, Any], ...] = (
    {"stream": True},
    {"stream": True, "temperature": 0.9, "seed": 7},
    {"stream": True, "temperature": 0.9, "seed": 8, "n": 3},
    {"stream": True, "logprobs": 2, "temperature": 0.7, "top_p": 0.9, "seed": 9},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"stream": True, "stop": [" because", " however", "zebra"]},
    {"response_format": SCHEMA},
    {"stream": True, "tools": [{"type": "function", "function": FUNCTION}]}
    | {"tool_choice": "required"},
)
NUM_LONG_KINDS = 4  # streams that certainly run for long


def question(client: int) -> tuple[dict[str, Any], str]:
    """What a client sends, and where to."""
    kind = client % len(KINDS)
    body = completion(f"{client} The story:", max_tokens=NUM_TOKENS, **KINDS[kind])
    if not {"tools", "response_format"} & KINDS[kind].keys():
        return body, COMPLETIONS
    prompt = body.pop("prompt")
    return body | {"messages": [{"role": "user", "content": f"{prompt} count to 60"}]}, CHAT


async def answers(served: Served, replies: list[Reply]) -> None:
    await asyncio.gather(
        *(ask(served, *question(client), reply=reply) for client, reply in enumerate(replies))
    )


async def undisturbed(served: Served) -> list[Reply]:
    replies = [Reply() for _ in range(NUM_CLIENTS)]
    await answers(served, replies)
    assert all(reply.is_whole for reply in replies), [reply.problem for reply in replies]
    return replies


async def kill_under_load(
    run: Run, served: Served, number: int, right: list[Reply]
) -> tuple[float, list[float]]:
    """Kill the engine under load and check every client's answer. Returns the seconds until the
    first good answer to a new request, and the longest pause of each long stream.
    """
    replies = [Reply() for _ in range(NUM_CLIENTS)]
    long = [reply for client, reply in enumerate(replies) if client % len(KINDS) < NUM_LONG_KINDS]
    asking = asyncio.create_task(answers(served, replies))
    await all_begun(long, num_pieces=2 + 5 * (number % 8))
    os.kill(served.engine_pid(), signal.SIGKILL)
    killed_at = time.monotonic()
    first_good = asyncio.create_task(first_good_reply(served))
    await asking
    for client, (reply, expected) in enumerate(zip(replies, right, strict=True)):
        run.cases += 1
        if not reply.is_whole:
            run.fail(f"kill {number}, client {client}: {reply.problem or reply.error}")
        elif reply.texts != expected.texts:
            run.fail(f"kill {number}, client {client}: another text")
    pauses = [
        max(later - before for before, later in zip(reply.times, reply.times[1:], strict=False))
        for reply in long
        if len(reply.times) > 1
    ]
    return await first_good - killed_at, pauses


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
    "kill -9 of the engine under 32 clients, fifty times: requests that ended with an error or"
    " another text",
    minutes=20,
    limits={"ended_with_error": at_most(0), "first_good_beyond_load_p95_s": at_most(10)},
    in_quick=False,
)
def killed_engine(run: Run) -> Values:
    beyond_load_s: list[float] = []
    paused_s: list[float] = []
    for first in range(0, NUM_KILLS, KILLS_PER_SERVER):
        with served_engine() as served:
            load_s = served.samples()["engine_startup_seconds"]
            right = asyncio.run(undisturbed(served))
            for number in range(first, min(NUM_KILLS, first + KILLS_PER_SERVER)):
                seconds, pauses = asyncio.run(kill_under_load(run, served, number, right))
                beyond_load_s.append(seconds - load_s)
                paused_s += pauses
    run.notes["kills"] = len(beyond_load_s)
    run.notes["first_good_beyond_load_p50_s"] = round(percentile(beyond_load_s, 0.5), 2)
    run.notes["pause_p50_s"] = round(percentile(paused_s, 0.5), 2)
    run.notes["pause_p95_s"] = round(percentile(paused_s, 0.95), 2)
    return {
        "ended_with_error": len(run.failures),
        "first_good_beyond_load_p95_s": percentile(beyond_load_s, 0.95),
    }
