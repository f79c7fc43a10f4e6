"""R11: the engine process is killed or frozen while it answers clients, and every answer continues.

A pause of a stream may take the time until an engine is ready, 1.2 times the prefill of all open
tokens, and half a second. The prefill is measured after each blow, with the same tokens and without
cached ones. With a second replica, no engine has to become ready. Every second server has a disk
tier. One request kills every engine that runs it. It ends with an error, and its neighbours do not.
"""

import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from engine.core import faults
from engine.core.faults import Fault
from engine.ipc.engine_process import WORKER_MODULE
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.served_engine import MODEL, Served, percentile, served_engine
from tests.scoreboard.streams import CHAT, COMPLETIONS, Reply, all_begun, ask, completion, look

NUM_KILLS, NUM_STOPS, NUM_REPLICA_KILLS, NUM_CLIENTS = 50, 10, 8, 32
EACH_SERVER = 4  # deaths; one more within a minute would start the pause between restarts
BACK_WITHIN_S = 90.0  # give up after this time
PATIENCE_S = 600.0  # of a client; a busy machine may take minutes
PREFILL_FACTOR, SLACK_S = 1.2, 0.5
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
POISON = " zebra"
REPLICAS = """
[backends.pair]
kind = "native"
model = "{model}"
replicas = 2
[models."{model}"]
backends = ["pair"]
policy = "least_loaded"
"""

Blow = Literal["kill", "stop", "freeze"]


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
        *(
            ask(served, *question(client), reply=reply, patience_s=PATIENCE_S)
            for client, reply in enumerate(replies)
        )
    )


async def undisturbed(served: Served) -> list[Reply]:
    replies = [Reply() for _ in range(NUM_CLIENTS)]
    await answers(served, replies)
    assert all(reply.is_whole for reply in replies), [reply.problem for reply in replies]
    return replies


async def most_begun(replies: list[Reply]) -> None:
    """Wait until two pieces of each reply have arrived. Some may have ended: drafts make the answer
    to a question that was asked before short.
    """
    while any(len(reply.times) < 2 and not reply.ended for reply in replies):
        await asyncio.sleep(0.01)
    assert not all(reply.ended for reply in replies), "all ended before all had begun"


@dataclass
class Pauses:
    """What the blows cost: for each long stream, its longest pause and how long it might last."""

    paused_s: list[float] = field(default_factory=list)
    allowed_s: list[float] = field(default_factory=list)
    first_good_s: list[float] = field(default_factory=list)  # beyond the load time
    ready_s: list[float] = field(default_factory=list)  # until an engine was ready again
    num_errors: int = 0

    @property
    def over_p95_s(self) -> float:
        pairs = zip(self.paused_s, self.allowed_s, strict=True)
        return percentile([paused - allowed for paused, allowed in pairs], 0.95)


def prefix(client: int, text: str) -> tuple[dict[str, Any], str]:
    """A request whose prompt is what a client has sent and received so far."""
    body, path = question(client)
    dropped = {"response_format", "tool_choice", "n", "logprobs", "stop", "stream"}
    body = {name: value for name, value in body.items() if name not in dropped}
    body["max_tokens"] = 1
    if path == COMPLETIONS:
        return body | {"prompt": body["prompt"] + text}, path
    return body | {"messages": [*body["messages"], {"role": "assistant", "content": text}]}, path


async def prefill_s(served: Served, replies: list[Reply], num_arrived: list[int]) -> float:
    """The seconds to prefill what was open when `num_arrived` pieces of each reply had arrived. How
    far answers were that are not streamed is not known. They count as the mean of the others.
    """
    shares = [
        count / len(reply.times) if len(reply.times) > 1 else None
        for reply, count in zip(replies, num_arrived, strict=True)
    ]
    mean = statistics.fmean(share for share in shares if share is not None)
    asked = []
    for client, (reply, share) in enumerate(zip(replies, shares, strict=True)):
        part = mean if share is None else share
        if part < 1:
            texts = [text[: round(part * len(text))] for text in reply.texts.values()]
            asked += [prefix(client, text) for text in texts]
    began = time.monotonic()
    for body, _ in asked:
        body["cache_salt"] = str(began)  # no tier and no earlier request has these blocks
    done = await asyncio.gather(*(ask(served, *each, patience_s=PATIENCE_S) for each in asked))
    assert all(reply.is_whole for reply in done), [reply.error for reply in done]
    return time.monotonic() - began


