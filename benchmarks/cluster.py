"""What nodes cost, what placement saves, and what the loss of a node costs.

    python -m benchmarks.cluster decisions   # 1,000 stand-in nodes and 100,000 sessions
    python -m benchmarks.cluster wire        # two network namespaces (needs root): routed or direct
    python -m benchmarks.cluster prefixes    # hit rate over two nodes, 8 tenants x 1,024 tokens
    python -m benchmarks.cluster kills       # kill -9 of a node under 64 streams

`decisions` uses no network and no engine. `wire` uses engines that compute nothing, at a pace. The
others use the default model. Each prints one JSON line and exits with 1 if its bar is missed.
"""

import argparse
import asyncio
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.frontend import free_port
from benchmarks.prompts import words

MODEL = "smollm2-135m-instruct"
MAX_DECISION_US = 100.0
MAX_ROUTER_BYTES = 2**30
MAX_ADDED_TTFT_MS = 2.0
MAX_ADDED_P99_MS = 1.0
MIN_HIT_RATIO = 0.95
MAX_EJECTION_S = 1.0
MAX_RETURN_S = 2.0
NUM_STREAMS = 64
STEP_MS = 20.0
NAMESPACES = ("engine-bench-a", "engine-bench-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


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


# --- servers and nodes ---


def run_command(arguments: list[str]) -> None:
    """Run an `engine` command with an engine process that computes nothing."""
    from engine.backends.custom.ipc import engine_process
    from engine.cli import ahead
    from engine.cli.main import app

    engine_process.WORKER_MODULE = "benchmarks.null_engine"
    ahead.EngineProcess = functools.partial(  # type: ignore[misc,assignment]
        ahead.EngineProcess, "benchmarks.null_engine"
    )
    app(arguments, prog_name="engine")


class Processes:
    """The servers and nodes of a measurement. They end with it."""

    def __init__(self, folder: Path, stack: ExitStack, real: bool) -> None:
        self._folder = folder
        self._stack = stack
        self._real = real
        self.token = folder / "token"
        self.token.write_text("benchmark-token-0123456789\n")
        self.token.chmod(0o600)

    def start(self, *arguments: str, namespace: str | None = None) -> subprocess.Popen[bytes]:
        module = "engine.cli.main" if self._real else "benchmarks.cluster"
        hidden = () if self._real else ("--command",)
        argv = [sys.executable, "-m", module, *hidden, *arguments]
        if namespace is not None:
            argv = ["ip", "netns", "exec", namespace, *argv]
        env = os.environ | {
            "NULL_STEP_MS": str(STEP_MS),
            "LLM_ENGINE_SERVER__NODE_TOKEN_FILE": str(self.token),
        }
        log = self._stack.enter_context(
            (self._folder / f"{len(os.listdir(self._folder))}.log").open("w")
        )
        process = subprocess.Popen(argv, env=env, stderr=log, start_new_session=True)
        self._stack.callback(end, process)
        return process

    def serve(self, port: int, *options: str, namespace: str | None = None) -> Any:
        host = ADDRESSES[0] if namespace else "127.0.0.1"
        base = ("serve", MODEL, "--port", str(port), "--host", host, "--insecure-no-auth")
        return self.start(*base, *options, namespace=namespace)

    def join(self, *urls: str, name: str, namespace: str | None = None) -> Any:
        base = ("node", "join", *urls, "--token-file", str(self.token), "--name", name)
        return self.start(*base, "--model", MODEL, "--threads", "1", namespace=namespace)

    def nodes(self, url: str) -> list[dict[str, Any]]:
        key = self.token.read_text().strip()
        reply = httpx.get(f"{url}/v1/admin/nodes", headers={"authorization": f"Bearer {key}"})
        found: list[dict[str, Any]] = reply.json()["nodes"]
        return found


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(condition: Any, seconds: float = 120.0) -> float:
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except httpx.HTTPError:
            pass
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.01)


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[float]:
    """The times at which chunks of a streamed answer with text arrive."""
    fields = {"model": MODEL, "stream": True, "temperature": 0.0} | body
    async with client.stream("POST", f"{url}/v1/completions", json=fields) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                if event["choices"] and event["choices"][0]["text"]:
                    yield time.perf_counter()


# --- wire ---


