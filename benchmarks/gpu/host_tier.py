"""Measures the host tier on a GPU, with prefixes that together are larger than the KV pool.

    python -m benchmarks.gpu.host_tier --model llama-8b --output host-tier.json

One engine with random weights answers requests that begin with one of the prefixes, each in turn.
So every prefix is evicted before it is used again. Passes with the tier alternate with passes in
which everything is computed.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import BenchEngine
from benchmarks.gpu.workloads import SHAPES
from benchmarks.machine import machine
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.runtime.tiers.host import HostTier
from engine.runtime.tiers.kv_tiers import attach_tiers
from engine.runtime.tiers.record import identity_of

GIB = 2**30
STORE_S = 20.0  # the writing thread gets this long to store a pass
MAX_STORE_PASSES = 20  # a pass may have more blocks than the queue of the writing thread


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        shape = SHAPES[given.model]
        chooser = random.Random(1)
        self._prefixes = [
            tuple(chooser.randrange(shape.first_id, shape.last_id) for _ in range(given.length))
            for _ in range(given.prefixes)
        ]
        self._engine = BenchEngine(given.model, options(given))
        self._loop: Any = self._engine._loop
        self._kv = self._loop.scheduler.kv
        runner: Any = self._engine.runner
        tier = HostTier(given.host_gib * GIB, "lru", None, runner.row_maker())
        identity, prompt_s = identity_of(("benchmark",)), self._loop._budget.prompt_s
        self._tiers = attach_tiers(self._kv, runner, runner.spec, [tier], identity, prompt_s)
        self._mover = self._tiers.mover
        self._mover.start()
        self._extensions = self._kv.extensions
        self._num_asked = 0

    def run_pass(self, with_tier: bool, at_once: int) -> tuple[float, list[list[int]]]:
        """Ask for every prefix once, and for one token. Returns the seconds and the tokens."""
        self._kv.extensions = self._extensions if with_tier else self._kv.groups
        self._kv.flush()
        seconds, texts = 0.0, []
        for first in range(0, len(self._prefixes), at_once):
            requests = [self._request(each) for each in self._prefixes[first : first + at_once]]
            run = self._engine.generate(requests)
            seconds += run.seconds
            for request in requests:
                own = [d for _, d in run.answers if d.request_id == request.request_id]
                texts.append([token for delta in own for token in delta.token_ids])
        return seconds, texts

    def store(self) -> int:
        """Let the tier store the prefixes. Returns how many blocks it has."""
        num_blocks = (len(self._prefixes[0]) - 1) // self._kv.block_size
        for _ in range(MAX_STORE_PASSES):
            self.run_pass(True, 1)
            until = time.monotonic() + STORE_S
            while self._mover._queued_bytes and time.monotonic() < until:
                time.sleep(0.01)
            if self._tiers.tier_stats()[0].num_blocks >= num_blocks * len(self._prefixes):
                break
        return self._tiers.tier_stats()[0].num_blocks

    def stats(self) -> dict[str, Any]:
        stats = self._tiers.tier_stats()[0]
        return {"hits": stats.hits, "load_s": stats.load_s, "errors": stats.errors}

    def close(self) -> None:
        self._mover.close()
        self._engine.close()

    def _request(self, prefix: tuple[int, ...]) -> GenerateRequest:
        self._num_asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return GenerateRequest(request_id=str(self._num_asked), prompt=prefix, params=params)


def options(given: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        model_path=given.model,
        framework="torch",
        device=given.device,
        max_slots=16,
        max_batch_tokens=8192,
        pool_bytes=int(given.pool_gib * GIB),
        speculation="off",
    )


def measure(given: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(given)
    found: dict[str, Any] = {"machine": machine(), "model": given.model}
    found["blocks_in_tier"] = bench.store()
    bench.run_pass(False, 1)  # warms up
    for at_once in (1, 4):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        texts: dict[bool, list[list[int]]] = {}
        for _ in range(given.rounds):
            for with_tier in (True, False):
                taken, texts[with_tier] = bench.run_pass(with_tier, at_once)
                seconds[with_tier].append(taken)
        loaded, computed = (statistics.median(seconds[each]) for each in (True, False))
        same = [a == b for a, b in zip(texts[True], texts[False], strict=True)]
        found[f"{at_once} at once"] = {
            "host_tier_s": round(loaded, 4),
            "recompute_s": round(computed, 4),
            "times_faster": round(computed / loaded, 2),
            "same_tokens": f"{sum(same)} of {len(same)}",
        }
        print(json.dumps(found), flush=True)
    found["tier"] = bench.stats()
    bench.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--length", type=int, default=8000, help="tokens of a prefix")
    parser.add_argument("--pool-gib", type=float, default=4.0, help="size of the KV pool")
    parser.add_argument("--host-gib", type=int, default=24, help="size of the host tier")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, metavar="FILE")
    given = parser.parse_args()
    found = measure(given)
    print(json.dumps(found, indent=2))
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
