"""What nodes cost, what placement saves, and what the loss of a node costs.

    python -m benchmarks.cluster.nodes decisions  # 1,000 stand-in nodes, 100,000 sessions
    python -m benchmarks.cluster.nodes wire       # a node beside a local engine: first token, gaps
    python -m benchmarks.cluster.nodes prefixes   # hit rate: two nodes, 8 tenants x 1,024 tokens
    python -m benchmarks.cluster.nodes kills      # kill -9 of a node under 64 streams; its return
    python -m benchmarks.cluster.nodes prefill    # prefill and decode apart, beside two plain nodes
    python -m benchmarks.cluster.nodes netns      # wire, prefixes and kills between two namespaces

`decisions` uses no network and no engine. `wire` uses engines that compute nothing, at a pace. The
others use the default model. `netns` needs root and iproute2: the server and its client are in one
network namespace, and the nodes in another. Each prints one JSON line for each measurement and
exits with 1 if a bar is missed.
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
import time
from array import array
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import httpx
import psutil

from benchmarks.cluster.processes import (
    ADDRESSES,
    MODEL,
    NAMESPACES,
    Processes,
    namespaces,
    stream,
    wait_for,
    wait_until_ready,
)
from benchmarks.paired import added_median, added_p99
from benchmarks.prompts import words

MAX_DECISION_US = 100.0
MAX_ROUTER_BYTES = 2**30
MAX_ADDED_TTFT_MS = 2.0
MAX_ADDED_P99_MS = 1.0
MIN_HIT_RATIO = 0.95
MAX_EJECTION_S = 1.0
MAX_RETURN_S = 2.0
NUM_STREAMS = 64
NUM_WARM_ROUNDS = 5
LOOPBACK = "127.0.0.1"


# --- decisions ---


class StandIn:
    """A node that only has a load."""

    def __init__(self) -> None:
        self.load = 0
        self.fullness = 0.0


def decisions(num_nodes: int, num_sessions: int) -> dict[str, Any]:
    """Route two turns of each session. A session has the system prompt of its tenant, and a first
    turn of its own; nodes report what they were sent, and evict nothing.
    """
    from engine.core.interfaces.request import CachedPrefixes, GenerateRequest, SamplingParams
    from engine.core.prefix_hashes import prompt_hashes
    from engine.routing.nodes.request_router import RequestRouter

    rng = random.Random(0)
    before = psutil.Process().memory_info().rss
    nodes = [StandIn() for _ in range(num_nodes)]
    router = RequestRouter(rng)
    for node in nodes:
        router.set_usable(router.add(node), True)
    tenants = [array("H", rng.randbytes(2 * 512)) for _ in range(100)]
    params = SamplingParams()
    seconds, num_stayed, open_requests = [], 0, []
    for number in range(num_sessions):
        tenant = number % len(tenants)
        prompt = (*tenants[tenant], *array("H", rng.randbytes(2 * 512)))
        request = GenerateRequest(
            request_id=str(number), prompt=prompt, params=params, salt=f"tenant-{tenant}"
        )
        found = []
        for _ in range(2):
            began = time.thread_time()  # CPU time: other programs may run here
            choice = router.route_request(request)
            seconds.append(time.thread_time() - began)
            assert choice is not None
            found.append(choice.engine)
            nodes[choice.engine].load += 1
            open_requests.append(choice.engine)
        num_stayed += found[0] == found[1]
        router.update_routing_table(
            found[0], CachedPrefixes(tuple(prompt_hashes(request.salt, prompt)))
        )
        while len(open_requests) > 8 * num_nodes:
            nodes[open_requests.pop(rng.randrange(len(open_requests)))].load -= 1
    seconds.sort()
    used = psutil.Process().memory_info().rss - before
    p99 = seconds[len(seconds) * 99 // 100]
    loads = [node.load for node in nodes]
    return {
        "nodes": num_nodes,
        "sessions": num_sessions,
        "prefixes": len(router.table),
        "decision_p50_us": round(seconds[len(seconds) // 2] * 1e6, 1),
        "decision_p99_us": round(p99 * 1e6, 1),
        "second_turn_on_same_node": round(num_stayed / num_sessions, 4),
        "max_load": max(loads),
        "mean_load": round(statistics.mean(loads), 1),
        "router_mib": round(used / 2**20, 1),
        "ok": seconds[len(seconds) // 2] * 1e6 < MAX_DECISION_US and used < MAX_ROUTER_BYTES,
    }


# --- wire ---


def wire(host: str, far: str | None, rounds: int) -> dict[str, Any]:
    """A server with its own engine, and one whose engine is a node, in turn."""
    with ExitStack() as stack:
        processes = Processes(stack, host, far, is_null=True)
        urls = [processes.serve(), processes.serve("--backend", "nodes")]
        processes.join(urls[1], "far")
        for url in urls:
            wait_until_ready(url)
        asked = asyncio.run(_in_turn(urls, rounds))
    (direct_first, direct_gaps), (routed_first, routed_gaps) = asked.values()
    ttft = added_median(direct_first, routed_first)
    gaps = added_p99(direct_gaps, routed_gaps)
    return {
        "rounds": rounds,
        "direct_ttft_ms": round(statistics.median(direct_first) * 1e3, 2),
        "ttft": ttft,
        "p99_gap": gaps,
        "ok": ttft["added_ms"] <= MAX_ADDED_TTFT_MS and gaps["added_ms"] <= MAX_ADDED_P99_MS,
    }


async def _in_turn(
    urls: list[str], rounds: int
) -> dict[str, tuple[list[float], list[list[float]]]]:
    """The times to the first token and between tokens, by server, for each round. The order is the
    same in each round: two requests in a row would find an engine that waits for its next step.
    """
    body = {"prompt": "Go on", "max_tokens": 32, "ignore_eos": True}
    asked: dict[str, tuple[list[float], list[list[float]]]] = {url: ([], []) for url in urls}
    async with httpx.AsyncClient(timeout=60) as client:
        for number in range(-NUM_WARM_ROUNDS, rounds):
            for url in urls:
                times = [time.perf_counter()]
                times += [at async for at in stream(client, url, body)]
                if number >= 0:
                    first, *gaps = (later - before for before, later in pairwise(times))
                    asked[url][0].append(first)
                    asked[url][1].append(gaps)
    return asked


# --- prefixes and kills, on the default model ---


def hit_rate(url: str, num_turns: int) -> float:
    """The share of prompt tokens that came from a cache: 8 tenants with 1,024 tokens each."""
    prompts = [words(1_000, each) for each in range(8)]
    cached = total = 0
    order = [(tenant, turn) for turn in range(num_turns) for tenant in range(8)]
    for tenant, turn in order:
        body = {"model": MODEL, "max_tokens": 2, "prompt": f"{prompts[tenant]} {turn}"}
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["usage"]
        total += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached / total


def prefixes(host: str, far: str | None, num_turns: int) -> dict[str, Any]:
    with ExitStack() as stack:
        processes = Processes(stack, host, far)
        one = processes.serve("--threads", "1")
        two = processes.serve("--backend", "nodes")
        for name in ("first", "second"):
            processes.join(two, name)
        wait_until_ready(one)
        processes.wait_for_nodes(two, "first", "second")
        alone, routed = hit_rate(one, num_turns), hit_rate(two, num_turns)
        placed = {name: each["requests"] for name, each in processes.nodes(two).items()}
    return {
        "alone": round(alone, 4),
        "two_nodes": round(routed, 4),
        "requests": placed,
        "ok": routed >= MIN_HIT_RATIO * alone and all(placed.values()),
    }


def kills(host: str, far: str | None, num_tokens: int) -> dict[str, Any]:
    """Kill one of two nodes under load: no request may fail. Then start it again, and wait until
    it gets requests.
    """
    with ExitStack() as stack:
        processes = Processes(stack, host, far)
        url = processes.serve("--backend", "nodes")
        victims = [processes.join(url, name) for name in ("first", "second")]
        processes.wait_for_nodes(url, "first", "second")

        async def one(client: httpx.AsyncClient, number: int) -> int:
            body = {"prompt": f"Tell me about {number}.", "max_tokens": num_tokens}
            return len([at async for at in stream(client, url, body | {"ignore_eos": True})])

        async def run() -> tuple[list[int | BaseException], float]:
            limits = httpx.Limits(max_connections=NUM_STREAMS)
            async with httpx.AsyncClient(timeout=600, limits=limits) as client:
                asked = [asyncio.create_task(one(client, each)) for each in range(NUM_STREAMS)]
                await asyncio.sleep(3.0)
                os.killpg(victims[1].pid, signal.SIGKILL)
                ejected = await asyncio.to_thread(processes.wait_for_nodes, url, "first")
                return await asyncio.gather(*asked, return_exceptions=True), ejected

        answers, ejected_s = asyncio.run(run())
        failed = [repr(each) for each in answers if isinstance(each, BaseException)]
        processes.join(url, "back")
        wait_for(lambda: "The engine is ready" in processes.log("back").read_text())
        back_s = processes.wait_for_nodes(url, "first", "back")
    return {
        "streams": NUM_STREAMS,
        "failed": failed[:3],
        "num_failed": len(failed),
        "ejected_s": round(ejected_s, 3),
        "back_s": round(back_s, 3),
        "ok": not failed and ejected_s <= MAX_EJECTION_S and back_s <= MAX_RETURN_S,
    }


# --- prefill and decode apart ---


def prefill(host: str, far: str | None, num_prompts: int) -> dict[str, Any]:
    """Long prompts beside short streams: on a prefill and a decode node, and on two plain nodes.
    All texts must be those of one engine.
    """
    with ExitStack() as stack:
        processes = Processes(stack, host, far)
        alone = processes.serve("--threads", "1")
        apart = processes.serve("--backend", "nodes")
        plain = processes.serve("--backend", "nodes")
        for role in ("prefill", "decode"):
            processes.join(apart, role, "--role", role)
        for name in ("first", "second"):
            processes.join(plain, name)
        wait_until_ready(alone)
        processes.wait_for_nodes(apart, "prefill", "decode")
        processes.wait_for_nodes(plain, "first", "second")
        expected = [_text(alone, number) for number in range(num_prompts)]
        asyncio.run(_beside(apart, 2, 100))  # measures what a handover costs
        found = {"apart": [], "plain": []}
        texts = {}
        for turn in range(2):
            for name, url in (("apart", apart), ("plain", plain)):
                found[name] += asyncio.run(_beside(url, num_prompts // 2, 200 + 50 * turn))
        for name, url in (("apart", apart), ("plain", plain)):
            texts[name] = [_text(url, number) for number in range(num_prompts)]
        metrics = httpx.get(f"{apart}/metrics").text
    moved = [line for line in metrics.splitlines() if line.startswith("engine_prefill_node_pro")]
    p99 = {name: sorted(gaps)[len(gaps) * 99 // 100] * 1e3 for name, gaps in found.items()}
    return {
        "prompts": num_prompts,
        "p99_gap_ms": {name: round(each, 1) for name, each in p99.items()},
        "sent_to_prefill": moved,
        "equal": {name: each == expected for name, each in texts.items()},
        "ok": all(each == expected for each in texts.values()),
    }


def _text(url: str, number: int) -> str:
    body = {"model": MODEL, "prompt": words(1_200, number), "max_tokens": 24, "temperature": 0.0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
    text: str = answer["choices"][0]["text"]
    return text


async def _beside(url: str, num_prompts: int, first: int) -> list[float]:
    """The times between tokens of two streams, while long prompts come one after the other."""
    async with httpx.AsyncClient(timeout=600) as client:
        gaps: list[float] = []

        async def chat(number: int) -> None:
            body = {"prompt": f"Tell me about {number}.", "max_tokens": 400, "ignore_eos": True}
            last = None
            async for at in stream(client, url, body):
                gaps.extend(() if last is None else (at - last,))
                last = at

        streams = [asyncio.create_task(chat(first + each)) for each in range(2)]
        for number in range(num_prompts):
            body = {"prompt": words(1_200, first + number), "max_tokens": 2}
            _ = [at async for at in stream(client, url, body)]
        await asyncio.gather(*streams)
        return gaps


# --- the command ---


def netns(given: argparse.Namespace) -> int:
    """Measure with the nodes in another network namespace."""
    status = 0
    inside = [
        "ip",
        "netns",
        "exec",
        NAMESPACES[0],
        sys.executable,
        "-m",
        "benchmarks.cluster.nodes",
    ]
    sizes = {"wire": ("--rounds", given.rounds), "prefixes": ("--turns", given.turns)}
    with namespaces():
        for what in ("wire", "prefixes", "kills"):
            option, size = sizes.get(what, ("--tokens", given.tokens))
            where = ["--host", ADDRESSES[0], "--far", NAMESPACES[1]]
            argv = [*inside, what, *where, option, str(size)]
            status |= subprocess.run(argv, check=False).returncode
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ("decisions", "wire", "prefixes", "kills", "prefill", "netns")
    parser.add_argument("what", choices=names)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--host", default=LOOPBACK, help="address of the servers")
    parser.add_argument("--far", help="network namespace of the nodes")
    given = parser.parse_args()
    if given.what == "netns":
        return netns(given)
    where = given.host, given.far
    figure = {
        "decisions": lambda: decisions(given.nodes, given.sessions),
        "wire": lambda: wire(*where, given.rounds),
        "prefixes": lambda: prefixes(*where, given.turns),
        "kills": lambda: kills(*where, given.tokens),
        "prefill": lambda: prefill(*where, given.prompts),
    }[given.what]()
    print(json.dumps({given.what: figure}), flush=True)
    return 0 if figure["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
