"""What is asked of a server, and how many at once.

    single   32 words in, 128 tokens out, one at a time
    prefill  1,024 in, 1 out, one at a time
    conc     128 in, 128 out, distinct prompts, `concurrency` at once
    prefix   1,024 shared words and 32 distinct ones, 32 out: the first request alone (cold), then
             the others, `concurrency` at once
    chat     conversations replayed turn by turn; each turn sends everything said so far
    grammar  128 in, 128 out by chat, `concurrency` at once: freely, and again under a JSON schema

No prompt is used twice under one seed, so a prefix cache helps only where the scenario shares one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from benchmarks.client import Failure, Outcome, Sample, Target, chat, complete, new_session
from benchmarks.figures import (
    Batch,
    grammar_figures,
    prefix_figures,
    summarize,
    turn_figures,
)
from benchmarks.process import CoresMeter, peak_rss_mb
from benchmarks.prompts import words

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    requests: int | None  # per batch; None: max(4, 2 x concurrency). chat: conversations
    prompt_words: int  # distinct ones; chat: of each user turn
    output_tokens: int
    concurrency: int = 1
    prefix_words: int = 0
    turns: int = 1

    @property
    def num_requests(self) -> int:
        return self.requests or max(4, 2 * self.concurrency)

    @property
    def label(self) -> str:
        return f"{self.name} {self.concurrency}" if self.name == "conc" else self.name


SCENARIOS = {
    "single": Scenario("single", 4, 32, 128),
    "prefill": Scenario("prefill", 4, 1024, 1),
    "conc": Scenario("conc", None, 128, 128, concurrency=8),
    "prefix": Scenario("prefix", 32, 32, 32, prefix_words=1024),
    "chat": Scenario("chat", 4, 48, 48, turns=10),
    "grammar": Scenario("grammar", None, 128, 128, concurrency=8),
}

# Long enough that no answer of a benchmark's length can complete it.
ROW = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "kind": {"enum": ["person", "place", "thing"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
ROWS = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": ROW, "minItems": 100}},
    "required": ["rows"],
    "additionalProperties": False,
}
UNDER_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS}}
}


async def measure(
    scenario: Scenario,
    target: Target,
    *,
    seed: str,
    repeat: int,
    warmup: int = 2,
    pid: int | None = None,
    timeout: float = 600,
) -> dict[str, Any]:
    """Run the scenario `repeat` times; its figures as JSON can hold them."""
    batches: list[Batch] = []
    free: list[Batch] = []  # grammar: the same without one
    conversations: list[list[Sample]] = []
    async with new_session(timeout) as session:
        for number in range(warmup):  # prompts that nothing else uses
            prompt = words(scenario.prompt_words + scenario.prefix_words, seed, "warm", number)
            await complete(session, target, prompt, min(8, scenario.output_tokens))
        for number in range(repeat):
            key = f"{seed}/{scenario.label}/{number}"
            if scenario.name == "chat":
                batch, replayed = await _replay(session, target, scenario, key, pid)
                conversations += replayed
            elif scenario.name == "grammar":
                free.append(await _chats(session, target, scenario, f"{key}/free", pid, {}))
                batch = await _chats(session, target, scenario, key, pid, UNDER_SCHEMA)
            else:
                batch = await _run_batch(session, target, scenario, key, pid)
            batches.append(batch)
    figures = {
        "scenario": scenario.name,
        "model": target.model,
        "concurrency": scenario.concurrency,
        "requests": scenario.num_requests,
        "repeat": repeat,
        "seed": seed,
        **summarize(batches, scenario.output_tokens),
    }
    if scenario.name == "prefix":
        figures |= prefix_figures(batches)
    if scenario.name == "chat":
        figures["turns"] = turn_figures(conversations)
    if scenario.name == "grammar":
        figures |= grammar_figures(free, batches)
    if pid is not None:
        figures["peak_rss_mb"] = peak_rss_mb(pid)
    return figures


async def _run_batch(
    session: aiohttp.ClientSession, target: Target, scenario: Scenario, key: str, pid: int | None
) -> Batch:
    shared = words(scenario.prefix_words, key, "shared") + " " if scenario.prefix_words else ""
    prompts = [
        shared + words(scenario.prompt_words, key, number)
        for number in range(scenario.num_requests)
    ]

    async def ask(number: int) -> Outcome:
        return await complete(session, target, prompts[number], scenario.output_tokens)

    meter, started = CoresMeter(pid), time.perf_counter()
    first = [await ask(0)] if scenario.prefix_words else []
    rest = await _at_most(scenario.concurrency, ask, range(len(first), len(prompts)))
    return Batch(time.perf_counter() - started, (*first, *rest), meter.read())


async def _chats(
    session: aiohttp.ClientSession,
    target: Target,
    scenario: Scenario,
    key: str,
    pid: int | None,
    fields: dict[str, Any],
) -> Batch:
    async def ask(number: int) -> Outcome:
        content = words(scenario.prompt_words, key, number)
        messages = [{"role": "user", "content": content}]
        return await chat(session, target, messages, scenario.output_tokens, **fields)

    meter, started = CoresMeter(pid), time.perf_counter()
    outcomes = await _at_most(scenario.concurrency, ask, range(scenario.num_requests))
    return Batch(time.perf_counter() - started, tuple(outcomes), meter.read())


async def _replay(
    session: aiohttp.ClientSession, target: Target, scenario: Scenario, key: str, pid: int | None
) -> tuple[Batch, list[list[Sample]]]:
    """The batch of all turns, and the samples of each conversation that went through."""

    async def converse(number: int) -> list[Outcome]:
        messages: list[dict[str, str]] = []
        outcomes: list[Outcome] = []
        for turn in range(scenario.turns):
            question = words(scenario.prompt_words, key, number, turn)
            messages.append({"role": "user", "content": question})
            outcome = await chat(session, target, messages, scenario.output_tokens)
            outcomes.append(outcome)
            if isinstance(outcome, Failure):
                break
            messages.append({"role": "assistant", "content": outcome.text})
        return outcomes

    meter, started = CoresMeter(pid), time.perf_counter()
    replayed = await _at_most(scenario.concurrency, converse, range(scenario.num_requests))
    wall = time.perf_counter() - started
    batch = Batch(wall, tuple(each for outcomes in replayed for each in outcomes), meter.read())
    whole = [[each for each in outcomes if isinstance(each, Sample)] for outcomes in replayed]
    return batch, [samples for samples in whole if len(samples) == scenario.turns]


async def _at_most(
    limit: int, job: Callable[[int], Awaitable[Result]], numbers: range
) -> list[Result]:
    """Run the job for every number, `limit` at a time, started in order; results in order."""
    pending = iter(numbers)
    results: dict[int, Result] = {}

    async def worker() -> None:
        for number in pending:
            results[number] = await job(number)

    await asyncio.gather(*(worker() for _ in range(limit)))
    return [results[number] for number in numbers]
