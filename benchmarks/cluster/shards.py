"""Measures what shards cost.

python -m benchmarks.cluster.shards frames    a step's frames: 256 rows, engine and rank; bar 0.2 ms
python -m benchmarks.cluster.shards one-rank  a group of one rank beside the plain runner; bar 2 %
                --model llama-1b --device cuda

`frames` counts CPU time of both sides, and the time until a rank has the arrays of a step.
`one-rank` compares median times of decode steps, and alternates between both engines.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.shards.frames import Array, decode_frame, encode_frame
from engine.core.shards.ring import RingReader, RingWriter, ring_file
from engine.runtime.model_runner import BatchInputs, SamplingInputs

if TYPE_CHECKING:
    from engine.tools.profiling import Run

FRAME_BAR_MS, ONE_RANK_BAR = 0.2, 0.02
CONTEXT, BLOCK_SIZE = 2048, 16


def decode_step(rows: int) -> tuple[BatchInputs, SamplingInputs]:
    """A decode step in which each row has a context of 2,048 tokens and samples."""
    each, none = np.arange(rows, dtype=np.int32), np.zeros(0, np.int32)
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    inputs = BatchInputs(
        token_ids=each,
        positions=each,
        write_slots=each.astype(np.int64),
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=each,
        num_prompt=each,
        block_tables=np.zeros((rows, CONTEXT // BLOCK_SIZE), np.int32),
        slots=each,
        logit_rows=each,
        adapter_ids=each,
        prefix_groups=each,
        prefix_blocks=none,
    )
    sampling = SamplingInputs(
        **dict.fromkeys(("sample_rows", "slots", "top_k", "choice", "position"), each),
        **dict.fromkeys(("temperature", "min_p", "presence", "frequency"), zeros),
        **dict.fromkeys(("top_p", "repetition"), ones),
        **dict.fromkeys(("bias_rows", "bias_ids", "hidden_rows", "history_slots"), none),
        **dict.fromkeys(("history_start", "history_tokens", "history_num_prompt"), none),
        bias_values=np.zeros(0, np.float32),
        seed=each.astype(np.int64),
        mask=None,
        forced=each,
        num_logprobs=each,
    )
    return inputs, sampling


def arrays_of(value: BatchInputs | SamplingInputs) -> list[Array | None]:
    return [getattr(value, field.name) for field in fields(value)]


def read_steps(ring: int, bell: int, results: int, results_bell: int) -> None:
    """The rank's side: decodes each step, and answers with the CPU time that this took."""
    frames, answers = RingReader(ring, 0, bell), RingWriter(results, [results_bell])
    while True:
        first = frames.receive()
        began = time.thread_time()
        values, arrays = decode_frame(first)
        BatchInputs(*arrays)  # type: ignore[arg-type]
        spent = time.thread_time() - began
        arrived = time.monotonic()
        second = frames.receive()
        began = time.thread_time()
        SamplingInputs(*decode_frame(second)[1])  # type: ignore[arg-type]
        spent += time.thread_time() - began
        answers.send(encode_frame([values[1], spent, arrived]))


