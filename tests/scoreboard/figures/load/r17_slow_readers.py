"""100 clients that read their streams at one byte per second, beside 8 that read at once.

The requests of slow readers cost the engine as much as any others; reading slowly must not cost
more. So the 8 are measured twice. While the answers of the 100 are computed, they are compared with
a run in which the 100 read at once. When those answers only wait to be read, they are compared with
a run without the 100. Most answers are a hundred kilobytes, which fit the system's socket buffers;
a few are so long that the server has to buffer a part. The measured memory is that of the server
process: the engine buffers nothing for readers.
"""

import asyncio
import time

import psutil

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.loads.http import judge_all, post, send
from tests.scoreboard.loads.sockets import slow_reader
from tests.scoreboard.meters import MEBIBYTE, token_gaps
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import COMPLETIONS, Reply, completion, request_bytes

NUM_SLOW = 100
NUM_NORMAL = 8
NUM_LONG = 4  # slow clients with very long answers
SLOW_TOKENS = 160
LOGPROBS = 20  # so that each token's event is 800 bytes long
LONG_CHOICES = 16
NORMAL_TOKENS = 64
POOL_MB = "1024"  # enough for all requests: none is preempted
SECONDS = 20.0
WARM_UP_S = 3.0
BEGUN_S = 2.0  # until all of the 100 are admitted
READING_S = 600.0


@figure(
    "R17",
    "100 readers at a byte a second beside 8 others",
    minutes=2,
    limits={
        "itl_p99_beside_waiting": at_most(1.5),
        "itl_p99_beside_computed": at_most(1.5),
        "rss_growth_mib": at_most(64),
        "failed": at_most(0),
    },
    in_quick=False,
)
def slow_readers(run: Run) -> Values:
    with served_engine("--log-level", "error", "--memory-pool-size-mb", POOL_MB) as served:
        return asyncio.run(_measure(run, served))


async def _measure(run: Run, served: Served) -> Values:
    replies: list[Reply] = []
    await _gaps(served, WARM_UP_S, replies)
    alone = await _gaps(served, SECONDS, replies)
    server = psutil.Process(served.process.pid)
    memory = server.memory_info().rss
    fast = [asyncio.create_task(send(served, _asked(number))) for number in range(NUM_SLOW)]
    beside_fast = await _gaps(served, None, replies)
    replies += await asyncio.gather(*fast)
    slow = [
        asyncio.create_task(slow_reader(served, _asked(NUM_SLOW + number), READING_S))
        for number in range(NUM_SLOW)
    ]
    beside_slow = await _gaps(served, None, replies)
    num_held = served.admitted()  # answers that the server still buffers in part
    grown = server.memory_info().rss - memory
    beside_waiting = await _gaps(served, SECONDS, replies)
    grown = max(grown, server.memory_info().rss - memory)
    still_there = sum(not task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    served.wait_until_idle()
    judge_all(replies)
    run.failures += [str(each.problem or each.error) for each in replies if not each.is_whole]
    if num_held < NUM_LONG:
        run.fail(f"only {num_held} answers were still waiting to be read")
    if still_there < NUM_SLOW:
        run.fail(f"only {still_there} slow readers were still there")
    run.cases = NUM_SLOW + len(replies)
    p99 = {
        "alone": percentile(alone, 0.99),
        "beside_fast": percentile(beside_fast, 0.99),
        "beside_slow": percentile(beside_slow, 0.99),
        "beside_waiting": percentile(beside_waiting, 0.99),
    }
    run.notes |= {f"itl_p99_{name}_ms": round(value * 1e3, 1) for name, value in p99.items()}
    return {
        "itl_p99_beside_waiting": p99["beside_waiting"] / p99["alone"],
        "itl_p99_beside_computed": p99["beside_slow"] / p99["beside_fast"],
        "rss_growth_mib": grown / MEBIBYTE,
        "failed": len(run.failures),
    }


def _asked(number: int) -> bytes:
    choices = LONG_CHOICES if number % NUM_SLOW < NUM_LONG else 1
    fields = {"max_tokens": SLOW_TOKENS, "logprobs": LOGPROBS, "n": choices}
    return request_bytes(COMPLETIONS, completion(f"{number}:", stream=True, **fields))


async def _gaps(served: Served, seconds: float | None, replies: list[Reply]) -> list[float]:
    """Token gaps of the 8 clients for `seconds`; None: until nothing else is computed."""
    began, stop = time.monotonic(), asyncio.Event()
    working = asyncio.create_task(_normal(served, stop))
    if seconds is not None:
        await asyncio.sleep(seconds)
    else:
        await asyncio.sleep(BEGUN_S)
        while await asyncio.to_thread(_num_sequences, served) > NUM_NORMAL:
            await asyncio.sleep(0.25)
    until = time.monotonic()
    stop.set()
    found = await working
    replies += found
    return token_gaps(found, began, until)


def _num_sequences(served: Served) -> float:
    seen = served.samples()
    return seen["engine_sequences_running"] + seen["engine_sequences_waiting"]


async def _normal(served: Served, stop: asyncio.Event) -> list[Reply]:
    async def client(number: int) -> list[Reply]:
        replies: list[Reply] = []
        while not stop.is_set():
            prompt = f"{number}, {time.monotonic()}"
            body = completion(prompt, max_tokens=NORMAL_TOKENS, stream=True)
            replies.append(await post(served, body))
        return replies

    everybody = await asyncio.gather(*(client(number) for number in range(NUM_NORMAL)))
    return [reply for replies in everybody for reply in replies]
