"""The load scenarios: what is sent to a server, and how many requests at once.

    single   32 words in, 128 tokens out, one at a time
    prefill  1,024 in, 1 out, one at a time
    conc     128 in, 128 out, distinct prompts, `concurrency` at once
    prefix   1,024 shared words and 32 distinct ones, 32 out, `concurrency` at once from the start
    reuse    the same, but the first request alone (with a cold prefix), then one at a time
    chat     conversations replayed turn by turn; each turn sends everything said so far
    grammar  128 in, 128 out by chat, `concurrency` at once: freely, and again under a JSON schema

No prompt is used twice under one seed, so a prefix cache helps only where the scenario shares one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from benchmarks.client import (
    Failure,
    Outcome,
    Sample,
    Target,
    accepted_drafts,
    chat,
    complete,
    new_session,
)
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
    first_alone: bool = False

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
    "prefix": Scenario("prefix", 32, 32, 32, concurrency=16, prefix_words=1024),
    "reuse": Scenario("reuse", 32, 32, 32, prefix_words=1024, first_alone=True),
    "chat": Scenario("chat", 4, 48, 48, turns=10),
    "grammar": Scenario("grammar", None, 128, 128, concurrency=8),
}

# So long that no answer of a benchmark's length can complete it.
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


class Measurement:
    """One scenario on one server: its batches so far, and the figures over all of them."""

    def __init__(self, scenario: Scenario, target: Target, pid: int | None = None) -> None:
        self._scenario = scenario
        self._target = target
        self._pid = pid
        self._batches: list[Batch] = []
        self._free: list[Batch] = []  # grammar: the same requests without one
        self._conversations: list[list[Sample]] = []

    async def warm_up(self, session: aiohttp.ClientSession, seed: str, requests: int) -> None:
        """Send requests with prompts that nothing else uses."""
        scenario = self._scenario
        for number in range(requests):
            length = scenario.prompt_words + scenario.prefix_words
            prompt = words(length, seed, scenario.label, "warm", number)
            await complete(session, self._target, prompt, min(8, scenario.output_tokens))

    async def add_batch(self, session: aiohttp.ClientSession, seed: str) -> Batch:
        """Run the scenario once. Repeating a seed would hit the server's prefix cache."""
        scenario, target, pid = self._scenario, self._target, self._pid
        key = f"{seed}/{scenario.label}"
        if scenario.name == "grammar":
            self._free.append(await _chats(session, target, scenario, f"{key}/free", pid, {}))
        accepted = await accepted_drafts(session, target.base_url)
        if scenario.name == "chat":
            batch, replayed = await _replay(session, target, scenario, key, pid)
            self._conversations += replayed
        elif scenario.name == "grammar":
            batch = await _chats(session, target, scenario, key, pid, UNDER_SCHEMA)
        else:
            batch = await _run_batch(session, target, scenario, key, pid)
        accepted = await accepted_drafts(session, target.base_url) - accepted
        batch = replace(batch, accepted_drafts=accepted)
        self._batches.append(batch)
        return batch

    def figures(self) -> dict[str, Any]:
        """The figures as JSON-compatible data: rates as medians over batches, latencies pooled."""
        scenario = self._scenario
        figures = {
            "scenario": scenario.name,
            "model": self._target.model,
            "concurrency": scenario.concurrency,
            "requests": scenario.num_requests,
            "repeat": len(self._batches),
            **summarize(self._batches, scenario.output_tokens),
        }
        if scenario.first_alone:
            figures |= prefix_figures(self._batches)
        if scenario.name == "chat":
            figures["turns"] = turn_figures(self._conversations)
        if scenario.name == "grammar":
            figures |= grammar_figures(self._free, self._batches)
        if self._pid is not None:
            figures["peak_rss_mb"] = peak_rss_mb(self._pid)
        return figures


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
    """Run the scenario `repeat` times on one server."""
    measurement = Measurement(scenario, target, pid)
    async with new_session(timeout) as session:
        await measurement.warm_up(session, seed, warmup)
        for number in range(repeat):
            await measurement.add_batch(session, f"{seed}/{number}")
    return {"seed": seed, **measurement.figures()}


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
    first = [await ask(0)] if scenario.first_alone else []
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
    """Replay conversations. Returns the batch of all turns, and the samples of each completed
    conversation.
    """

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
