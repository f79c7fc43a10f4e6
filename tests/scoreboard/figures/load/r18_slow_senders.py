"""Clients that never finish their requests: 250 send headers at a byte per second, 250 send a body
that way, and 2,000 connect and send nothing.

The server holds 8,192 connections, if the operating system allows it as many files; beyond that, it
closes the one that was idle longest. Silent clients are closed when the header timeout expires, or
earlier to make room. A client that sends a body is served until the body timeout expires. Probes
use new connections all the while. The server starts with the usual limit of 1,024 open files.
"""

import asyncio
import time

from engine.servers.http.limits import BODY_TIMEOUT_S
from engine.servers.http.protocol import HEAD_TIMEOUT_S
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.loads.sockets import Burden, allow_files, connect
from tests.scoreboard.meters import probing
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import ask, completion

NUM_HEADS = 250
NUM_BODIES = 250
NUM_SILENT = 2000
USUAL_FILES = 1024
SPARE_FILES = 200  # files that a process has open besides connections
MARGIN_S = 2.0
BURST = 100  # connections opened at once
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY_HEAD = HEAD + b"Content-Length: 500\r\n\r\n{"


@figure(
    "R18",
    "500 that send slowly and 2,000 silent connections",
    minutes=2,
    limits={
        "livez_p99_ms": at_most(100),
        "closed_in_time": at_least(1.0),
        "failed_probes": at_most(0),
        "answered_afterwards": at_least(1),
    },
    in_quick=False,
)
def slow_senders(run: Run) -> Values:
    allow_files(USUAL_FILES)
    with served_engine("--log-level", "error") as served:
        allow_files(NUM_HEADS + NUM_BODIES + NUM_SILENT + SPARE_FILES)
        return asyncio.run(_measure(run, served))


async def _measure(run: Run, served: Served) -> Values:
    heads = [Burden(HEAD, b"X-Slow: " + b"x" * 200) for _ in range(NUM_HEADS)]
    bodies = [Burden(BODY_HEAD, b" " * 400) for _ in range(NUM_BODIES)]
    silent = [Burden() for _ in range(NUM_SILENT)]
    everybody = [*heads, *bodies, *silent]
    run.random("order").shuffle(everybody)
    async with probing(served, fresh=True) as probes:
        for start in range(0, len(everybody), BURST):
            await asyncio.gather(*(connect(served, each) for each in everybody[start:][:BURST]))
        await asyncio.sleep(max(HEAD_TIMEOUT_S, BODY_TIMEOUT_S) + MARGIN_S)
    now = time.monotonic()
    late = [
        each
        for group, seconds in ((heads, HEAD_TIMEOUT_S), (silent, HEAD_TIMEOUT_S))
        for each in group
        if each.is_open_after(seconds + MARGIN_S)
    ]
    late += [each for each in bodies if each.is_open_after(BODY_TIMEOUT_S + MARGIN_S)]
    for each in late:
        open_s = (each.closed or now) - each.opened
        run.fail(f"open for {open_s:.1f} s after {bytes(each.opening[-20:])!r}")
    answered = await ask(served, completion("Once", max_tokens=2))
    run.failures += probes.failures
    run.cases = len(everybody)
    run.notes |= {
        "probes": len(probes.seconds),
        "bodies_told_408": sum(each.received.startswith(b"HTTP/1.1 408") for each in bodies),
        "bodies_told_429": sum(each.received.startswith(b"HTTP/1.1 429") for each in bodies),
        "closed_for_others": sum(not each.is_open_after(HEAD_TIMEOUT_S - 1) for each in silent),
    }
    return {
        "livez_p99_ms": percentile(probes.seconds, 0.99) * 1e3,
        "closed_in_time": 1 - len(late) / len(everybody),
        "failed_probes": len(probes.failures),
        "answered_afterwards": float(answered.is_whole),
    }
