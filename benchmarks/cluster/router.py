"""What the router costs, what it saves, and what a killed backend costs its clients.

    python -m benchmarks.cluster.router overhead   # with and without the router, alternating
    python -m benchmarks.cluster.router prefixes   # prompt tokens computed, by policy, two replicas
    python -m benchmarks.cluster.router kills      # 32 streams over HTTP while engines are killed;
                                                   # --config FILE: those of its first model

Each prints one JSON line and exits with 1 if its bar is missed.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client import CollectorRegistry

from benchmarks.prompts import words
from engine.backends.base import EventFeed, InferenceBackend
from engine.backends.factory import make_backend
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    GenerationContext,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing.metrics import RouterMetrics
from engine.routing.policies import make_policy
from engine.routing.replica import Member, Replica
from engine.routing.route import Route
from engine.routing.router import Router

MAX_ADDED_P50_MS = 2.0
MIN_THROUGHPUT_RATIO = 0.95
MAX_RECOMPUTED_RATIO = 0.6
MAX_END_S = 5.0
MAX_RETURN_S = 300  # some engines take minutes to load
LAUNCHER = "engine.backends.external.launcher"
NUM_STREAMS = 32


def router_over(policy: str, *backends: InferenceBackend) -> Router:
    replicas = [
        Replica(f"native#{number}", "native", each) for number, each in enumerate(backends, 1)
    ]
    route = Route("m", [Member(each, 1.0) for each in replicas], policy, make_policy(policy))
    return Router(replicas, [route], RouterMetrics(CollectorRegistry()))


def native(model: str, **options: Any) -> InferenceBackend:
    return make_backend("native", model, {"backend_args": {"affinity": "off", **options}})


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def collect(
    backend: InferenceBackend, request: ChatRequest | CompletionRequest
) -> list[Event]:
    """All events of a request, pushed if the backend supports it."""
    is_chat = isinstance(request, ChatRequest)
    stream = backend.chat(request) if is_chat else backend.complete(request)
    events: list[Event] = []
    assert isinstance(stream, EventFeed)
    await stream.feed(events.append)
    return events


class Asker:
    """Sends completions with new prompts."""

    def __init__(self) -> None:
        self._count = 0

    async def __call__(self, backend: InferenceBackend, num_words: int, max_tokens: int) -> float:
        """The seconds that one completion took."""
        self._count += 1
        context = GenerationContext(request_id=f"r{self._count}", params=params(max_tokens))
        prompt = words(num_words, "overhead", self._count)
        began = time.perf_counter()
        await collect(backend, CompletionRequest(context=context, prompt=prompt))
        return time.perf_counter() - began


async def overhead(model: str, rounds: int) -> dict[str, Any]:
    """Query one backend with and without the router, alternating."""
    backend = native(model)
    router = router_over("prefix", backend)
    await router.start()
    ask = Asker()
    ways: dict[str, InferenceBackend] = {"direct": backend, "router": router}
    latency: dict[str, list[float]] = {name: [] for name in ways}
    rate: dict[str, list[float]] = {name: [] for name in ways}
    # CPU time of this process, of all requests.
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(8):
            await ask(backend, 32, 2)
        for number in range(rounds * 20):
            for name in sorted(ways, reverse=number % 2 == 0):
                latency[name].append(await ask(ways[name], 32, 1))
        for number in range(rounds * 4):
            for name in sorted(ways, reverse=number % 2 == 0):
                began, cpu_began = time.perf_counter(), time.process_time()
                await asyncio.gather(*(ask(ways[name], 16, 32) for _ in range(NUM_STREAMS)))
                rate[name].append(NUM_STREAMS * 32 / (time.perf_counter() - began))
                cpu_s[name].append(time.process_time() - cpu_began)
    finally:
        await router.stop()
    p50_ms = {name: statistics.median(each) * 1e3 for name, each in latency.items()}
    pairs = zip(latency["router"], latency["direct"], strict=True)
    added = statistics.median(ours - theirs for ours, theirs in pairs) * 1e3
    rates = {name: statistics.median(each) for name, each in rate.items()}
    ratio = rates["router"] / rates["direct"]
    return {
        "p50_ms": {name: round(value, 3) for name, value in p50_ms.items()},
        "added_p50_ms": round(added, 3),
        "tokens_per_s": {name: round(value, 1) for name, value in rates.items()},
        "throughput_ratio": round(ratio, 4),
        "frontend_cpu_ms_per_request": {
            name: round(statistics.median(each) / NUM_STREAMS * 1e3, 3)
            for name, each in cpu_s.items()
        },
        "ok": added < MAX_ADDED_P50_MS and ratio > MIN_THROUGHPUT_RATIO,
    }


async def prefixes(model: str, rounds: int) -> dict[str, Any]:
    """16 conversations of 8 turns each, in random order, over two replicas."""
    computed = {}
    for policy in ("round_robin", "prefix"):
        router = router_over(policy, native(model, threads=1), native(model, threads=1))
        await router.start()
        try:
            computed[policy] = await _converse(router)
        finally:
            await router.stop()
    ratio = computed["prefix"] / computed["round_robin"]
    return {
        "computed_tokens": computed,
        "ratio": round(ratio, 4),
        "ok": ratio <= MAX_RECOMPUTED_RATIO,
    }


async def _converse(router: Router) -> int:
    """Number of prompt tokens that were not in the cache of the chosen replica."""
    rng = random.Random(7)
    talks: list[list[dict[str, str]]] = [[] for _ in range(16)]
    order = [number for number in range(16) for _ in range(8)]
    rng.shuffle(order)
    total = 0
    for position, number in enumerate(order):
        talk = talks[number]
        talk.append({"role": "user", "content": words(80, "talk", position)})
        context = GenerationContext(request_id=f"t{position}", params=params(16))
        events = await collect(router, ChatRequest(context=context, messages=tuple(talk)))
        said = "".join(event.text for event in events if isinstance(event, TextEvent))
        talk.append({"role": "assistant", "content": said})
        usage = events[-1]
        assert isinstance(usage, UsageEvent)
        total += usage.prompt_tokens - usage.cached_tokens
    return total


TOML = """
[server]
port = 0
[backends.native]
kind = "native"
model = "{model}"
replicas = 3
backend_args = {{ threads = 1 }}
[models.m]
backends = ["native"]
policy = "least_loaded"
"""


class Streams:
    """Clients that stream without a pause. Records when each request began and how it ended."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.open_since: dict[int, float] = {}
        self.num_done = 0
        self.num_errors = 0
        self.error_at = 0.0  # time of the last error
        self.malformed: list[str] = []
        self.is_over = False
        self._count = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            self._count += 1
            number = self._count
            self.open_since[number] = time.monotonic()
            await self._stream(client, number)
            del self.open_since[number]

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        text = {"prompt": f"Story {number}:", "max_tokens": 24, "ignore_eos": True}
        body = {"model": self.model, "stream": True} | text
        async with client.stream("POST", self.url, json=body) as reply:
            content = (await reply.aread()).decode()
        last = content.strip().split("\n\n")[-1].removeprefix("data: ")
        if reply.status_code == 200 and last == "[DONE]":
            self.num_done += 1
        elif "error" in json.loads(last):
            self.num_errors += 1
            self.error_at = time.monotonic()
            await asyncio.sleep(0.05)
        else:
            self.malformed.append(last[:200])


