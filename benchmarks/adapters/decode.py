"""Decode steps with LoRA adapters beside the same steps of the base model, in one run.

`python -m benchmarks.adapters.decode` times steps of 1 and of 32 rows: without adapters, with one
adapter on all rows, and with eight. All cases of a round follow each other; the figure is the
median over the rounds of the ratio to the base model in the same round. With `--backend torch`, the
weights are random, with the shape of the model that `--shape` names.
"""

import argparse
import statistics
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from engine.adapters.matrices import Adapter, LoraPair
from engine.core.store.model_store import resolve_model
from engine.runtime.model_runner import BatchInputs, ModelRunner, RunnerConfig
from engine.weights.model import ModelSource, open_model

BLOCK_SIZE, CONTEXT, NUM_ADAPTERS = 16, 128, 8
PARTS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def random_adapter(source: ModelSource, rank: int) -> Adapter:
    """An adapter of all matrices of the layers. Its values do not change the speed."""
    made: dict[tuple[int, ...], LoraPair] = {}
    pairs = {}
    for name, weight in source.weights.items():
        if name.removesuffix(".weight").split(".", 2)[-1] not in PARTS:
            continue
        rows, columns = weight.spec.shape
        if (rows, columns) not in made:
            generator = np.random.default_rng(len(made))
            a = generator.normal(0, 0.02, (rank, columns)).astype(np.float32)
            b = generator.normal(0, 0.02, (rows, rank)).astype(np.float32)
            made[rows, columns] = LoraPair(a, b)
        pairs[name] = made[rows, columns]
    return Adapter(pairs)


def decode_step(num_rows: int, places: list[int], vocab_size: int) -> BatchInputs:
    """A step in which each row decodes one token at the same position."""
    width = CONTEXT // BLOCK_SIZE + 1
    tables = 1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    rows = np.arange(num_rows, dtype=np.int32)
    return BatchInputs(
        token_ids=(rows * 7 + 11) % vocab_size,
        positions=np.full(num_rows, CONTEXT, np.int32),
        write_slots=tables[:, -1].astype(np.int64) * BLOCK_SIZE,
        query_start=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens=np.full(num_rows, CONTEXT + 1, np.int32),
        num_prompt=np.full(num_rows, CONTEXT, np.int32),
        block_tables=tables,
        slots=rows,
        logit_rows=rows,
        adapter_ids=np.array(places, np.int32),
        prefix_groups=np.full(num_rows, -1, np.int32),
        prefix_blocks=np.zeros(0, np.int32),
    )


def seconds_of(runner: ModelRunner, inputs: BatchInputs, num_steps: int) -> float:
    row = np.zeros(1, np.int32)
    began_at = time.perf_counter()
    for _ in range(num_steps):
        handle = runner.forward(inputs)
    runner.logits(handle, row)  # waits for the device
    return (time.perf_counter() - began_at) / num_steps


def build(options: argparse.Namespace, source: ModelSource) -> Any:
    module = import_module(f"engine.{options.backend}.execution.build")
    config = RunnerConfig(
        device=options.device,
        dtype="stored" if options.backend == "native" else options.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=64 * (CONTEXT // BLOCK_SIZE + 1),
        max_slots=32,
        max_seq_len=2 * CONTEXT,
        num_threads=None,
    )
    return module.build_runner(source, config)


def model_source(options: argparse.Namespace) -> ModelSource:
    if options.shape is None:
        return open_model(resolve_model(options.model))
    from benchmarks.gpu.workloads import SHAPES
    from engine.weights.random import random_model

    return random_model(SHAPES[options.shape].config, Path(options.shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--shape", help="random weights of this shape, as in benchmarks.gpu.run")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    source = model_source(options)
    vocab_size = source.config.vocab_size
    plain = build(options, source) if options.backend == "native" else None
    runner = build(options, source)
    adapter = random_adapter(source, options.rank)
    for place in range(1, NUM_ADAPTERS + 1):
        began_at = time.perf_counter()
        packed = runner.pack_adapter(adapter)
        packed_at = time.perf_counter()
        runner.set_adapter(place, packed)
        if place == NUM_ADAPTERS:
            print(f"pack {packed_at - began_at:.3f} s, set {time.perf_counter() - packed_at:.4f} s")
    for num_rows in (1, 32):
        spread = sorted(1 + row % NUM_ADAPTERS for row in range(num_rows))
        cases: dict[str, tuple[Any, list[int]]] = {
            "base": (runner, [0] * num_rows),
            "one adapter": (runner, [1] * num_rows),
            f"{len(set(spread))} adapters": (runner, spread),
            "half of the rows": (runner, [0] * (num_rows // 2) + [1] * (num_rows - num_rows // 2)),
        }
        if plain is not None:
            cases["none loaded"] = (plain, [0] * num_rows)
        steps = {name: decode_step(num_rows, case[1], vocab_size) for name, case in cases.items()}
        for name, (each, _) in cases.items():  # compiles kernels and captures graphs
            seconds_of(each, steps[name], 3)
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, (each, _) in cases.items():
                times[name].append(seconds_of(each, steps[name], options.steps))
        for name, found in times.items():
            pairs = zip(times["base"], found, strict=True)
            ratio = statistics.median(base / own for base, own in pairs)
            median = 1e3 * statistics.median(found)
            print(f"{num_rows:3} rows, {name:18} {median:8.3f} ms  {ratio:.3f}x of base")


if __name__ == "__main__":
    main()
