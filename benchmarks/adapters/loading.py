"""What it costs to load a LoRA adapter while other requests run.

`python -m benchmarks.adapters.loading` serves the default model with several adapters of rank 16,
but only one place and hardly any host memory for them. So each request for another adapter reads it
from its files again. Beside 32 streams of the base model, rounds of requests for the base model
alternate with rounds of requests for adapters. It prints how much later the first token of a
request comes if an adapter is loaded for it, and the p99 of the time between the streams' tokens in
both kinds of rounds. Exits with 1 if a bar is missed.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.features.control_vector import free_port
from engine.core.store.model_store import resolve_model
from engine.weights.model import open_model
from tests.support.files.lora_files import peft_folder

MODEL, NUM_ADAPTERS, RANK = "smollm2-135m-instruct", 6, 16
NUM_STREAMS = 32
MAX_ADDED_S, MAX_P99_RATIO = 0.2, 1.5
PAUSE_S = 0.5  # between the requests of a round
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FIELDS = {"ignore_eos": True, "stream": True, "temperature": 0.0}


def write_adapters(folder: Path) -> dict[str, Path]:
    with closing(open_model(resolve_model(MODEL), reads_weights=False)) as model:
        config = model.config
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = [(queries, size), (keys, size), (keys, size), (size, queries)]
    sizes += [(inner, size), (inner, size), (size, inner)]
    shapes = {
        f"model.layers.{layer}.{'mlp' if number > 3 else 'self_attn'}.{MODULES[number]}": each
        for layer in range(config.num_layers)
        for number, each in enumerate(sizes)
    }
    names = [f"adapter-{number}" for number in range(NUM_ADAPTERS)]
    return {
        name: peft_folder(folder / name, shapes, rank=RANK, seed=number, std=0.02)
        for number, name in enumerate(names)
    }


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[float]:
    """The times at which the tokens of an answer arrive."""
    async with client.stream("POST", "/v1/completions", json=FIELDS | body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


class Beside:
    """Streams that run all the time, and the time between their tokens since the last `reset`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.gaps: list[float] = []
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(NUM_STREAMS)]

    async def _run(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            body = {"model": MODEL, "prompt": f"Story {number}.{turn}:", "max_tokens": 400}
            last = 0.0
            async for at in stream(self.client, body):
                if last:
                    self.gaps.append(at - last)
                last = at

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def first_token_s(client: httpx.AsyncClient, model: str, number: int) -> float:
    began, first = time.perf_counter(), 0.0
    body = {"model": model, "prompt": f"Question {number}: why?", "max_tokens": 4}
    async for at in stream(client, body):
        first = first or at
    return first - began


async def measure(url: str, names: list[str], rounds: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=NUM_STREAMS + 8)
    waits: dict[str, list[float]] = {"base": [], "adapter": []}
    p99: dict[str, list[float]] = {"base": [], "adapter": []}
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        beside = Beside(client)
        await asyncio.sleep(8)
        for number in range(2 * rounds):
            kind = ("base", "adapter")[number % 2]
            beside.gaps.clear()
            for name in names:
                waits[kind].append(
                    await first_token_s(client, name if kind == "adapter" else MODEL, number)
                )
                await asyncio.sleep(PAUSE_S)
            p99[kind].append(float(np.percentile(beside.gaps, 99)))
        await beside.stop()
    added = statistics.median(waits["adapter"]) - statistics.median(waits["base"])
    ratios = [a / b for a, b in zip(p99["adapter"], p99["base"], strict=True)]
    return {
        "first_token_base_s": round(statistics.median(waits["base"]), 3),
        "added_s": round(added, 3),
        "worst_added_s": round(max(waits["adapter"]) - statistics.median(waits["base"]), 3),
        "p99_gap_base_ms": round(1e3 * statistics.median(p99["base"]), 1),
        "p99_gap_ratio": round(statistics.median(ratios), 2),
        "ok": added <= MAX_ADDED_S and statistics.median(ratios) <= MAX_P99_RATIO,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        adapters, port = write_adapters(Path(folder)), free_port()
        settings = Path(folder) / "engine.toml"
        settings.write_text("[performance]\nmax_adapters = 1\nadapter_memory_mb = 1\n")
        command = [sys.executable, "-m", "engine.cli.main", "serve", MODEL, "--port", str(port)]
        command += ["--config", str(settings)]
        for name, path in adapters.items():
            command += ["--lora", f"{name}={path}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            while httpx_status(f"{url}/readyz") != 200:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.2)
            found = asyncio.run(measure(url, list(adapters), given.rounds))
        finally:
            process.terminate()
            process.wait(30)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


def httpx_status(url: str) -> int:
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return 0


if __name__ == "__main__":
    raise SystemExit(main())