def strike(pid: int, blow: Blow) -> None:
    os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)


async def keep_frozen(pid: int) -> None:
    """Stop the process again each time it is woken, until it is killed."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)


async def until_ready(served: Served, pid: int, blow: Blow) -> float:
    """When the engine, or the one that replaces it, was ready."""
    if blow == "freeze":
        await keep_frozen(pid)
    until = time.monotonic() + BACK_WITHIN_S
    was_down = False
    while time.monotonic() < until:
        is_up = (await look(served, "/health")).status == 200
        if is_up and was_down:
            return time.monotonic()
        was_down = was_down or not is_up
        await asyncio.sleep(0.02)
    return float("inf")


class Load:
    """Clients of one server, and the right answers to them."""

    def __init__(self, run: Run, served: Served, pauses: Pauses) -> None:
        self._run, self._served, self._pauses = run, served, pauses
        self._load_s = self._answer_s = 0.0
        self._right: list[Reply] = []

    async def begin(self) -> None:
        self._load_s = self._served.samples()["engine_startup_seconds"]
        began = time.monotonic()
        self._right = await undisturbed(self._served)
        self._answer_s = time.monotonic() - began

    async def strike(
        self, number: int, blow: Blow, victim: Callable[[], int], has_spare: bool = False
    ) -> None:
        """Kill or stop the engine under load and check every client's answer. `victim` returns its
        process id. With `has_spare`, requests need not wait for the engine.
        """
        replies = [Reply() for _ in range(NUM_CLIENTS)]
        long = [r for client, r in enumerate(replies) if client % len(KINDS) < NUM_LONG_KINDS]
        asking = asyncio.create_task(answers(self._served, replies))
        await most_begun(long)
        await asyncio.sleep(self._answer_s * (number % 8) / 16)
        num_arrived = [len(reply.times) for reply in replies]
        pid = victim()
        strike(pid, blow)
        struck_at = time.monotonic()
        first_good = asyncio.create_task(first_good_reply(self._served))
        ready_s = 0.0
        if not has_spare:
            ready_s = await until_ready(self._served, pid, blow) - struck_at
        await asking
        self._judge(f"{blow} {number}", replies)
        self._pauses.first_good_s.append(await first_good - struck_at - self._load_s)
        # With a spare, only half of the requests were in the engine that was killed.
        compute_s = await prefill_s(self._served, replies, num_arrived) / (1 + has_spare)
        allowed_s = ready_s + PREFILL_FACTOR * compute_s + SLACK_S
        self._pauses.ready_s.append(ready_s)
        for reply in long:
            steps = zip(reply.times, reply.times[1:], strict=False)
            self._pauses.paused_s.append(
                max((later - before for before, later in steps), default=0)
            )
            self._pauses.allowed_s.append(allowed_s)

    def _judge(self, what: str, replies: list[Reply]) -> None:
        for client, (reply, expected) in enumerate(zip(replies, self._right, strict=True)):
            self._run.cases += 1
            if not reply.is_whole:
                self._pauses.num_errors += 1
                self._run.fail(f"{what}, client {client}: {reply.problem or reply.error}")
            elif (reply.texts, reply.scores) != (expected.texts, expected.scores):
                self._run.fail(f"{what}, client {client}: another text")


async def first_good_reply(served: Served) -> float:
    """When a new request was answered; infinite if it was refused."""
    reply = await ask(served, completion("Hello", max_tokens=1))
    return reply.ended if reply.is_whole else float("inf")


def blows(num_kills: int) -> list[Blow]:
    """Kills, with a SIGSTOP after every fifth. Half of the stopped engines can't be woken."""
    found: list[Blow] = []
    for number in range(num_kills):
        found.append("kill")
        if number % 5 == 4:
            found.append("freeze" if number % 10 == 4 else "stop")
    return found


def one_engine(run: Run, pauses: Pauses) -> None:
    planned = list(enumerate(blows(run.share(NUM_KILLS, 5))))
    for first in range(0, len(planned), EACH_SERVER):
        with tiered(is_on=first // EACH_SERVER % 2 == 1) as words, served_engine(*words) as served:
            load = Load(run, served, pauses)
            asyncio.run(load.begin())
            for number, blow in planned[first : first + EACH_SERVER]:
                asyncio.run(load.strike(number, blow, served.engine_pid))


@contextlib.contextmanager
def tiered(is_on: bool) -> Iterator[tuple[str, ...]]:
    """Arguments of a server with a disk tier, or none."""
    if not is_on:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="tier-") as name:
        disk, config = Path(name) / "kv", Path(name) / "engine.toml"
        disk.mkdir(mode=0o700)
        config.write_text(f'[cache.tiers]\ndisk_path = "{disk}"\n')
        yield "--config", str(config)