async def kills(model: str, rounds: int, config: Path | None = None) -> dict[str, Any]:
    """Kill ten engines under 32 streams, then the server itself."""
    continues = config is None
    with tempfile.TemporaryDirectory() as folder:
        if config is None:
            config = Path(folder) / "engine.toml"
            config.write_text(TOML.format(model=model), encoding="utf-8")
        argv = [sys.executable, "-m", "engine.cli.main", "serve", "--config", str(config)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = await asyncio.to_thread(_ready_url, server)
            # Keep reading the server's log: a full pipe would block the server.
            reading = asyncio.create_task(asyncio.to_thread(server.stderr.read))
            try:
                figures = await _kill_engines(url, server.pid, rounds, continues)
                children = psutil.Process(server.pid).children(recursive=True)
            finally:
                server.kill()
            await reading
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 5)
    figures["children_after_sigkill"] = len(alive)
    figures["ok"] = figures["ok"] and not alive
    return figures


def _ready_url(server: "subprocess.Popen[str]") -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if "Ready in" in line:
            return line.split(" at ")[1].strip().removesuffix("/v1")
    raise SystemExit("the server did not start")


def _engines(server_pid: int) -> list[int]:
    """One process per backend: the engine itself, not its launcher."""
    children = psutil.Process(server_pid).children()
    inner = [each.children() if LAUNCHER in each.cmdline() else [each] for each in children]
    return [found[0].pid for found in inner if found]


