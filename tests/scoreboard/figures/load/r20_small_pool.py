"""R20: a pool of 16 blocks and 200 long requests: all finish, and none is preempted forever.

A real server on a real socket. Its engine runs in a thread of this process, so that preemptions can
be counted per request and steps can be inspected.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx

from engine.backends.custom.frameworks import NativeBackend
from engine.ipc.options import EngineOptions
from engine.runtime.scheduler import Scheduler
from engine.runtime.sequence import ScheduledBatch, Sequence
from tests.scoreboard.figure import Run, Values, at_least, at_most, figure
from tests.scoreboard.served_engine import MODEL
from tests.scoreboard.streams import Reply, ask, completion
from tests.support.servers.live_server import LiveServer, live_server, wait_until

NUM_REQUESTS = 200
NUM_BLOCKS, BLOCK_SIZE, MAX_SLOTS = 16, 16, 8
BLOCK_BYTES = 30 * 3 * 64 * 2 * 2 * BLOCK_SIZE  # layers, heads, head size, keys and values, bf16
REFUSALS = (400, 429, 503)


class Watch:
    """Observes what the scheduler does."""

    def __init__(self) -> None:
        self.num_preemptions: Counter[str] = Counter()  # per request, of its worst choice
        self.num_idle_steps = 0  # steps in which requests waited and nothing was computed

    @contextmanager
    def watching(self) -> Iterator[None]:
        leave, schedule = Scheduler._leave, Scheduler.schedule

        def watched_leave(scheduler: Scheduler, seq: Sequence, *arguments: Any) -> None:
            worst = max(seq.queue.num_preemptions, self.num_preemptions[seq.request_id])
            self.num_preemptions[seq.request_id] = worst
            leave(scheduler, seq, *arguments)

        def watched_schedule(
            scheduler: Scheduler, budget: int, now: float
        ) -> ScheduledBatch | None:
            had_work = scheduler.has_work
            batch = schedule(scheduler, budget, now)
            self.num_idle_steps += had_work and batch is None
            return batch

        with (
            patch.object(Scheduler, "_leave", watched_leave),
            patch.object(Scheduler, "schedule", watched_schedule),
        ):
            yield


def small_backend() -> NativeBackend:
    options = EngineOptions(
        model_path=MODEL,
        framework="native",
        pool_bytes=(NUM_BLOCKS + 1) * BLOCK_BYTES,
        max_seq_len=NUM_BLOCKS * BLOCK_SIZE,
        max_slots=MAX_SLOTS,
        block_size=BLOCK_SIZE,
    )
    return NativeBackend(MODEL, options=options, in_process=True)


def body(run: Run, number: int) -> dict[str, Any]:
    """A request so large that four overfill the pool; some can never fit."""
    rng = run.random("request", number)
    prompt = f"{number}: " + "time and again " * rng.randint(15, 45)
    max_tokens = 250 if number % 20 == 19 else rng.randint(20, 60)
    return completion(prompt, max_tokens=max_tokens, stream=rng.random() < 0.5)


async def ask_all(run: Run, server: LiveServer) -> list[Reply]:
    there = SimpleNamespace(address=("127.0.0.1", server.port))
    count = run.share(NUM_REQUESTS)
    return await asyncio.gather(
        *(ask(there, body(run, number), patience_s=600) for number in range(count))
    )


@figure(
    "R20",
    "a KV pool of 16 blocks and 200 long requests",
    minutes=2,
    limits={
        "finished_or_refused_percent": at_least(100),
        "most_preemptions_of_a_request": at_most(4),
        "steps_without_progress": at_most(0),
        "preemptions": at_least(1),
    },
    in_quick=False,
)
def small_pool(run: Run) -> Values:
    watch = Watch()
    with watch.watching(), live_server(small_backend()) as server:
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200, 60)
        replies = asyncio.run(ask_all(run, server))
        stats = server.backend.stats()
        assert stats is not None and stats.num_blocks == NUM_BLOCKS, stats
    run.cases = len(replies)
    good = [
        reply.is_whole or (reply.is_well_formed and reply.status in REFUSALS) for reply in replies
    ]
    for reply, is_good in zip(replies, good, strict=True):
        if not is_good:
            run.fail(f"{reply.status}: {reply.problem or reply.error}")
    run.notes["refused"] = sum(reply.status in REFUSALS for reply in replies)
    return {
        "finished_or_refused_percent": 100 * sum(good) / len(good),
        "most_preemptions_of_a_request": max(watch.num_preemptions.values(), default=0),
        "steps_without_progress": watch.num_idle_steps,
        "preemptions": stats.num_preemptions,
    }
