"""Ten times as many requests as the server can answer, for a minute.

First, as many clients as the server admits keep it busy, each sending its next request when it has
its answer. Their throughput is the peak. Then requests arrive ten times as fast, and refused ones
are not retried. The two phases alternate, because the machine's speed drifts by more than the
measured difference. Connections are kept alive, as client libraries and gateways do: on two busy
cores, connecting would cost more than refusing. Answers differ in length, so that they do not all
end at once.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.prompts import words
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.loads.http import Pool, judge_all
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import Reply, completion

FACTOR = 10
PROMPT_WORDS = 16
TOKENS = range(16, 49)
MAX_ADMITTED = 128
NUM_TURNS = 3
SETTLE_S = 6.0  # until the queue has reached its full length
PEAK_S = 10.0
OVERLOAD_S = 20.0


@dataclass
class Window:
    """Requests that ended in a time window: their replies, and the tokens of their answers."""

    began: float
    ended: float
    replies: list[Reply] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0

    def note(self, reply: Reply, num_tokens: int) -> None:
        if self.began <= reply.ended < self.ended:
            self.replies.append(reply)
            if reply.status == 200:
                self.num_answers += 1
                self.num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / (self.ended - self.began)


Request = Callable[[Window, str], Awaitable[None]]


@figure(
    "R16",
    "ten times the requests that can be answered, for 60 s",
    minutes=2.5,
    limits={
        "goodput_of_peak": at_least(0.9),
        "p99_of_429_ms": at_most(50),
        "rss_growth": at_most(0.1),
        "errors_other_than_429": at_most(0),
    },
    in_quick=False,
)
def overload(run: Run) -> Values:
    limit = {"LLM_ENGINE_SERVER__MAX_CONCURRENT_REQUESTS": str(MAX_ADMITTED)}
    with served_engine("--log-level", "warning", env=limit) as served:
        return asyncio.run(_measure(run, served))


async def _measure(run: Run, served: Served) -> Values:
    text, lengths, pool = words(PROMPT_WORDS, run.seed), run.random("lengths"), Pool(served)

    async def request(window: Window, name: str) -> None:
        num_tokens = lengths.choice(TOKENS)
        body = completion(f"{name}: {text}", max_tokens=num_tokens, stream=True)
        window.note(await pool.post(body), num_tokens)

    peaks, floods = [await _peak(request)], []
    memory = served.rss_bytes()
    for _ in range(NUM_TURNS):
        per_s = max(peak.num_answers for peak in peaks) / PEAK_S
        floods.append(await _flood(request, FACTOR * per_s))
        peaks.append(await _peak(request))
    grown = served.rss_bytes() / memory - 1
    pool.close()
    served.wait_until_idle()
    flooded = [reply for flood in floods for reply in flood.replies]
    replies = flooded + [reply for peak in peaks for reply in peak.replies]
    judge_all(replies)
    run.cases = len(flooded)
    for reply in replies:
        if not reply.is_whole and not (reply.status == 429 and reply.is_well_formed):
            run.fail(str(reply.problem or reply.error))
        elif reply.status == 429 and "retry-after" not in reply.headers:
            run.fail("a 429 without Retry-After")
    run.notes |= {
        "peak_tokens_per_s": [round(peak.tokens_per_s) for peak in peaks],
        "overload_tokens_per_s": [round(flood.tokens_per_s) for flood in floods],
        "offered_requests_per_s": round(len(flooded) / NUM_TURNS / OVERLOAD_S, 1),
    }
    refused = [reply.seconds for reply in flooded if reply.status == 429]
    return {
        "goodput_of_peak": statistics.mean(flood.tokens_per_s for flood in floods)
        / statistics.mean(peak.tokens_per_s for peak in peaks),
        "p99_of_429_ms": percentile(refused, 0.99) * 1e3,
        "rss_growth": grown,
        "errors_other_than_429": len(run.failures),
    }


async def _peak(request: Request) -> Window:
    """Run as many clients as are admitted."""
    began = time.monotonic() + SETTLE_S
    window = Window(began, began + PEAK_S)

    async def client(number: int) -> None:
        while time.monotonic() < window.ended:
            await request(window, f"{number} at {time.monotonic()}")

    await asyncio.gather(*(client(number) for number in range(MAX_ADMITTED)))
    return window


async def _flood(request: Request, per_s: float) -> Window:
    """Send requests at a steady rate, regardless of their results."""
    started = time.monotonic()
    window = Window(started + SETTLE_S, started + SETTLE_S + OVERLOAD_S)
    asked: set[asyncio.Task[None]] = set()
    number = 0
    while (now := time.monotonic()) < window.ended:
        while number < (now - started) * per_s:
            number += 1
            task = asyncio.create_task(request(window, f"number {number}"))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*asked)
    return window
