"""Throughput of attention in the shape of a 135M model, beside the process's memory read rate.

The benchmark cycles through the layers, as a model does, so that keys and values come from memory.
Bytes are the keys and values that one layer's tokens see, each counted once. Operations count what
each token sees.
"""

import argparse
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.native.conftest import load_native

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
VALUE_BYTES = {"f32": 4, "bf16": 2, "int8": 1 + 4 / HEAD_DIM}


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    length: int
    tokens: int = 1  # last tokens of each row; more than one is prefill
    shared: int = 0  # leading positions that all rows share
    layers: int = 4


CASES = (
    Case("32 rows of 192", 32, 192, layers=30),
    Case("1 row of 8,192", 1, 8192, layers=10),
    Case("16 rows, 1,024 shared + 64", 16, 1088, shared=1024, layers=10),
    Case("prompt of 1,024", 1, 1024, tokens=1024),
    Case("64 tokens of a prompt at 8,192", 1, 8192, tokens=64, layers=2),
)


def tables_of(case: Case) -> NDArray[np.int32]:
    """Block tables over scattered blocks."""
    shared, width = case.shared // BLOCK, -(-case.length // BLOCK)
    blocks = (
        np.random.default_rng(0).permutation(shared + case.rows * (width - shared)).astype(np.int32)
    )
    own = blocks[shared:].reshape(case.rows, -1)
    return np.concatenate((np.tile(blocks[:shared], (case.rows, 1)), own), axis=1)


def filled_cache(native: ModuleType, case: Case, kind: str, blocks: int) -> Any:
    cache = native.AttentionCache(kind, case.layers, KV_HEADS, HEAD_DIM, BLOCK, blocks)
    rng = np.random.default_rng(0)
    slots = np.arange(blocks * BLOCK, dtype=np.int64)
    keys, values = rng.normal(size=(2, len(slots), KV_HEADS * HEAD_DIM)).astype(np.float32)
    for layer in range(case.layers):
        cache.write(native.instruction_sets()[-1], layer, slots, keys, values)
    return cache


def step_of(native: ModuleType, case: Case, tables: NDArray[np.int32]) -> Any:
    positions = np.tile(
        np.arange(case.length - case.tokens, case.length, dtype=np.int32), case.rows
    )
    return native.AttentionBatch(
        HEADS,
        HEAD_DIM**-0.5,
        0,
        len(positions) if case.tokens == 1 else 0,
        positions,
        np.repeat(np.arange(case.rows, dtype=np.int32), case.tokens),
        tables,
        np.full(case.rows, 0 if case.shared else -1, np.int32),
        np.array([case.shared // BLOCK], np.int32),
    )


def reading_rate() -> float:
    """GB/s of numpy's max over bytes, on one thread."""
    data = np.ones(64 << 20, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.max()
        times.append(time.perf_counter() - start)
    return data.size / min(times) / 1e9


def report(
    native: ModuleType, case: Case, kind: str, isas: list[str], threads: int, rounds: int
) -> None:
    tables = tables_of(case)
    cache = filled_cache(native, case, kind, int(tables.max()) + 1)
    step = step_of(native, case, tables)
    queries = (
        np.random.default_rng(1)
        .normal(size=(case.rows * case.tokens, HEADS * HEAD_DIM))
        .astype(np.float32)
    )
    out = np.empty_like(queries)
    best = dict.fromkeys(isas, np.inf)
    for _ in range(rounds):
        for isa in isas:
            times = step.run(isa, cache, 0, queries, out, threads, 2 * case.layers)
            best[isa] = min(best[isa], min(times[case.layers :]))
    seen = case.shared + case.rows * (case.length - case.shared)
    size = 2 * seen * KV_HEADS * HEAD_DIM * VALUE_BYTES[kind]
    pairs = case.rows * (case.tokens * case.length - case.tokens * (case.tokens - 1) / 2)
    for isa, seconds in best.items():
        rate, work = size / seconds / 1e9, 4 * pairs * HEADS * HEAD_DIM / seconds / 1e9
        print(
            f"{case.name:32} {kind:5} {isa:8} {1e6 * seconds:9.0f} {rate:7.1f} {work:9.0f}",
            flush=True,
        )


def main() -> None:
    native = load_native()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="*", default=native.instruction_sets())
    parser.add_argument("--kind", nargs="*", default=list(VALUE_BYTES))
    parser.add_argument("--case", nargs="*", type=int, default=range(len(CASES)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"reading, one thread: {reading_rate():.1f} GB/s; {options.threads} threads below")
    for case in CASES:
        step = step_of(native, case, tables_of(case))
        print(f"schedule of {case.name}: {1e6 * step.schedule_seconds(BLOCK, 100):.1f} us")
    print(f"{'case':32} cache isa        us/layer    GB/s   GFLOP/s")
    for number in options.case:
        for kind in options.kind:
            report(native, CASES[number], kind, options.isa, options.threads, options.rounds)


if __name__ == "__main__":
    main()