async def _kill_engines(url: str, server_pid: int, count: int, continues: bool) -> dict[str, Any]:
    errors, ends, returns = [], [], []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def first_model() -> dict[str, Any]:
            told = (await client.get(f"{url}/v1/admin/routes")).json()
            first: dict[str, Any] = told["models"][0]
            return first

        async def backends() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await first_model())["backends"]
            return found

        async def all_ready() -> bool:
            return all(each["state"] == "ready" for each in await backends())

        streams = Streams(f"{url}/v1/completions", (await first_model())["id"])
        tasks = [asyncio.create_task(streams.run(client)) for _ in range(NUM_STREAMS)]
        dead: list[int] = []
        for number in range(count):
            await asyncio.sleep(2.0)
            victim = min(_engines(server_pid), key=lambda pid: (pid in dead, pid))  # the oldest
            before = set(streams.open_since)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            dead.append(victim)
            await _until(lambda: _async(not before & set(streams.open_since)))  # noqa: B023
            ends.append(time.monotonic() - began)
            errors.append(max(0.0, streams.error_at - began))
            await _until(all_ready)
            returns.append(time.monotonic() - began)
            told = f"errors after {errors[-1]:.2f} s, ended after {ends[-1]:.2f} s"
            print(f"kill {number + 1}: {told}", file=sys.stderr)
        streams.is_over = True
        await asyncio.gather(*tasks)
        restarts = sum(each["restarts"] for each in await backends())
    # Requests of our own engines continue. Those of other engines end with an error, and soon.
    ended_well = not streams.num_errors if continues else max(ends) < MAX_END_S
    is_good = not streams.malformed and ended_well and restarts == count
    return {
        "kills": count,
        "worst_error_s": round(max(errors), 2),
        "worst_end_s": round(max(ends), 2),
        "worst_return_s": round(max(returns), 2),
        "completed": streams.num_done,
        "errors": streams.num_errors,
        "malformed": streams.malformed,
        "ok": is_good,
    }


async def _async(value: bool) -> bool:
    return value


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + MAX_RETURN_S
    while not await condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not happen within {MAX_RETURN_S} s")
        await asyncio.sleep(0.02)


def main() -> None:
    measures = {"overhead": (overhead, 5), "prefixes": (prefixes, 1), "kills": (kills, 10)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measure", choices=measures)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, help="rounds of overhead, or kills")
    parser.add_argument("--config", type=Path, help="whose engines to kill; default: native ones")
    options = parser.parse_args()
    measure, usual = measures[options.measure]
    more = {"config": options.config} if options.config else {}
    figures = asyncio.run(measure(options.model, options.rounds or usual, **more))
    print(json.dumps({"measure": options.measure, "model": options.model} | figures))
    sys.exit(0 if figures["ok"] else 1)


if __name__ == "__main__":
    main()
