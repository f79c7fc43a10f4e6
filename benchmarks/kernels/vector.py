"""Throughput of the native norms, RoPE, embedding and sampling scans, for every instruction set."""

import argparse
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np

from tests.native.conftest import load_native
from tests.native.panels import LAYOUTS, random_panels

ROUNDS, CALLS = 15, 200


def seconds(call: Callable[[], object]) -> float:
    """Time of one call in the fastest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return best


def calls(native: ModuleType, isa: str, hidden: int, vocabulary: int) -> dict[str, tuple]:
    """The functions to run by name, each with the bytes that one call reads and writes."""
    rng = np.random.default_rng(0)
    x, weight, bias, out = rng.normal(0, 1, (4, hidden)).astype(np.float32)
    heads = rng.normal(0, 1, (hidden // 64, 64)).astype(np.float32)
    angles = np.linspace(0, 1, 32)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    logits = rng.normal(0, 5, vocabulary).astype(np.float32)
    table, _ = random_panels(rng, "Q4", 256, hidden)
    number = LAYOUTS.index("Q4")
    top = float(logits.max())
    return {
        "rms_norm": (lambda: native.rms_norm(isa, x, weight, 1e-5, out), 12 * hidden),
        "layer_norm": (lambda: native.layer_norm(isa, x, weight, bias, 1e-5, out), 16 * hidden),
        "rope": (lambda: native.rope(isa, heads, cosines, sines), 2 * heads.nbytes),
        "embed Q4": (lambda: native.embed(isa, table, number, 256, 99, out), 4 * hidden),
        "argmax": (lambda: native.argmax(isa, logits), logits.nbytes),
        "max": (lambda: native.max(isa, logits), logits.nbytes),
        "sum_exp": (lambda: native.sum_exp(isa, logits, top, 1.0), logits.nbytes),
        "all_finite": (lambda: native.all_finite(isa, logits), logits.nbytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    sizes = parser.parse_args()
    native = load_native()
    sets = native.instruction_sets()
    table = {isa: calls(native, isa, sizes.hidden, sizes.vocabulary) for isa in sets}
    print(f"{'GB/s (µs)':12}" + "".join(f"{isa:>18}" for isa in sets))
    for name in table[sets[0]]:
        row = ""
        for isa in sets:
            call, size = table[isa][name]
            took = seconds(call)
            row += f"{size / took / 1e9:9.1f} ({took * 1e6:6.2f})"
        print(f"{name:12}{row}")


if __name__ == "__main__":
    main()
