"""The real engine process with a model that computes nothing, to measure everything else.

Each step takes NULL_STEP_MS milliseconds (environment variable). The tokens are successive ids that
wrap around.
"""

import os
import sys
import time

import numpy as np

from engine.ipc.options import EngineOptions
from engine.runtime.model_runner import (
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.weights.model import ModelSource
from engine.worker import main as worker
from engine.worker.memory import MemoryPlan

VOCAB_SIZE = 49_152
FIRST_TOKEN, NUM_TOKENS = 1_000, 5_000  # ids of whole words in any vocabulary of that size
BLOCK_SIZE, NUM_BLOCKS, MAX_SLOTS, MAX_SEQ_LEN = 16, 16_385, 1_024, 8_192


class NullRunner:
    """Sleeps for each step. The sampled token depends only on the position."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.spec = RunnerSpec(BLOCK_SIZE, NUM_BLOCKS, MAX_SLOTS, MAX_SEQ_LEN, VOCAB_SIZE, depth=0)
        self._step_s = step_s
        self._next_at = 0.0
        self._num_rows = 0

    def forward(self, inputs: BatchInputs) -> None:
        self._num_rows = len(inputs.seq_lens)
        now = time.monotonic()
        self._next_at = max(self._next_at + self._step_s, now)
        time.sleep(self._next_at - now)

    def sample(self, handle: None, sampling: SamplingInputs) -> "NullRunner":
        self._tokens = FIRST_TOKEN + sampling.position * 7 % NUM_TOKENS
        return self

    def wait(self) -> StepOutput:
        return StepOutput(self._tokens.astype(np.int32), np.ones(self._num_rows, bool))

    def close(self) -> None:
        pass


def load_runner(
    source: ModelSource, options: EngineOptions, spared_bytes: int = 0
) -> tuple[NullRunner, RunnerConfig, MemoryPlan]:
    runner = NullRunner(float(os.environ.get("NULL_STEP_MS", "0")) / 1e3)
    sizes = (BLOCK_SIZE, NUM_BLOCKS, MAX_SLOTS, MAX_SEQ_LEN)
    plan = MemoryPlan(0, NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS, MAX_SLOTS, MAX_SEQ_LEN, 1, ())
    return runner, RunnerConfig("cpu", "float32", *sizes, num_threads=None), plan


if __name__ == "__main__":
    worker.planned = lambda options: options.planned("cpu", 2**34, 2)
    worker.load_runner = load_runner  # type: ignore[assignment]
    sys.exit(worker.main(*map(int, sys.argv[1:4])))