def measure_frames(rows: int, rounds: int) -> dict[str, Any]:
    inputs, sampling = decode_step(rows)
    with ring_file() as ring, ring_file() as results:
        (bell, ours), (reading, theirs) = os.pipe(), os.pipe()
        fds = (ring.fileno(), bell, results.fileno(), theirs)
        argv = [sys.executable, "-m", "benchmarks.cluster.shards", "rank", *map(str, fds)]
        child = subprocess.Popen(argv, pass_fds=fds)
        os.close(bell)
        os.close(theirs)
        writer, reader = RingWriter(ring.fileno(), [ours]), RingReader(results.fileno(), 0, reading)
    sent, read, waits = [], [], []
    for step in range(rounds + 20):
        began_at, began = time.monotonic(), time.thread_time()
        writer.send(encode_frame(["forward", step], arrays_of(inputs)))
        writer.send(encode_frame(["sample", step], arrays_of(sampling)))
        sent.append(time.thread_time() - began)
        (number, spent, arrived), _ = decode_frame(reader.receive())
        assert number == step
        read.append(spent)
        waits.append(arrived - began_at)
    child.kill()
    child.wait()
    ms = [1000 * statistics.median(each[20:]) for each in (sent, read, waits)]
    return {
        "rows": rows,
        "frame_bytes": len(encode_frame(["forward", 1], arrays_of(inputs))),
        "engine_cpu_ms": ms[0],
        "rank_cpu_ms": ms[1],
        "until_rank_has_step_ms": ms[2],
        "bar_ms": FRAME_BAR_MS,
        "met": ms[0] + ms[1] <= FRAME_BAR_MS,
    }


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Writes a checkpoint with random weights, which a rank can open by its path."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.gpu.engine import shape_source
    from benchmarks.gpu.workloads import SHAPES

    torch.manual_seed(0)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {}
    for weight in shape_source(shape).weights.values():
        spec = weight.spec
        ones = torch.ones(spec.shape, dtype=torch.bfloat16)
        drawn = ones if len(spec.shape) == 1 else torch.randn(spec.shape, device=place) * 0.02
        tensors[str(spec.hf)] = drawn.bfloat16().to("cpu")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(SHAPES[shape].config)))
    return folder


def step_seconds(run: "Run") -> float:
    """The median time from one decode step's answers to those of the next."""
    times = sorted({at for at, _ in run.answers})
    later = times[len(times) // 8 :]  # after the prompts
    return statistics.median(b - a for a, b in pairwise(later))


def measure_one_rank(shape: str, device: str, streams: int, rounds: int) -> dict[str, Any]:
    from benchmarks.gpu.engine import requests_of
    from benchmarks.gpu.workloads import SHAPES, Workload
    from engine.ipc.options import EngineOptions
    from engine.tools.profiling import DrivenEngine
    from engine.torch.execution import build
    from engine.torch.execution.distributed.sharded_runner import (
        open_group,
    )
    from engine.weights.model import open_model

    made = SHAPES[shape]
    rng = np.random.default_rng(0)
    length, new = 128 // made.divisor, 512 // made.divisor
    with tempfile.TemporaryDirectory() as folder:
        source = open_model(write_checkpoint(shape, Path(folder)))
        options = EngineOptions(
            model_path=folder,
            framework="torch",
            device=device,
            max_seq_len=1024,
            max_slots=streams,
            pool_bytes=2**30 if device == "cpu" else 8 * 2**30,
            cache_enabled=False,
        )
        plain_build = build.build_runner
        engines = {"plain": DrivenEngine(source, options)}
        build.build_runner = open_group
        engines["one rank"] = DrivenEngine(source, options)
        build.build_runner = plain_build
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            ids = rng.integers(made.first_id, made.last_id, (streams, length)).tolist()
            work = Workload(ids, [new] * streams)
            for name in sorted(engines, reverse=bool(number % 2)):
                run = engines[name].generate(requests_of(work))
                if number:  # the first round captures CUDA graphs
                    steps[name].append(1000 * step_seconds(run))
        for engine in engines.values():
            engine.close()
    costs = [a / b - 1 for a, b in zip(steps["one rank"], steps["plain"], strict=True)]
    cost = statistics.median(costs)
    return {
        "shape": shape,
        "streams": streams,
        "step_ms": {name: statistics.median(each) for name, each in steps.items()},
        "cost": cost,
        "costs": costs,
        "bar": ONE_RANK_BAR,
        "met": cost <= ONE_RANK_BAR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("frames", "one-rank", "rank"))
    parser.add_argument("fds", nargs="*", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=0, help="default: 500 frames, or 5 runs")
    parser.add_argument("--model", default="llama-1b", help="a shape of benchmarks.gpu.workloads")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    args = parser.parse_args()
    if args.what == "rank":
        read_steps(*args.fds)
        return
    if args.what == "frames":
        found = measure_frames(args.rows, args.rounds or 500)
    else:
        found = measure_one_rank(args.model, args.device, args.streams, args.rounds or 5)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
