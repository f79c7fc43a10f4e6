"""Finds the fastest tile for the GEMV of each weight matrix, compared with cuBLAS.

    python -m benchmarks.gpu.skinny --json skinny.json

The winners go into `choose` in `kernels/triton/skinny.py`.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import copies_of, microseconds
from engine.torch.kernels.base import (
    LLAMA_1B,
    LLAMA_8B,
    TINY,
    Inputs,
    Shape,
)
from engine.torch.kernels.skinny import PLAIN
from engine.torch.kernels.triton.skinny import (
    SkinnyConfig,
    choose,
    skinny_linear,
)

TOKENS = (1, 8, 16)


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    heads = shape.num_heads * shape.head_dim
    return {
        "qkv": (shape.qkv_size, shape.hidden_size),
        "o": (shape.hidden_size, heads),
        "gate_up": (2 * shape.inner_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.inner_size),
        "head": (shape.vocab_size, shape.hidden_size),
    }


def configs(num_tokens: int) -> Iterator[SkinnyConfig]:
    if num_tokens == 1:
        for rows, columns, warps in itertools.product((1, 2, 4, 8), (1024, 2048), (2, 4, 8)):
            if rows * columns <= 2048 * warps:
                yield SkinnyConfig(rows, columns, warps)
        return
    for rows, columns, warps in itertools.product((16, 32, 64), (128, 256, 512), (1, 2, 4)):
        if rows * columns <= 64 * 256 and rows >= 16 * min(warps, 2):
            yield SkinnyConfig(rows, columns, warps, stages=4)


def tune(shape: Shape, name: str, num_tokens: int) -> dict:
    outputs, size = matrices(shape)[name]
    has_gpu = torch.cuda.is_available()
    inputs = Inputs(
        torch.device("cuda" if has_gpu else "cpu"), torch.bfloat16 if has_gpu else torch.float32
    )
    x, weight = inputs.normal(num_tokens, size), inputs.normal(outputs, size, scale=size**-0.5)
    calls = copies_of((x, weight, None, PLAIN), {})
    times = {}
    for config in itertools.islice(configs(num_tokens), None if has_gpu else 2):
        try:
            times[config] = microseconds(partial(skinny_linear, config=config), calls)
        except Exception as error:  # a tile that does not fit is skipped
            print(f"  {config}: {type(error).__name__}")
    chosen = microseconds(skinny_linear, calls)
    best = min(times, key=lambda config: times[config])
    overlapping = replace(best, overlaps=num_tokens == 1 and has_gpu)
    return {
        "shape": shape.name,
        "matrix": name,
        "tokens": num_tokens,
        "cublas_us": round(microseconds(F.linear, copies_of((x, weight), {})), 2),
        "chosen": str(choose(num_tokens, outputs, size)),
        "chosen_us": round(chosen, 2),
        "best": str(best),
        "best_us": round(times[best], 2),
        "overlapping_us": round(microseconds(partial(skinny_linear, config=overlapping), calls), 2),
        "roof_us": round(weight.nbytes / 4.28e6, 2),
        "all": {str(config): round(us, 2) for config, us in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=list(TOKENS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in (LLAMA_1B, LLAMA_8B) if torch.cuda.is_available() else (TINY,):
        for name, num_tokens in itertools.product(matrices(shape), options.tokens):
            rows.append(tune(shape, name, num_tokens))
            shown = {key: value for key, value in rows[-1].items() if key != "all"}
            print(json.dumps(shown), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
