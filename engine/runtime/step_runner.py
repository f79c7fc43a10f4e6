"""Runs the steps that the scheduler planned on the model runner: builds their arrays, computes the
masks of grammars beside the forward pass, and samples.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from engine.runtime.batch import BatchBuilder
from engine.runtime.insight.request_timing import EngineClock
from engine.runtime.model_runner import (
    BatchInputs,
    ModelRunner,
    PendingTokens,
    StepOutput,
)
from engine.runtime.requests.grammar import MaskJob, MaskWriter, constrained_rows
from engine.runtime.samplers.chain import ChainSampler
from engine.runtime.sequence import ScheduledBatch

T = TypeVar("T")


class Forwarded(msgspec.Struct, frozen=True):
    """A step after its `forward` call and before its `sample` call."""

    handle: Any
    masks: MaskJob | None


class StepRunner:
    def __init__(self, runner: ModelRunner, clock: EngineClock) -> None:
        self._runner, self._clock = runner, clock
        self._builder = BatchBuilder(runner.spec)
        self._chain = ChainSampler(runner)
        # The mask writer is created for the first step that has a row with a grammar.
        self._masks: MaskWriter | None = None
        self.is_computing = False  # whether `compute` runs

    def compute(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a call that may take long. The watchdog can interrupt a step only inside this
        function.
        """
        self.is_computing = True
        try:
            return call(*arguments)
        finally:
            self.is_computing = False

    def forward(self, batch: ScheduledBatch) -> Forwarded:
        masks = self._begin_masks(batch)
        inputs = self._builder.inputs(batch)
        return Forwarded(self.compute(self._run_forward, inputs), masks)

    def _run_forward(self, inputs: BatchInputs) -> Any:
        """Runs the forward pass. Fault injection wraps this method."""
        return self._runner.forward(inputs)

    def sample(self, forwarded: Forwarded, batch: ScheduledBatch) -> PendingTokens:
        mask = None
        if forwarded.masks is not None:
            late = constrained_rows(batch, only_known=False, done=forwarded.masks.done)
            began_at = time.monotonic()
            mask = self.compute(forwarded.masks.finish, late)
            self._clock.masked(time.monotonic() - began_at)
        sampling = self._builder.sampling(batch, mask)
        if len(sampling.host_rows):
            sampling = self.compute(self._chain.sample, forwarded.handle, sampling, batch)
        return self.compute(self._runner.sample, forwarded.handle, sampling)

    def wait(self, pending: PendingTokens) -> StepOutput:
        return self.compute(pending.wait)

    def close(self) -> None:
        if self._masks is not None:
            self._masks.close()

    def _begin_masks(self, batch: ScheduledBatch) -> MaskJob | None:
        if not any(row.seq.constraint is not None for row in batch.rows):
            return None
        if self._masks is None:
            self._masks = MaskWriter(self._runner.spec.vocab_size)
        num_rows = sum(row.samples + len(row.draft) for row in batch.rows)
        return self._masks.begin(num_rows, constrained_rows(batch, only_known=True))
