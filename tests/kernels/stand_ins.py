"""What stands in for CUDA where there is none: plain calls instead of graphs, and memory that is
not page-locked. Kernels are interpreted.
"""

from collections.abc import Callable

import pytest
import torch

from engine.runtime.model_runner import RunnerConfig
from engine.torch.execution import cuda_runner, staging, step_sizes
from engine.torch.execution.cuda_runner import CudaRunner
from engine.torch.execution.staging import BufferedStep
from engine.torch.kernels import attention_triton
from tests.parity import tiny_models


class Recorded:
    """Replays work on the logits that it was recorded with, wherever a step's are by then."""

    def __init__(self, work: Callable[[], None], runner: CudaRunner) -> None:
        self._work, self._runner = work, runner
        self._logits = logits_of(runner)

    def replay(self) -> None:
        for step, logits in self._logits.items():
            if step.logits is not logits:
                step.logits = logits
        self._work()
        for step, logits in self._logits.items():
            if step.logits is not logits and step.logits is not None:
                step.logits = logits.copy_(step.logits)


def logits_of(runner: CudaRunner) -> dict[BufferedStep, torch.Tensor]:
    steps = runner._steps.values()
    return {step: step.logits for step in steps if step.logits is not None}


class FakeCapturer:
    """As a real one does, it changes nothing but that a forward pass has new logits, and nothing
    is in them yet.
    """

    runner: CudaRunner

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Recorded:
        runner, before = self.runner, logits_of(self.runner)
        kept = [runner._last_token, runner._history._tokens]
        copies = [tensor.clone() for tensor in kept]
        work()
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.copy_(copy)
        for step, logits in logits_of(runner).items():
            if before.get(step) is not logits:
                logits.fill_(float("nan"))
        return Recorded(work, runner)


class DoneEvent:
    def query(self) -> bool:
        return True

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # Interpreted programs that find nothing to do take time as well.
    monkeypatch.setattr(attention_triton, "SPARE_SPANS", 4)
    monkeypatch.setattr(step_sizes, "TOKEN_SIZES", (4, 16))
    monkeypatch.setattr(cuda_runner, "Capturer", FakeCapturer)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(staging, "_page_locked", lambda size: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(staging.Pinned, "__init__", lambda self, tensor: _fill(self, tensor))


def _fill(pinned: staging.Pinned, tensor: torch.Tensor) -> None:
    pinned.tensor, pinned.copied, pinned.array = tensor, DoneEvent(), tensor.numpy()


def config(attention: str, num_window_blocks: int = 0) -> RunnerConfig:
    return RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=4,
        num_blocks=128,
        num_window_blocks=num_window_blocks,
        max_slots=6,
        max_seq_len=tiny_models.MAX_POSITION,
        num_threads=1,
        attention=attention,
    )
