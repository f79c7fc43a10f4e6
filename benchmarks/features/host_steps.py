"""Measures the Python of decode steps: CPU microseconds per step of an engine loop whose runner
computes nothing.

    python -m benchmarks.features.host_steps
    python -m benchmarks.features.host_steps --other ../before/.venv/bin/python

With `--other`, the same steps run in turn on the engine of another checkout, which is named by its
Python. The ratio is that of the medians over all rounds, each of which runs in a process of its
own. So other work on the machine changes it little.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.interfaces.request import GenerateRequest, SamplingParams
from engine.ipc.options import EngineOptions
from engine.runtime.model_runner import BatchInputs, RunnerSpec, SamplingInputs, StepOutput
from engine.worker.main import build_loop

BLOCK_SIZE, CONTEXT, PROMPT, VOCABULARY = 16, 4096, 64, 1024


class Pending:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


class IdleRunner:
    """A runner that samples a token that depends on the position, and so never repeats a text."""

    def __init__(self, num_rows: int) -> None:
        blocks = num_rows * CONTEXT // BLOCK_SIZE + 1
        self.spec = RunnerSpec(BLOCK_SIZE, blocks, num_rows, CONTEXT, VOCABULARY, 1)

    def forward(self, inputs: BatchInputs) -> BatchInputs:
        return inputs

    def sample(self, handle: BatchInputs, sampling: SamplingInputs) -> Pending:
        mixed = (sampling.position.astype(np.int64) * 2654435761 + sampling.slots) >> 7
        finite = np.ones(len(handle.slots), np.bool_)
        return Pending(StepOutput((mixed % VOCABULARY).astype(np.int32), finite))

    def close(self) -> None:
        pass


class QuietChannel:
    def __init__(self) -> None:
        self.inbox: list[Any] = []

    def poll(self, timeout_s: float) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: Any) -> None:
        pass


def step_us(num_rows: int, num_steps: int) -> float:
    """CPU microseconds of one step that decodes a token of each of `num_rows` sequences."""
    channel = QuietChannel()
    options = EngineOptions(model_path="", framework="native", max_batch_tokens=8192)
    loop = build_loop(IdleRunner(num_rows), options, 1, channel)
    for number in range(num_rows):
        prompt = tuple(
            int(token) for token in np.random.default_rng(number).integers(1, 999, PROMPT)
        )
        params = SamplingParams(max_tokens=CONTEXT - PROMPT - 1, temperature=0.0, seed=number)
        channel.inbox.append(GenerateRequest(request_id=str(number), prompt=prompt, params=params))
    for _ in range(50):  # prompts are computed, and code is warm
        loop.turn(0.0)
    gc.collect()
    gc.disable()
    began = time.process_time()
    for _ in range(num_steps):
        loop.turn(0.0)
    return (time.process_time() - began) / num_steps * 1e6


def measured(python: str, options: argparse.Namespace) -> float:
    """The same in a process of its own, with the engine that a Python has installed."""
    command = [python, str(Path(__file__).resolve()), "--once"]
    command += ["--rows", str(options.rows), "--steps", str(options.steps)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", help="the Python of another checkout")
    parser.add_argument("--once", action="store_true", help="print the microseconds of one round")
    options = parser.parse_args()
    if options.once:
        print(step_us(options.rows, options.steps))
        return
    pythons = [sys.executable] if options.other is None else [sys.executable, options.other]
    rounds = [[measured(each, options) for each in pythons] for _ in range(options.rounds)]
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    print(f"{options.rows} rows: {medians[0]:.1f} CPU us per step")
    if options.other is not None:
        ratios = sorted(own / other for own, other in rounds)
        print(f"other: {medians[1]:.1f} CPU us; ratio {medians[0] / medians[1]:.3f},")
        print(f"in the rounds {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
