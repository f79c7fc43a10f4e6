"""Checks `--numerics invariant` on a GPU, and measures what it costs.

    python -m benchmarks.gpu.invariant --model llama-1b

256 mixed requests run alone, all together, and all together in another order. The last two differ
in what the prefix cache has. The script counts the requests whose tokens are the same in all three
runs, in the invariant mode and, for comparison, in the default mode. It then prints the time of a
decode step with 1, 64 and 256 rows, and of prefill, in both modes. Weights are random. Without a
GPU, nothing runs but a tiny model in the default mode, which tests the script.

The exit status is 1 if a request differs in the invariant mode.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.engine import BenchEngine, shape_source
from benchmarks.gpu.workloads import SHAPES, Shape
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.runtime.model_runner import Warmable
from engine.tools.profiling import Run
from engine.torch.device import keep_sums_whole
from engine.torch.kernels.attention_heads import (
    AttentionHeads,
    ReferenceAttention,
)
from engine.torch.kernels.attention_spec import batch_of
from engine.torch.kernels.base import KERNELS, Inputs
from engine.torch.kernels.invariant.attention import InvariantAttention
from engine.torch.kernels.invariant.linear import (
    compare_library,
    invariant_linear,
)
from engine.torch.kernels.skinny import Fusion
from engine.worker.memory import DTYPE_BYTES

NUM_REQUESTS, NUM_NEW = 256, 24
LONGEST, SHARED = 640, 320  # tokens of the longest prompt, and of the prefix that a third shares
ROWS = (1, 64, 256)
PROMPT, DECODED = 128, 96  # tokens of each request whose decode steps are timed
PREFILL = (8, 2048)  # prompts, and tokens of each
ROUNDS, REPEATS = 5, 3
TOKENS = (1, 3, 17, 33, 64, *range(65, 256, 7), *range(256, 1025, 64), 1100, 2000, 3333, 8192)


def mixed_requests(shape: Shape) -> list[GenerateRequest]:
    """Prompts of every length, greedy and sampled, with and without penalties. Every third shares
    a prefix.
    """
    rng = random.Random(5)
    longest, shared_length = LONGEST // shape.divisor, SHARED // shape.divisor
    shared = tuple(rng.randrange(shape.first_id, shape.last_id) for _ in range(shared_length))
    requests = []
    for number in range(NUM_REQUESTS // shape.divisor):
        length = rng.randrange(1, longest - shared_length)
        ids = tuple(rng.randrange(shape.first_id, shape.last_id) for _ in range(length))
        sampled: dict[str, Any] = {"temperature": 0.0}
        if number % 4 == 1:
            sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number}
        if number % 4 == 3:
            sampled = {"temperature": 1.0, "top_k": 50, "seed": number, "presence_penalty": 0.5}
        count = max(2, NUM_NEW // shape.divisor)
        params = SamplingParams(max_tokens=count, ignore_eos=True, **sampled)
        prompt = shared + ids if number % 3 == 2 else ids
        requests.append(GenerateRequest(request_id=str(number), prompt=prompt, params=params))
    return requests


def salted(requests: Sequence[GenerateRequest], salt: str) -> list[GenerateRequest]:
    """Requests with different salts share no prefix in the cache."""
    return [msgspec.structs.replace(request, salt=salt) for request in requests]


def tokens_by_id(run: Run) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _, delta in run.answers:
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


def equal_counts(bench: BenchEngine, shape: Shape) -> tuple[int, int, int]:
    """How many requests give the tokens that they give alone: together with others, in another
    order with a filled prefix cache, and how many requests there are.
    """
    requests = mixed_requests(shape)
    alone: dict[str, list[int]] = {}
    for request in salted(requests, "alone"):
        alone |= tokens_by_id(bench.generate([request]))
    together = tokens_by_id(bench.generate(salted(requests, "together")))
    shuffled = salted(requests, "alone")
    random.Random(6).shuffle(shuffled)
    reordered = tokens_by_id(bench.generate(shuffled))
    counts = (
        sum(run[name] == tokens for name, tokens in alone.items()) for run in (together, reordered)
    )
    return *counts, len(requests)


def random_requests(shape: Shape, rows: int, length: int, new: int) -> list[GenerateRequest]:
    rng, size = random.Random(time.monotonic_ns()), max(1, length // shape.divisor)
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=str(number),
            prompt=tuple(rng.randrange(shape.first_id, shape.last_id) for _ in range(size)),
            params=params,
        )
        for number in range(max(1, rows // shape.divisor))
    ]


def step_ms(bench: BenchEngine, shape: Shape, rows: int) -> float:
    """The median time of a decode step with this many rows, in milliseconds."""
    requests = random_requests(shape, rows, PROMPT, max(4, DECODED // shape.divisor))
    steps = bench.generate(requests).steps
    full = [step.num_tokens == len(requests) for step in steps]
    ends = [step.ended_at for step in steps]
    return 1e3 * median(
        ends[i] - ends[i - 1] for i in range(2, len(steps)) if full[i] and full[i - 1]
    )


def prefill_ms(bench: BenchEngine, shape: Shape) -> float:
    return 1e3 * bench.generate(random_requests(shape, *PREFILL, 1)).seconds


@contextmanager
def engine(
    model: str, device: str, numerics: str, options: dict[str, Any]
) -> Iterator[BenchEngine]:
    shape = SHAPES[model]
    dtype = "float32" if device == "cpu" else "bfloat16"
    tokens = NUM_REQUESTS * (LONGEST + PROMPT + DECODED) // shape.divisor
    given = EngineOptions(
        model_path=model,
        framework="torch",
        device=device,
        dtype=dtype,
        numerics=numerics,
        max_seq_len=4096 // shape.divisor,
        max_slots=NUM_REQUESTS // shape.divisor,
        pool_bytes=tokens * shape_source(model).config.kv_bytes_per_token(DTYPE_BYTES[dtype]),
        max_batch_tokens=2048 // shape.divisor,
        **{"speculation": "off", **options},  # drafts are exact in one of the modes only
    )
    with closing(BenchEngine(model, given)) as bench:
        if isinstance(bench.runner, Warmable):
            bench.runner.warm()
        yield bench
    gc.collect()


def matrices(model: str) -> dict[str, tuple[int, int, str | None, bool]]:
    """By name: the rows and columns of each matrix, its gate, and whether it adds to the stream."""
    config = shape_source(model).config
    size, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    return {
        "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, size, None, False),
        "o": (size, heads, None, True),
        "gate_up": (2 * inner, size, config.activation, False),
        "down": (size, inner, None, True),
        "head": (config.vocab_size, size, None, False),
    }


def matmul_check(model: str) -> Iterator[str]:
    """Multiplies the same rows in steps of all sizes, REPEATS times each. Yields a line for each
    matrix: which sizes cuBLASLt would compute otherwise, which sizes differ in any bit from the
    largest step, and how far that is from PyTorch's result.
    """
    device = torch.device("cuda")
    keep_sums_whole()
    for name, (outputs, size, gate, adds) in matrices(model).items():
        inputs = Inputs(device, torch.bfloat16)
        x, weight = inputs.normal(TOKENS[-1], size), inputs.normal(outputs, size, scale=size**-0.5)
        stream = inputs.normal(TOKENS[-1], outputs) if adds else None

        def product(count: int, call: Any = invariant_linear) -> Tensor:
            rows = None if stream is None else stream[-count:]  # noqa: B023 - called in this round
            return call(x[-count:], weight, None, Fusion(gate=gate, residual=rows))  # noqa: B023

        equal = compare_library(weight, TOKENS)
        others = [count for count in TOKENS if count not in equal]
        whole = product(TOKENS[-1])
        runs = [(count, torch.equal(product(count), whole[-count:])) for count in TOKENS * REPEATS]
        differing = sorted({count for count, is_equal in runs if not is_equal})
        far = (whole - product(TOKENS[-1], KERNELS["invariant_linear"].reference)).abs().max()
        yield (
            f"{name}: steps of {differing or 'no'} rows differ; cuBLASLt is not used for "
            f"{others or 'none'}; {far:.3f} off PyTorch"
        )


def attention_check(model: str) -> Iterator[str]:
    """Attends in steps of one row, of several queries and of many rows, REPEATS times each. All
    rows have the same keys, so that a query at a position has one result.
    """
    config, device = shape_source(model).config, torch.device("cuda")
    heads, inputs = AttentionHeads.of(config), Inputs(device, torch.bfloat16)
    cache = inputs.normal(65, 16, 2, config.num_kv_heads, config.head_dim)
    queries = inputs.normal(1024, config.num_heads, config.head_dim)
    ours = InvariantAttention(heads, block_size=16, dtype=torch.bfloat16)
    reference = ReferenceAttention(heads, block_size=16, dtype=torch.bfloat16)
    expected: dict[int, Tensor] = {}
    for rows in (((700, 1),), ((200, 1),), ((700, 700),), ((200, 77),), ((700, 1), (200, 1)) * 100):
        step = batch_of(rows, np.tile(np.arange(1, 65, dtype=np.int32), (len(rows), 1)))
        at = [keys - count + index for keys, count in rows for index in range(count)]
        q, positions = queries[at], torch.tensor(at, device=device)
        differing, far = 0, 0.0
        for _ in range(REPEATS):
            out = ours.plan(step, positions).attend_cached(q, cache, None)
            differing += sum(
                not torch.equal(expected.setdefault(position, result), result)
                for position, result in zip(at, out, strict=True)
            )
            there = reference.plan(step, positions).attend(q, q, q, cache, window=None)
            far = max(far, float((out - there).abs().max()))
        label = f"{len(rows)} rows, the first {rows[0]}"
        yield f"attention, {label}: {differing} queries differ; {far:.4f} off PyTorch"


def report(
    model: str, device: str, options: dict[str, Any], modes: Sequence[str]
) -> dict[str, Any]:
    shape, began = SHAPES[model], time.monotonic()
    found: dict[str, Any] = {"model": model, **options}

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    for numerics in modes:
        with engine(model, device, numerics, options) as bench:
            say(f"{numerics}: loaded")
            together, reordered, total = equal_counts(bench, shape)
            say(f"{numerics}: {together} of {total} equal together, {reordered} in another order")
            found[numerics] = {"together": together, "reordered": reordered, "requests": total}
            for rows in ROWS:
                times = [step_ms(bench, shape, rows) for _ in range(ROUNDS)]
                found[numerics][f"step_ms_{rows}"] = median(times[1:])
            times = [prefill_ms(bench, shape) for _ in range(ROUNDS)]
            found[numerics]["prefill_ms"] = median(times[1:])
            say(f"{numerics}: {figures(found[numerics])}")
    return found


def figures(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{rows} rows {found[f'step_ms_{rows}']:.3f} ms" for rows in ROWS)
    return (
        f"decode steps {steps}; prefill of {PREFILL[0]} x {PREFILL[1]} {found['prefill_ms']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON with the figures")
    given = parser.parse_args()
    options = {"quantization": given.quantization, "kv_dtype": given.kv_dtype}
    if not torch.cuda.is_available():
        report("tiny", "cpu", options, ["auto"])
        return
    for line in (*matmul_check(given.model), *attention_check(given.model)):
        print(line, flush=True)
    found = report(given.model, "cuda", options, ["invariant", "auto"])
    for key in (*(f"step_ms_{rows}" for rows in ROWS), "prefill_ms"):
        print(f"{key}: {found['invariant'][key] / found['auto'][key] - 1:+.1%} against auto")
    if given.output:
        given.output.write_text(json.dumps(found, indent=2) + "\n")
    ours = found["invariant"]
    sys.exit(not ours["together"] == ours["reordered"] == ours["requests"])


if __name__ == "__main__":
    main()