@contextlib.contextmanager
def served_pair() -> Iterator[Served]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(REPLICAS.format(model=MODEL))
        file.flush()
        with served_engine("--config", file.name, model=None) as served:
            served.wait_until(lambda: both_ready(served))
            yield served


def engines(served: Served) -> list[int]:
    """The engine processes, the oldest first."""
    children = psutil.Process(served.process.pid).children()
    found = [each for each in children if WORKER_MODULE in each.cmdline()]
    return [each.pid for each in sorted(found, key=lambda each: each.create_time())]


def both_ready(served: Served) -> bool:
    (model,) = served.get("/v1/admin/routes").json()["models"]
    return all(each["state"] == "ready" for each in model["backends"])


def two_replicas(run: Run, pauses: Pauses) -> None:
    with served_pair() as served:
        load = Load(run, served, pauses)
        asyncio.run(load.begin())
        for number in range(run.share(NUM_REPLICA_KILLS, 1)):
            asyncio.run(load.strike(number, "kill", lambda: engines(served)[0], has_spare=True))
            served.wait_until(lambda: both_ready(served))


def poisoned(run: Run) -> int:
    """A request kills every engine that runs it. Returns how many errors its clients got."""
    with served_engine() as served:
        body = {"model": MODEL, "prompt": POISON, "add_special_tokens": False}
        (token,) = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
    plan = Fault("forward", "exit", times=1 << 30, within=token)
    with served_engine(env=faults.environment(plan)) as served:
        return asyncio.run(_poison(run, served))


async def _poison(run: Run, served: Served) -> int:
    clients = [client for client in range(16) if client % len(KINDS) < NUM_LONG_KINDS]
    right = await asyncio.gather(*(ask(served, *question(client)) for client in clients))
    replies = [Reply() for _ in clients]
    pairs = zip(clients, replies, strict=True)
    asking = [asyncio.create_task(ask(served, *question(c), reply=r)) for c, r in pairs]
    await all_begun(replies)
    poison = await ask(served, completion(f"A{POISON}", max_tokens=8))
    await asyncio.gather(*asking)
    run.cases += len(clients) + 1
    if poison.is_whole or not poison.is_well_formed:
        run.fail(f"the poison: {poison.problem or poison.texts}")
    if [reply.texts for reply in replies] != [reply.texts for reply in right]:
        run.fail("the poison harmed its neighbours")
    run.notes["deaths_by_poison"] = served.samples()["engine_restarts_total"]
    return 0 if poison.error is None else 1


@figure(
    "R11",
    "kill -9 of the engine under 32 clients, fifty times, SIGSTOP ten times, kill -9 of one of two"
    " replicas, a request that kills: requests that ended with an error, or with another text",
    minutes=25,
    limits={
        "ended_with_error": at_most(0),
        "other_texts": at_most(0),
        "first_good_beyond_load_p95_s": at_most(10),
        "pause_over_allowed_p95_s": at_most(0),
        "replica_pause_over_allowed_p95_s": at_most(0),
        "poison_errors": at_most(1),
    },
    in_quick=False,
)
def killed_engine(run: Run) -> Values:
    alone, pair = Pauses(), Pauses()
    one_engine(run, alone)
    two_replicas(run, pair)
    poison_errors = poisoned(run)
    for name, each in (("", alone), ("replica_", pair)):
        for share in (0.5, 0.95):
            told = f"p{share * 100:.0f}_s"
            run.notes[f"{name}pause_{told}"] = round(percentile(each.paused_s, share), 2)
            run.notes[f"{name}allowed_{told}"] = round(percentile(each.allowed_s, share), 2)
    run.notes["restart_p50_s"] = round(percentile(alone.ready_s, 0.5), 2)
    return {
        "ended_with_error": alone.num_errors + pair.num_errors,
        "other_texts": len(run.failures) - alone.num_errors - pair.num_errors,
        "first_good_beyond_load_p95_s": percentile(alone.first_good_s, 0.95),
        "pause_over_allowed_p95_s": alone.over_p95_s,
        "replica_pause_over_allowed_p95_s": pair.over_p95_s,
        "poison_errors": poison_errors,
    }
