"""Throughput of the matmul kernels on one thread, beside the limits of the machine.

Reading is compared with numpy's max over the weights' bytes, which streams them once with vector
instructions. For arithmetic, numpy's float32 rate on small matrices is given. It is a scale and not
a roof: int8 matmuls may be four times as fast as float32.
"""

import argparse
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from tests.native.conftest import load_native
from tests.native.panels import LAYOUTS, QUANTIZED, aligned, random_panels

COLUMNS, MIN_BYTES, TOKENS = 576, 48 << 20, (1, 8, 32, 128)
# The index of each name is its code in csrc/base/kernels.h.
NUMERICS = ("f32", "int8", "bf16", "outliers", "channels")
PER_CHANNEL = "I8"  # Q4 requantized per channel, as with fast numerics


def fastest(function: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def float_rate() -> float:
    """GFLOP/s of a float32 matmul in numpy, small enough to run on one thread."""
    count, size = 64, 64
    matrices = np.ones((count, size, size), np.float32)
    return 2 * count * size**3 / fastest(lambda: matrices @ matrices) / 1e9


def streamed_weights(layout: str) -> tuple[NDArray[np.uint8], int]:
    """Weights larger than the L2 cache, and their number of rows."""
    part, _ = random_panels(np.random.default_rng(0), layout, 512, COLUMNS)
    copies = -(-MIN_BYTES // part.size)
    return aligned(np.tile(part, copies)), 512 * copies


def numerics_of(native: ModuleType, isa: str, layout: str) -> list[int]:
    if layout == PER_CHANNEL:
        return [4] if native.has_per_channel(isa) else []
    quantized = [1, 3] if layout in QUANTIZED else []
    return [0, *quantized, *([2] if native.has_bf16(isa) else [])]


def report(
    native: ModuleType, isa: str, layout: str, weights: NDArray[np.uint8], rows: int
) -> None:
    number = (*LAYOUTS, PER_CHANNEL).index(layout)
    for numerics in numerics_of(native, isa, layout):
        for tokens in TOKENS:
            repeats = 5 if tokens < 32 and isa != "generic" else 2
            took = native.bench_matmul(
                isa, numerics, number, weights, rows, COLUMNS, tokens, repeats
            )
            share = 100 * fastest(weights.max) / took
            read = weights.nbytes / took / 1e9
            rate = 2 * rows * COLUMNS * tokens / took / 1e9
            what = f"{isa:8} {layout:6} {NUMERICS[numerics]:8} {tokens:6}"
            print(f"{what} {read:8.1f} {share:7.0f} % {rate:9.0f}", flush=True)


def main() -> None:
    native = load_native()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="*", default=native.instruction_sets())
    parser.add_argument("--layout", nargs="*", default=LAYOUTS, choices=LAYOUTS)
    options = parser.parse_args()
    print(f"float32 product in numpy: {float_rate():.0f} GFLOP/s")
    print("isa      layout sums      tokens     GB/s  of read    GFLOP/s")
    for layout in options.layout:
        weights, rows = streamed_weights(layout)
        for isa in options.isa:
            report(native, isa, layout, weights, rows)
            if layout == "Q4" and native.has_per_channel(isa):
                copy = native.requantize(isa, LAYOUTS.index(layout), weights, rows, COLUMNS)
                report(native, isa, PER_CHANNEL, copy, rows)


if __name__ == "__main__":
    main()
