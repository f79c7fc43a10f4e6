"""The real engine process with the toy model, for tests that need processes. It starts at once."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from engine.core.errors import ResourceError
from engine.ipc.options import EngineOptions
from engine.runtime import budget
from engine.runtime.model_runner import RunnerConfig, RunnerSpec
from engine.worker import main as worker
from engine.worker.memory import MemoryPlan
from tests.support.toy_engine.runner import CRASH_TOKEN, IMPATIENT_S, VOCAB, ToyCrash, ToyRunner

STEP_S = 0.005  # slow enough to be killed in the middle of a step


class SlowToyRunner(ToyRunner):
    def forward(self, inputs):
        time.sleep(STEP_S)
        return super().forward(inputs)


class FragileToyRunner(SlowToyRunner):
    """A device that fails permanently after its first fault."""

    is_lost = False

    def forward(self, inputs):
        self.is_lost = self.is_lost or CRASH_TOKEN in inputs.token_ids
        if self.is_lost:
            raise ToyCrash("the device is gone")
        return super().forward(inputs)


class DeadlyToyRunner(SlowToyRunner):
    """A kernel that ends its process."""

    def forward(self, inputs):
        if CRASH_TOKEN in inputs.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(inputs)


class StuckToyRunner(SlowToyRunner):
    """A kernel that waits forever and that no signal interrupts: it takes a lock twice."""

    def forward(self, inputs):
        if CRASH_TOKEN in inputs.token_ids:
            mutex = ctypes.create_string_buffer(128)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(mutex)
        return super().forward(inputs)


class HungryToyRunner(SlowToyRunner):
    """Needs 24 MB for each token of a step."""

    def forward(self, inputs):
        np.empty(len(inputs.token_ids) * (24 << 20), np.uint8)
        return super().forward(inputs)


RUNNERS = {
    "fragile": FragileToyRunner,
    "deadly": DeadlyToyRunner,
    "stuck": StuckToyRunner,
    "hungry": HungryToyRunner,
}


def load_runner(source, options: EngineOptions, spared_bytes: int = 0):
    if options.model_path == "unloadable":
        raise ResourceError("it does not fit")
    if options.model_path == "broken":
        raise RuntimeError("secret detail")
    if Path(options.model_path).stem == "slow":
        time.sleep(60)
    if options.model_path in ("impatient", "stuck"):
        budget.MIN_PATIENCE_S = IMPATIENT_S
    spec = RunnerSpec(
        block_size=options.block_size,
        num_blocks=257,
        max_slots=8,
        max_seq_len=256,
        vocab_size=VOCAB,
        depth=0,
    )
    config = RunnerConfig("cpu", "float32", spec.block_size, 257, 8, 256, None)
    plan = MemoryPlan(0, 257 * spec.block_size, 257, 8, 256, 1, ())
    return RUNNERS.get(options.model_path, SlowToyRunner)(spec), config, plan


worker.open_model = lambda path, use_mmap: SimpleNamespace(
    config=SimpleNamespace(encoder=None, vision=None)
)
worker.planned = lambda options: options.planned("cpu", 2**34, 2)
worker.load_runner = load_runner
run_engine = worker.run_engine

if __name__ == "__main__":
    sys.exit(worker.main(*map(int, sys.argv[1:4])))