@contextmanager
def namespaces() -> Iterator[None]:
    """Two network namespaces with a cable between them."""
    one, two = NAMESPACES
    commands = [f"ip netns add {one}", f"ip netns add {two}"]
    commands.append(f"ip link add veth-a netns {one} type veth peer name veth-b netns {two}")
    for name, link, address in zip(NAMESPACES, ("veth-a", "veth-b"), ADDRESSES, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev {link}"]
        commands += [f"ip -n {name} link set {link} up", f"ip -n {name} link set lo up"]
    try:
        for each in commands:
            subprocess.run(each.split(), check=True)
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def wire(rounds: int) -> dict[str, Any]:
    """A server with its own engine, and one whose engine is in another namespace, in turn."""
    with namespaces(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = Processes(Path(folder), stack, real=False)
        one, two = NAMESPACES
        processes.serve(8001, namespace=one)
        processes.serve(8002, "--backend", "nodes", namespace=one)
        processes.join(f"http://{ADDRESSES[0]}:8002", name="far", namespace=two)
        argv = ["ip", "netns", "exec", one, sys.executable, "-m", "benchmarks.cluster"]
        told = subprocess.run(
            [*argv, "--measure", str(rounds)], check=True, stdout=subprocess.PIPE
        ).stdout
    found: dict[str, Any] = json.loads(told)
    return found


def measure(rounds: int) -> dict[str, Any]:
    """The client of `wire`, which runs in the namespace of both servers."""
    urls = [f"http://{ADDRESSES[0]}:{port}" for port in (8001, 8002)]
    body = {"prompt": "Go on", "max_tokens": 32, "ignore_eos": True}
    for url in urls:
        wait_for(lambda url=url: httpx.get(f"{url}/readyz").status_code == 200)
    asked: dict[str, tuple[list[float], list[float]]] = {url: ([], []) for url in urls}

    async def run() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            for number in range(rounds):
                for url in urls if number % 2 else reversed(urls):
                    began = last = time.perf_counter()
                    first, gaps = asked[url]
                    async for at in stream(client, url, body):
                        (gaps if last != began else first).append(at - last)
                        last = at

    asyncio.run(run())
    (direct_first, direct_gaps), (routed_first, routed_gaps) = asked.values()
    added_ttft = (statistics.median(routed_first) - statistics.median(direct_first)) * 1e3
    p99 = [sorted(each)[len(each) * 99 // 100] * 1e3 for each in (direct_gaps, routed_gaps)]
    return {
        "rounds": rounds,
        "direct_ttft_ms": round(statistics.median(direct_first) * 1e3, 2),
        "added_ttft_ms": round(added_ttft, 2),
        "direct_p99_gap_ms": round(p99[0], 2),
        "added_p99_gap_ms": round(p99[1] - p99[0], 2),
        "ok": added_ttft <= MAX_ADDED_TTFT_MS and p99[1] - p99[0] <= MAX_ADDED_P99_MS,
    }


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


def prefixes(num_turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = Processes(Path(folder), stack, real=True)
        ports = [free_port(), free_port()]
        one, two = (f"http://127.0.0.1:{port}" for port in ports)
        processes.serve(ports[0], "--threads", "1")
        processes.serve(ports[1], "--backend", "nodes")
        for name in ("first", "second"):
            processes.join(two, name=name)
        wait_for(lambda: httpx.get(f"{one}/readyz").status_code == 200)
        wait_for(lambda: len(processes.nodes(two)) == 2)
        alone, routed = hit_rate(one, num_turns), hit_rate(two, num_turns)
        placed = {each["name"]: each["requests"] for each in processes.nodes(two)}
    return {
        "alone": round(alone, 4),
        "two_nodes": round(routed, 4),
        "requests": placed,
        "ok": routed >= MIN_HIT_RATIO * alone and all(placed.values()),
    }


def kills(num_tokens: int) -> dict[str, Any]:
    """Kill one of two nodes under load: no request may fail. Then start it again."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        processes = Processes(Path(folder), stack, real=True)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        processes.serve(port, "--backend", "nodes")
        victims = [processes.join(url, name=name) for name in ("first", "second")]
        wait_for(lambda: len(processes.nodes(url)) == 2)

        async def one(client: httpx.AsyncClient, number: int) -> int:
            body = {"prompt": f"Tell me about {number}.", "max_tokens": num_tokens}
            return len([at async for at in stream(client, url, body | {"ignore_eos": True})])

        async def run() -> tuple[list[int | BaseException], float]:
            limits = httpx.Limits(max_connections=NUM_STREAMS)
            async with httpx.AsyncClient(timeout=600, limits=limits) as client:
                asked = [asyncio.create_task(one(client, each)) for each in range(NUM_STREAMS)]
                await asyncio.sleep(3.0)
                os.killpg(victims[1].pid, signal.SIGKILL)
                ejected = await asyncio.to_thread(
                    wait_for, lambda: [n["name"] for n in processes.nodes(url)] == ["first"]
                )
                return await asyncio.gather(*asked, return_exceptions=True), ejected

        answers, ejected_s = asyncio.run(run())
        failed = [repr(each) for each in answers if isinstance(each, BaseException)]
        processes.join(url, name="second")
        back_s = wait_for(lambda: len(processes.nodes(url)) == 2)
    return {
        "streams": NUM_STREAMS,
        "failed": failed[:3],
        "num_failed": len(failed),
        "ejected_s": round(ejected_s, 3),
        "back_s_with_start": round(back_s, 2),
        "ok": not failed and ejected_s <= MAX_EJECTION_S,
    }


def main() -> int:
    if sys.argv[1:2] == ["--command"]:
        run_command(sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("decisions", "wire", "prefixes", "kills"))
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    figure = {
        "decisions": lambda: decisions(given.nodes, given.sessions),
        "wire": lambda: wire(given.rounds),
        "prefixes": lambda: prefixes(given.turns),
        "kills": lambda: kills(given.tokens),
    }[given.what]()
    print(json.dumps({given.what: figure}))
    return 0 if figure["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
