"""`ShardedRunner` implements `ModelRunner` by sending each step to the ranks of a group.

A step is a frame with the arrays of its `BatchInputs` and its number, and later a frame with its
`SamplingInputs`. The sampling rank answers with the tokens. Answers to a step that the engine gave
up have an older number, and are dropped.
"""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from engine.core.shards.frames import Array
from engine.core.shards.layout import ShardLayout
from engine.runtime.model_runner import (
    F32,
    I32,
    BatchInputs,
    RunnerConfig,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.torch.execution.distributed.group import RankGroup
from engine.torch.execution.distributed.model_shard import check_shards
from engine.weights.model import ModelSource

_INPUTS = [field.name for field in fields(BatchInputs)]
_SAMPLING = [field.name for field in fields(SamplingInputs)]


@dataclass(frozen=True, slots=True)
class ShardedTokens:
    """The results of a step, which a rank still has to send."""

    runner: "ShardedRunner"
    step: int

    def wait(self) -> StepOutput:
        return StepOutput(*self.runner.answer("tokens", self.step))


class ShardedRunner:
    def __init__(self, group: RankGroup) -> None:
        self._group = group
        (_, _, spec) = group.wait_until_ready()
        self._spec = msgspec.convert(spec, RunnerSpec)
        self._step = 0

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def group(self) -> RankGroup:
        return self._group

    def forward(self, inputs: BatchInputs) -> int:
        """Sends the step to the ranks. Returns its number."""
        self._step += 1
        self._group.send(["forward", self._step], [getattr(inputs, name) for name in _INPUTS])
        return self._step

    def logits(self, handle: int, rows: I32) -> F32:
        self._group.send(["logits", handle], [rows])
        (logits,) = self.answer("logits", handle)
        return np.asarray(logits)

    def sample(self, handle: int, sampling: SamplingInputs) -> ShardedTokens:
        self._group.send(["sample", handle], [getattr(sampling, name) for name in _SAMPLING])
        return ShardedTokens(self, handle)

    def check(self) -> None:
        """Raises `RunnerLostError` if a rank is lost."""
        self._group.check()

    def close(self) -> None:
        self._group.close()

    def answer(self, kind: str, step: int) -> list[Any]:
        """Waits for the sampling rank's answer to a step."""
        arrays: list[Array | None]
        while True:
            (found, number), arrays = self._group.receive(self._group.layout.sampling_rank)
            if (found, number) == (kind, step):
                return arrays
            assert number < step, f"an answer to step {number} before that to step {step}"


def open_group(source: ModelSource, config: RunnerConfig) -> ShardedRunner:
    """Starts the ranks, which load their shards at the same time."""
    layout = ShardLayout(config.tensor_parallel, config.pipeline_parallel)
    check_shards(source.config, layout)
    threads = config.num_threads or os.cpu_count() or 1
    of_rank = replace(
        config,
        tensor_parallel=1,
        pipeline_parallel=1,
        num_threads=max(1, threads // layout.num_ranks),
    )
    group = RankGroup(source.path, of_rank, layout)
    try:
        return ShardedRunner(group)
    except BaseException:
        group.close()
        raise
