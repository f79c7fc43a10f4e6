"""R10: clients that disconnect in every phase of their requests, cleanly or not.

Some disconnect one at a time, to check that everything they held is released. The others disconnect
in crowds larger than a batch, while the remaining clients must be answered as if they were alone.
"""

import asyncio
import json
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import Served, percentile, read_samples, served_engine
from tests.scoreboard.streams import (
    COMPLETIONS,
    Reply,
    ask,
    completion,
    look,
    read_head,
    request_bytes,
)

NUM_ALONE, NUM_CROWDS, CROWD, NUM_SURVIVORS = 400, 50, 12, 4
PHASES = ("sending", "queued", "compiling", "computing the prompt", "answering")
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school")
RESET = b"\1\0\0\0\0\0\0\0"  # linger for 0 s: closing sends RST
FREE_WITHIN_S = 10.0  # give up after this time, and count the case as a failure


@dataclass
class Leaver:
    """A client that disconnects: when and how is chosen once."""

    rng: random.Random
    phase: str = field(init=False)
    stream: bool = field(init=False)
    resets: bool = field(init=False)

    def __post_init__(self) -> None:
        self.phase = self.rng.choice(PHASES)
        self.stream, self.resets = self.rng.random() < 0.5, self.rng.random() < 0.5

    def body(self) -> dict[str, Any]:
        is_long = self.phase == "computing the prompt"
        words = self.rng.choices(WORDS, k=500 if is_long else self.rng.choice((5, 60)))
        fields: dict[str, Any] = {"max_tokens": 200, "n": self.rng.choice((1, 1, 2))}
        if self.phase == "compiling":
            names = [f"{self.rng.choice(WORDS)}_{self.rng.randrange(1000)}" for _ in range(8)]
            schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
            shape = {"name": "thing", "schema": schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": shape}
        return completion(" ".join(words), stream=self.stream, **fields)

    async def visit(self, served: Served) -> float:
        """Connect, send a request, disconnect. Returns when it disconnected."""
        reader, writer = await asyncio.open_connection(*served.address)
        request = request_bytes(COMPLETIONS, self.body())
        writer.write(request[: len(request) // 2] if self.phase == "sending" else request)
        await writer.drain()
        if self.phase == "answering":
            await self._read_some(reader)
        elif self.phase in ("compiling", "computing the prompt"):
            await asyncio.sleep(self.rng.uniform(0, 0.08))
        if self.resets:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        else:
            writer.close()
        return time.monotonic()

    async def _read_some(self, reader: asyncio.StreamReader) -> None:
        if not self.stream:
            await asyncio.sleep(self.rng.uniform(0.1, 0.4))
            return
        await read_head(reader, Reply())
        for _ in range(self.rng.randint(1, 8)):
            await reader.readline()


class Survivor:
    """A client that repeats its request, and records every answer that differs from the undisturbed
    one.
    """

    def __init__(self, served: Served, number: int) -> None:
        self._served = served
        self._body = completion(f"{number}. The sky is", max_tokens=24, stream=number % 2 == 0)
        self._expected: dict[int, str] = {}
        self.num_changed = 0
        self.num_asked = 0
        self.is_over = False

    async def learn(self) -> None:
        reply = await ask(self._served, self._body)
        assert reply.is_whole, reply.problem
        self._expected = reply.texts

    async def run(self) -> None:
        while not self.is_over:
            reply = await ask(self._served, self._body)
            self.num_asked += 1
            self.num_changed += not reply.is_whole or reply.texts != self._expected


async def num_admitted(served: Served) -> int:
    return int(json.loads((await look(served, "/v1/admin/status")).body)["in_flight"])


async def used_blocks(served: Served) -> float:
    return read_samples((await look(served, "/metrics")).body.decode())["used_blocks"]


async def freed_after(served: Served, left_at: float) -> float:
    """Seconds from `left_at` until no request was admitted and no block was held."""
    while await num_admitted(served) or await used_blocks(served):
        if time.monotonic() > left_at + FREE_WITHIN_S:
            return float("inf")
        await asyncio.sleep(0.002)
    return time.monotonic() - left_at


async def leave_alone(run: Run, served: Served, seconds: list[float]) -> None:
    phases: Counter[str] = Counter()
    for number in range(run.share(NUM_ALONE)):
        leaver = Leaver(run.random("alone", number))
        seconds.append(await freed_after(served, await leaver.visit(served)))
        phases[leaver.phase] += 1
        run.cases += 1
    run.notes |= {phase.replace(" ", "_"): count for phase, count in sorted(phases.items())}


async def leave_in_crowds(
    run: Run, served: Served, survivors: list[Survivor], seconds: list[float]
) -> None:
    running = [asyncio.create_task(survivor.run()) for survivor in survivors]
    for crowd in range(run.share(NUM_CROWDS)):
        leavers = [Leaver(run.random("crowd", crowd, number)) for number in range(CROWD)]
        left_at = max(await asyncio.gather(*(each.visit(served) for each in leavers)))
        while await num_admitted(served) > NUM_SURVIVORS:
            if time.monotonic() > left_at + FREE_WITHIN_S:
                run.fail(f"crowd {crowd} is still admitted")
                break
            await asyncio.sleep(0.002)
        seconds.append(time.monotonic() - left_at)
        run.cases += CROWD
    for survivor in survivors:
        survivor.is_over = True
    await asyncio.gather(*running)


async def leave(
    run: Run, served: Served, alone_s: list[float], crowd_s: list[float]
) -> list[Survivor]:
    survivors = [Survivor(served, number) for number in range(NUM_SURVIVORS)]
    for survivor in survivors:
        await survivor.learn()
    await leave_alone(run, served, alone_s)
    await leave_in_crowds(run, served, survivors, crowd_s)
    await freed_after(served, time.monotonic())
    return survivors


@figure(
    "R10",
    "1,000 clients that leave in five phases, streaming or not, with FIN or RST",
    minutes=4,
    limits={
        "blocks_in_use_at_idle": at_most(0),
        "admitted_at_idle": at_most(0),
        "abort_to_free_p99_ms": at_most(250),
        "survivors_changed": at_most(0),
    },
    in_quick=False,
)
def disconnects(run: Run) -> Values:
    alone_s: list[float] = []
    crowd_s: list[float] = []
    with served_engine("--batch-size", "8") as served:
        survivors = asyncio.run(leave(run, served, alone_s, crowd_s))
        blocks, admitted = served.samples()["used_blocks"], served.admitted()
    run.notes["survivors_asked"] = sum(survivor.num_asked for survivor in survivors)
    run.notes["alone_p50_ms"] = round(1000 * percentile(alone_s, 0.5), 1)
    run.notes["crowd_p50_ms"] = round(1000 * percentile(crowd_s, 0.5), 1)
    return {
        "blocks_in_use_at_idle": blocks,
        "admitted_at_idle": admitted,
        "abort_to_free_p99_ms": 1000 * percentile(alone_s + crowd_s, 0.99),
        "survivors_changed": sum(survivor.num_changed for survivor in survivors),
    }
