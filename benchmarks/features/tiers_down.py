"""Measures what a tier of the prefix cache costs while it is known to be down.

`python -m benchmarks.features.tiers_down` starts a server without tiers, and for each fault one
whose tier then fails. Requests with new prompts alternate between the two. The result is how much
later the first token comes: the median and the 99th percentile of each server, and their
differences.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.prompts import words
from tests.scoreboard.loads import disk as load_disk
from tests.scoreboard.loads.redis import RedisProcess, nonsense, redis
from tests.scoreboard.served_engine import Served, percentile, served_engine
from tests.scoreboard.streams import ask, completion

NOTICED_S = 2.0  # the server may take this long to find out about the fault

Fault = Callable[[Served, RedisProcess], AbstractContextManager[Any]]


@contextmanager
def killed(served: Served, server: RedisProcess) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextmanager
def frozen(served: Served, server: RedisProcess) -> Iterator[None]:
    server.signal(signal.SIGSTOP)
    yield
    server.signal(signal.SIGCONT)


@contextmanager
def full(served: Served, server: RedisProcess) -> Iterator[None]:
    server.command("CONFIG", "SET", "maxmemory", "1mb")
    yield
    server.command("CONFIG", "SET", "maxmemory", "0")


@contextmanager
def talking_nonsense(served: Served, server: RedisProcess) -> Iterator[None]:
    server.kill()
    with nonsense(server.port, 1):
        yield
    server.start()


REDIS_FAULTS: tuple[Fault, ...] = (killed, frozen, full, talking_nonsense)
DISK_FAULTS = (load_disk.full, load_disk.read_only, load_disk.deleted)


class Pair:
    """A server without tiers, and one whose tier is down."""

    def __init__(self, off: Served, down: Served, length: int) -> None:
        self._servers = {"off": off, "down": down}
        self._length = length
        self._num_asked = 0
        self.ttft: dict[str, list[float]] = {"off": [], "down": []}

    async def ask(self, name: str) -> float:
        self._num_asked += 1
        prompt = words(self._length, "down", time.monotonic(), self._num_asked)
        reply = await ask(self._servers[name], completion(prompt, max_tokens=1, stream=True))
        if not reply.is_whole:
            raise SystemExit(f"a request failed: {reply.problem or reply.error}")
        return reply.first_s

    async def warm_up(self) -> None:
        for name in ("off", "down") * 3:
            await self.ask(name)

    async def measure(self, rounds: int) -> dict[str, float]:
        await self.ask("down")  # may be the one that notices the fault
        await asyncio.sleep(NOTICED_S)
        for number in range(rounds):
            for name in ("off", "down") if number % 2 else ("down", "off"):
                self.ttft[name].append(await self.ask(name))
        pairs = zip(self.ttft["down"], self.ttft["off"], strict=True)
        median = statistics.median(down - off for down, off in pairs)
        late = {name: percentile(values, 0.99) for name, values in self.ttft.items()}
        return {
            "median_ms": round(statistics.median(self.ttft["off"]) * 1e3, 1),
            "added_median_ms": round(median * 1e3, 1),
            "p99_ms": round(late["off"] * 1e3, 1),
            "added_p99_ms": round((late["down"] - late["off"]) * 1e3, 1),
        }


def with_redis(fault: Fault, off: Served, length: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="tiers-") as name, redis(Path(name)) as server:
        env = {"LLM_ENGINE_TIERS__REDIS_URL": server.url}
        with served_engine("--log-level", "error", env=env) as served:
            pair = Pair(off, served, length)
            asyncio.run(pair.warm_up())
            with fault(served, server):
                return asyncio.run(pair.measure(rounds))


def with_disk(
    fault: load_disk.Trouble, off: Served, length: int, rounds: int
) -> dict[str, float] | str:
    with tempfile.TemporaryDirectory(prefix="tiers-") as name:
        disk = Path(name) / "kv"
        disk.mkdir(mode=0o700)
        config = Path(name) / "engine.toml"
        config.write_text(f'[cache.tiers]\ndisk_path = "{disk}"\n')
        with served_engine("--log-level", "error", "--config", str(config)) as served:
            pair = Pair(off, served, length)
            asyncio.run(pair.warm_up())
            try:
                with fault(served, disk, random.Random(1)):
                    return asyncio.run(pair.measure(rounds))
            except load_disk.NotPossibleError:
                return "can't be made here"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=64, help="words of a prompt")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    size = (arguments.length, arguments.rounds)
    with served_engine("--log-level", "error") as off:
        for fault in REDIS_FAULTS:
            told = {"tier": "redis", "fault": fault.__name__}
            print(json.dumps(told | {"ttft": with_redis(fault, off, *size)}), flush=True)
        for trouble in DISK_FAULTS:
            told = {"tier": "disk", "fault": trouble.__name__}
            print(json.dumps(told | {"ttft": with_disk(trouble, off, *size)}), flush=True)


if __name__ == "__main__":
    main()
