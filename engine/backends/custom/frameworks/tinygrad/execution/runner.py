"""`TinygradRunner`: logits are copied to the host, which samples from them."""

from dataclasses import dataclass

import numpy as np

from engine.backends.custom.frameworks.tinygrad.execution.steps import (
    Cache,
    Forwarded,
    ForwardStep,
    HeadStep,
    padded_size,
)
from engine.backends.custom.frameworks.tinygrad.models.base import Model
from engine.backends.custom.runtime.host_sampler import HostSampler
from engine.backends.custom.runtime.model_runner import (
    DRAW,
    FROM_DEVICE,
    I32,
    BatchInputs,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.backends.custom.runtime.outputs import step_output


@dataclass(frozen=True, slots=True)
class StepHandle:
    """What `forward` passes on to `sample`."""

    size: int
    forwarded: Forwarded
    query_start: I32


@dataclass(frozen=True, slots=True)
class Finished:
    """The results of a finished step; `wait` returns at once."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class TinygradRunner:
    def __init__(self, model: Model, cache: Cache, spec: RunnerSpec) -> None:
        self._spec = spec
        self._model, self._cache = model, cache
        self._forwards: dict[int, ForwardStep] = {}
        self._heads: dict[tuple[int, int], HeadStep] = {}
        self._last_token = np.zeros(spec.max_slots, np.int32)
        self._sampler = HostSampler(spec.vocab_size)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, inputs: BatchInputs) -> StepHandle:
        size = padded_size(len(inputs.token_ids))
        if size not in self._forwards:
            self._forwards[size] = ForwardStep(self._model, self._cache, size)
        slots = np.repeat(inputs.slots, np.diff(inputs.query_start))
        is_known = inputs.token_ids != FROM_DEVICE
        token_ids = np.where(is_known, inputs.token_ids, self._last_token[slots])
        return StepHandle(size, self._forwards[size](inputs, token_ids), inputs.query_start)

    def sample(self, handle: StepHandle, sampling: SamplingInputs) -> Finished:
        finite = np.isfinite(handle.forwarded.sums.numpy())
        sampled, states, count = None, None, len(sampling.slots)
        if count:
            hidden, logits = self._head(handle.size, count)(handle.forwarded.states)
            sampled = self._sampler.sample(logits.numpy()[:count], sampling)
            is_drawn = sampling.forced == DRAW
            self._last_token[sampling.slots[is_drawn]] = sampled.tokens[is_drawn]
            states = hidden.numpy() if len(sampling.hidden_rows) else None
        return Finished(step_output(sampled, states, finite, handle.query_start, sampling))

    def close(self) -> None:
        """Frees the model and the cache; the runner cannot be used again."""
        del self._model, self._cache, self._forwards, self._heads

    def _head(self, size: int, count: int) -> HeadStep:
        key = (size, padded_size(count))
        if key not in self._heads:
            self._heads[key] = HeadStep(self._model, key[1])
        return self._heads[key]
