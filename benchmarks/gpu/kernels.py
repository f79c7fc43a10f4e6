"""Times every GPU kernel at real models' shapes, beside the roofline and its PyTorch reference.

    python -m benchmarks.gpu.kernels --check --json kernels.json

With --check, it first compares each kernel with its reference. Without a GPU it runs tiny shapes
through Triton's interpreter (TRITON_INTERPRET=1), which tests the script but not the speed.
"""

import argparse
import json
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.roof import H200
from benchmarks.gpu.timing import copies_of, microseconds
from engine.torch.kernels.base import (
    LLAMA_1B,
    LLAMA_8B,
    QWEN3_30B,
    TINY,
    Example,
    KernelSpec,
    Shape,
    check,
    load_all,
)


def measure(spec: KernelSpec, shape: Shape, example: Example) -> dict:
    inputs = copies_of(example.args, example.kwargs)
    moved = spec.bytes_of(*example.args, **example.kwargs)
    flops = spec.flops_of(*example.args, **example.kwargs)
    ours = microseconds(spec.triton, inputs)
    least = max(moved / H200.bytes_per_s, flops / H200.flops_per_s) * 1e6
    row = {
        "kernel": spec.name,
        "shape": shape.name,
        "example": example.label,
        "us": round(ours, 2),
        "gb_s": round(moved / ours / 1e3, 1),
        "tflop_s": round(flops / ours / 1e6, 2),
        "roof_share": round(least / ours, 3),
    }
    try:
        row["reference_us"] = round(microseconds(spec.reference, inputs), 2)
    except RuntimeError as error:  # some references can't be captured in a CUDA graph
        row["reference_error"] = str(error).splitlines()[0]
    return row


def line(row: dict) -> str:
    if "error" in row:
        return f"{row['kernel']:18} {row['shape']:9} {row['example']:28} FAILED {row['error']}"
    return (
        f"{row['kernel']:18} {row['shape']:9} {row['example']:28} {row['us']:10.2f}"
        f" {row['gb_s']:9.1f} {row['tflop_s']:9.2f} {row['roof_share']:7.1%}"
        f" {row.get('reference_us', float('nan')):12.2f}"
    )


def run(names: list[str], shapes: list[Shape], dtype: torch.dtype, checks: bool) -> list[dict]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name, spec in sorted(load_all().items()):
        if names and name not in names:
            continue
        for shape in shapes:
            for example in spec.examples(shape, device, dtype):
                rows.append(attempt(spec, shape, example, checks))
                print(line(rows[-1]), flush=True)
    return rows


def attempt(spec: KernelSpec, shape: Shape, example: Example, checks: bool) -> dict:
    """Measure one kernel. A failure is recorded, and the other kernels still run."""
    try:
        if checks:
            check(spec, example)
        return measure(spec, shape, example)
    except Exception as error:
        traceback.print_exc()
        message = str(error).strip().splitlines()
        return {
            "kernel": spec.name,
            "shape": shape.name,
            "example": example.label,
            "error": f"{type(error).__name__}: {message[0] if message else ''}",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", help="names; all when none is given")
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes only")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    shapes = [TINY] if options.tiny or not has_gpu else [TINY, LLAMA_1B, LLAMA_8B, QWEN3_30B]
    dtype = getattr(torch, options.dtype) if has_gpu else torch.float32
    print(
        f"{'kernel':18} {'shape':9} {'example':28} {'us':>10} {'GB/s':>9} {'TFLOP/s':>9}"
        f" {'roof':>7} {'reference us':>12}"
    )
    rows = run(options.kernels, shapes, dtype, options.check)
    failed = [row for row in rows if "error" in row]
    print(f"{len(rows)} examples, {len(failed)} failed")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
