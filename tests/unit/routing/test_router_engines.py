"""The router over real engines with a toy model: processes are killed, caches are used."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    GenerationContext,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing.decisions import MAX_DECISIONS
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router
from tests.support.toy_engine.alone import generate_alone
from tests.support.toy_engine.backend import ToyBackend
from tests.support.toy_engine.runner import CRASH_TOKEN, NAN_TOKEN, VOCAB

NUM_STREAMS = 32
HARMLESS = [token for token in range(1, VOCAB) if token not in (CRASH_TOKEN, NAN_TOKEN)]
NUM_CONVERSATIONS, NUM_TURNS = 16, 8


def toy_router(count: int, policy: str, **settings: Any) -> Router:
    replicas = [
        Replica(f"toy#{number}", "toy", ToyBackend(**settings)) for number in range(1, count + 1)
    ]
    route = Route("toy", [Member(each, 1.0) for each in replicas], policy, make_policy(policy))
    return Router(replicas, [route], RouterMetrics(CollectorRegistry()))


def asking(name: str, prompt: tuple[int, ...], max_tokens: int) -> CompletionRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True)
    return CompletionRequest(
        context=GenerationContext(request_id=name, params=params), prompt=prompt
    )


@dataclass
class Load:
    """Streams without a pause, and how each ended."""

    router: Router
    open_since: dict[str, float] = field(default_factory=dict)
    num_done: int = 0
    errors: list[EngineError] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    is_over: bool = False

    async def stream(self, number: int) -> None:
        count = 0
        while not self.is_over:
            count += 1
            name = f"s{number}-{count}"
            self.open_since[name] = time.monotonic()
            prompt = tuple(random.Random(name).choices(HARMLESS, k=8))
            events: list[Event] = []
            try:
                asked = asking(name, prompt, 40)
                async with asyncio.timeout(30):
                    await self.router.complete(asked).feed(events.append)
                tokens = [token for each in events for token in getattr(each, "token_ids", ())]
                right = generate_alone(prompt, asked.context.params, 0, frozenset(), 256)[0]
                if tokens != right or not isinstance(events[-1], UsageEvent):
                    self.malformed.append(name)
                self.num_done += 1
            except EngineError as error:
                self.errors.append(error)
                await asyncio.sleep(0.01)
            del self.open_since[name]


async def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


@pytest.mark.seconds
@pytest.mark.parametrize("num_kills", [3, pytest.param(10, marks=pytest.mark.slow)])
async def test_killing_engines_under_32_streams_ends_no_request(num_kills: int) -> None:
    router = toy_router(3, "least_loaded", in_process=False)
    await router.start()
    load = Load(router)
    streams = [asyncio.create_task(load.stream(number)) for number in range(NUM_STREAMS)]
    try:
        for number in range(num_kills):
            await until(lambda: all(each.in_flight >= 4 for each in router.replicas))
            victim = router.replicas[number % 3]
            assert isinstance(victim.backend, ToyBackend)
            before, restarts = set(load.open_since), victim.health().num_restarts
            assert victim.backend.engine_pid is not None
            os.kill(victim.backend.engine_pid, signal.SIGKILL)
            await until(lambda: not before & set(load.open_since))  # noqa: B023
            done = load.num_done
            await until(lambda: load.num_done > done + 8)  # noqa: B023
            await until(lambda: victim.health().num_restarts == restarts + 1)  # noqa: B023
            await until(lambda: victim.health().ready)  # noqa: B023
        served = router.replicas[0].num_requests
        await until(lambda: router.replicas[0].num_requests > served)
        load.is_over = True
        await asyncio.wait_for(asyncio.gather(*streams), 60)
    finally:
        for stream in streams:
            stream.cancel()
        await router.stop()
    assert not load.malformed and not load.errors
    moved = [each for each in router.decisions.newest(MAX_DECISIONS) if each.failed]
    assert moved and all(each.why == "it continued the request" for each in moved)
    assert any(each.health().num_revived for each in router.replicas)
    assert all(each.in_flight == 0 and not each.outlier.is_ejected for each in router.replicas)
    assert sum(each.health().num_restarts for each in router.replicas) == num_kills


async def recomputed(policy: str) -> int:
    """Prompt tokens that had to be computed for conversations in random order. A replica's cache
    holds half of all conversations, and not all of them.
    """
    router = toy_router(2, policy, block_size=8)
    await router.start()
    rng = random.Random(5)
    history: list[list[int]] = [[] for _ in range(NUM_CONVERSATIONS)]
    order = [n for n in range(NUM_CONVERSATIONS) for _ in range(NUM_TURNS)]
    rng.shuffle(order)
    total = 0
    for number, conversation in enumerate(order):
        said = history[conversation]
        said += rng.choices(HARMLESS, k=22)
        events: list[Event] = []
        await router.complete(asking(f"t{number}", tuple(said), 1)).feed(events.append)
        for event in events:
            if isinstance(event, TextEvent):
                said += [each for each in event.token_ids if each in HARMLESS]
            elif isinstance(event, UsageEvent):
                total += event.prompt_tokens - event.cached_tokens
    await router.stop()
    return total


@pytest.mark.seconds
async def test_prefix_routing_recomputes_far_less_than_round_robin() -> None:
    by_prefix, in_turn = await recomputed("prefix"), await recomputed("round_robin")
    assert by_prefix <= 0.6 * in_turn, (by_prefix, in_turn)
