"""Greedy generation on JAX in mixed batches with chunked prefill. It runs as a program, because the
number of devices must be set before JAX starts. Reads prompts and writes tokens as JSON.
"""

import json
import sys
from pathlib import Path

from engine.jax.execution.build import build_runner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import open_model
from tests.parity.runner_driver import RunnerDriver


def generate(path: Path, device: str, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    config = RunnerConfig(
        device=device,
        dtype="float32",
        block_size=4,
        num_blocks=128,
        max_slots=8,
        max_seq_len=128,
        num_threads=None,
    )
    driver = RunnerDriver(build_runner(open_model(path), config))
    return driver.generate([driver.add(prompt) for prompt in prompts], num_new, chunk=6)


if __name__ == "__main__":
    path, device, num_new = sys.argv[1:]
    print(json.dumps(generate(Path(path), device, json.load(sys.stdin), int(num_new))))
