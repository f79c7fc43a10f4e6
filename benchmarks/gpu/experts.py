"""Finds the fastest tiles of the grouped GEMM of a mixture of experts.

    python -m benchmarks.gpu.experts --json experts.json

The winners go into `tiles_for` in `kernels/triton/experts.py`. Each of the two launches is tuned
with the other launch's tile fixed.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.roof import H200
from benchmarks.gpu.timing import copies_of, microseconds
from engine.torch.kernels.base import QWEN3_30B, TINY, Shape, load_all
from engine.torch.kernels.triton.experts import (
    GemmTile,
    experts_mlp,
    pairs_per_block,
    tiles_for,
)


def candidates(pairs: int) -> Iterator[GemmTile]:
    few = pairs <= 32
    for rows, columns, warps, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (4,) if few else (4, 8), (3, 4, 5) if few else (3, 4)
    ):
        if rows * columns <= 128 * 128 and (few or columns == 64):
            yield GemmTile(rows, columns, warps, stages)


def tune(shape: Shape, num_tokens: int) -> dict:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    spec = load_all()["experts_mlp"]
    example = next(
        each for each in spec.examples(shape, device, dtype) if len(each.args[0]) == num_tokens
    )
    calls = copies_of(example.args, {})
    pairs = pairs_per_block(num_tokens * shape.experts_per_token, shape.num_experts)
    first, second = tiles_for(pairs, dtype.itemsize)
    given, chosen_us = (first, second), microseconds(experts_mlp, calls)
    best_us = chosen_us
    for place in range(2):
        for tile in itertools.islice(candidates(pairs), None if has_gpu else 1):
            tiles = (tile, second) if place == 0 else (first, tile)
            try:
                took = microseconds(partial(experts_mlp, tiles=tiles), calls)
            except Exception as error:  # a tile that does not fit is skipped
                print(f"  {tile}: {type(error).__name__}")
                continue
            if took < best_us:
                best_us, (first, second) = took, tiles
    moved, flops = spec.bytes_of(*example.args), spec.flops_of(*example.args)
    roof_us = max(moved / H200.bytes_per_s, flops / H200.flops_per_s) * 1e6
    return {
        "shape": shape.name,
        "tokens": num_tokens,
        "pairs_per_block": pairs,
        "chosen": str(given),
        "chosen_us": round(chosen_us, 1),
        "best": str((first, second)),
        "best_us": round(best_us, 1),
        "roof_us": round(roof_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", help="tokens per step; all by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shape = QWEN3_30B if torch.cuda.is_available() else TINY
    rows = []
    for num_tokens in options.tokens or shape.rows:
        rows.append(tune(shape, num_tokens))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
