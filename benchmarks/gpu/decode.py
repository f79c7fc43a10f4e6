"""Compares the two kernels for decode attention with a float8 cache, on a Hopper GPU: the CUDA
kernel and the Triton kernel that it replaces.

    python -m benchmarks.gpu.decode

First, both are compared with attention by its definition in float32. Then both are timed for some
numbers of rows and keys. The exit status is 1 if the error of the CUDA kernel is too large.
"""

import argparse
from dataclasses import replace
from unittest.mock import patch

import torch

from benchmarks.gpu.roof import H200
from benchmarks.gpu.timing import copies_of, microseconds
from engine.torch.kernels.attention_spec import (
    Plans,
    bytes_of,
    example_of,
)
from engine.torch.kernels.base import (
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_30B,
    ROUNDED,
    Example,
    Inputs,
    Shape,
)
from engine.torch.kernels.cuda import decode

KERNELS = ("CUDA", "Triton")
SPEEDS = ((64, 256), (32, 7000), (256, 640))  # rows, keys
# Shape, keys of each row, blocks that all rows share. Some lengths are whole tiles and spans.
CHECKS = (
    (LLAMA_8B, (1, 15, 16, 17, 64, 65, 128, 300, 1000, 7000), 0),
    (LLAMA_8B, (8000,), 0),
    (LLAMA_8B, tuple(640 - row % 37 for row in range(256)), 0),
    (LLAMA_8B, tuple(1040 + 5 * row for row in range(32)), 64),
    (LLAMA_1B, (1, 33, 256, 2000), 0),
    (QWEN3_30B, (1, 33, 256, 2000), 0),
    (replace(LLAMA_8B, name="llama-8b/8", num_heads=4, num_kv_heads=1), (40, 3000), 0),
    (replace(LLAMA_8B, name="small blocks", block_size=8), (7, 600), 0),
)
MARGIN = 2.0  # times the error of the Triton kernel


def example(
    kernel: str, shape: Shape, lengths: tuple[int, ...], shared: int = 0, seed: int = 0
) -> Example:
    """The attention of one layer, planned for a kernel. A seed gives both kernels the same data."""
    inputs = Inputs(torch.device("cuda"), torch.bfloat16, seed)
    rows = [(length, 1) for length in lengths]
    supports = decode.supports if kernel == "CUDA" else lambda *_: False
    with patch.object(decode, "supports", supports):
        return example_of(kernel, rows, shared, shape, inputs, True)


def attend(q: torch.Tensor, cache: torch.Tensor, plans: Plans) -> torch.Tensor:
    return plans.triton.attend_cached(q, cache, None)


def errors(shape: Shape, lengths: tuple[int, ...], shared: int) -> dict[str, float]:
    """The largest error of each kernel, in any value. NaN, which is in no slot of a row, counts."""
    found = {}
    for kernel in KERNELS:
        q, cache, plans = example(kernel, shape, lengths, shared).args
        exact = q.float()
        expected = plans.reference.attend(exact, exact, exact, cache, window=None)
        difference = (attend(q, cache, plans).float() - expected).abs().max()
        found[kernel] = float(difference.nan_to_num(float("inf")))
    return found


def check() -> bool:
    """Compares both kernels with the reference. Returns whether the CUDA kernel is right."""
    passed = True
    print(f"{'shape':14} {'rows':>5} {'keys':>12} {'CUDA error':>12} {'Triton error':>12}")
    for shape, lengths, shared in CHECKS:
        found = errors(shape, lengths, shared)
        allowed = max(MARGIN * found["Triton"], ROUNDED[torch.bfloat16].absolute)
        right = found["CUDA"] <= allowed
        passed = passed and right
        keys = f"{min(lengths)}-{max(lengths)}"
        shown = " ".join(f"{found[kernel]:12.5f}" for kernel in KERNELS)
        print(f"{shape.name:14} {len(lengths):5} {keys:>12} {shown} {'' if right else 'WRONG'}")
    return passed


def measure() -> None:
    print(f"{'rows':>5} {'keys':>6} {'kernel':8} {'us':>9} {'GB/s':>8} {'roof':>7} {'spans':>6}")
    for rows, keys in SPEEDS:
        for kernel in KERNELS:
            made = example(kernel, LLAMA_8B, (keys,) * rows)
            moved, plan = bytes_of(*made.args), made.args[2].triton
            took = microseconds(attend, copies_of(made.args, made.kwargs))
            share, spans = moved / H200.bytes_per_s * 1e6 / took, len(plan.arrays["spans"])
            speed = moved / took / 1e3
            print(f"{rows:5} {keys:6} {kernel:8} {took:9.2f} {speed:8.0f} {share:7.1%} {spans:6}")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    passed = check()
    measure()
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
