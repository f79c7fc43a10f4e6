"""Measures what a fine-tuning job costs the requests beside it, and how soon `cancel` frees it.

`python -m benchmarks.adapters.finetune` starts one server. Rounds of streams alternate: alone, and
while a job trains on the same cores. The figure is the 99th percentile of the time between two
tokens, beside a job over alone, of the median round. At the end the job is cancelled, and the time
until its process, its memory and its files are gone is printed.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.support.servers.served import ServedEngine, serve

JOBS = "/v1/fine_tuning/jobs"
FACTS = Path(__file__).parents[2] / "examples" / "finetune" / "facts.jsonl"


def gaps_of_stream(client: httpx.Client, number: int, num_tokens: int) -> list[float]:
    """The seconds between the tokens of one stream."""
    body = {
        "prompt": f"{number} stories begin",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    times = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def one_round(server: ServedEngine, options: argparse.Namespace, seed: int) -> list[float]:
    """Streams one after the other, so many at once, for some seconds. Returns all gaps."""
    client = httpx.Client(base_url=server.url, timeout=600)
    until = time.monotonic() + options.seconds

    def streams(first: int) -> list[float]:
        gaps = []
        for number in range(first, seed + 5000, options.streams):
            gaps += gaps_of_stream(client, number, options.tokens)
            if time.monotonic() > until:
                break
        return gaps

    with client, ThreadPoolExecutor(options.streams) as pool:
        found = pool.map(streams, range(seed, seed + options.streams))
        return [gap for gaps in found for gap in gaps]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def post(server: ServedEngine, path: str, **arguments: Any) -> dict[str, Any]:
    reply = httpx.post(server.url + path, timeout=60, **arguments)
    reply.raise_for_status()
    body: dict[str, Any] = reply.json()
    return body


def create_job(server: ServedEngine) -> str:
    files = {"file": ("facts.jsonl", FACTS.read_bytes())}
    file = post(server, "/v1/files", files=files, data={"purpose": "fine-tune"})
    settings = {"n_epochs": 1000}  # it outlasts the benchmark
    body = {"model": server.model, "training_file": file["id"], "hyperparameters": settings}
    return str(post(server, JOBS, json=body)["id"])


def step(server: ServedEngine, job: str) -> int:
    events = httpx.get(f"{server.url}{JOBS}/{job}/events?limit=1", timeout=60).json()["data"]
    return int(events[0]["data"].get("step", 0)) if events else 0


@contextmanager
def training(server: ServedEngine, job: str) -> Iterator[None]:
    """The job trains meanwhile, and has made a step before."""
    if httpx.get(f"{server.url}{JOBS}/{job}").json()["status"] == "paused":
        post(server, f"{JOBS}/{job}/resume")
    before = step(server, job)
    server.wait_until(lambda: step(server, job) > before, 600)
    yield
    post(server, f"{JOBS}/{job}/pause")
    server.wait_until(lambda: not server.trainers(), 120)


def cancel(server: ServedEngine, job: str, folder: Path) -> None:
    """Cancel the job while it trains, and print how soon all is freed."""
    post(server, f"{JOBS}/{job}/resume")
    before = step(server, job)
    server.wait_until(lambda: step(server, job) > before, 600)
    (trainer,) = server.trainers()
    memory = trainer.memory_info().rss
    num_bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    began = time.perf_counter()
    post(server, f"{JOBS}/{job}/cancel")
    answered = time.perf_counter() - began
    server.wait_until(lambda: not trainer.is_running() and not folder.exists(), 60)
    ended = time.perf_counter() - began
    print(
        f"cancel: answered after {answered:.2f} s; the process with {memory / 2**20:.0f} MiB and"
        f" {num_bytes / 2**20:.0f} MiB of files were gone after {ended:.2f} s (bar: 2 s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--share", action="store_true", help="train beside requests, not held")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="engine-finetune-") as data:
        measure(options, Path(data))


def measure(options: argparse.Namespace, data: Path) -> None:
    env = {
        "XDG_DATA_HOME": str(data),
        "LLM_ENGINE_FINETUNING__YIELD_TO_REQUESTS": "false" if options.share else "true",
    }
    with serve(env=env) as server:
        one_round(server, options, 0)  # warms up
        job = create_job(server)
        rounds = []
        for number in range(1, options.rounds + 1):
            with training(server, job):
                beside = one_round(server, options, 10_000 * number)
            alone = one_round(server, options, 10_000 * number + 5000)
            rounds.append((alone, beside))
            print(f"round {number}: {compared(alone, beside, 0.99)}", flush=True)
        alone, beside = (
            [gap for gaps in each for gap in gaps] for each in zip(*rounds, strict=True)
        )
        for share in (0.5, 0.99, 0.999):
            print(f"all rounds: {compared(alone, beside, share)}")
        ratios = [percentile(b, 0.99) / percentile(a, 0.99) for a, b in rounds]
        print(f"p99 beside a job: {statistics.median(ratios):.2f}x of alone (bar: 1.5x)")
        cancel(server, job, data / "engine" / "fine_tuning" / job)


def compared(alone: list[float], beside: list[float], share: float) -> str:
    own, other = percentile(alone, share), percentile(beside, share)
    return (
        f"p{share * 100:g} {own * 1e3:.1f} ms alone, {other * 1e3:.1f} ms beside a job,"
        f" {other / own:.2f}x"
    )


if __name__ == "__main__":
    main()
