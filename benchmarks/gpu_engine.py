"""The real engine in this process, without server and text: requests in, tokens and times out.

Scheduler, cache, loop and runner are those of a served model; only the socket to a frontend is
missing. The weights are random ones of the shape asked for, drawn on the device.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_workloads import SHAPES, Workload
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.batch import warm_up
from engine.backends.custom.runtime.seam import (
    BatchInputs,
    ModelRunner,
    PendingTokens,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.backends.custom.weights.model import ModelSource
from engine.backends.custom.weights.random import random_model
from engine.backends.custom.worker import build_loop, load_runner
from engine.core.interfaces.request import (
    Deltas,
    FromEngine,
    GenerateRequest,
    SamplingParams,
    ToEngine,
    TokenDelta,
)


@dataclass(slots=True)
class Meter:
    """Seconds that the host spent in the runner's calls, and how many steps there were."""

    num_steps: int = 0
    launch_s: float = 0.0  # in `forward` and `sample`
    wait_s: float = 0.0  # for the device


@dataclass(frozen=True, slots=True)
class MeteredPending:
    pending: PendingTokens
    meter: Meter

    def wait(self) -> StepOutput:
        began = time.perf_counter()
        output = self.pending.wait()
        self.meter.wait_s += time.perf_counter() - began
        return output


class MeteredRunner:
    """A runner that notes its time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.meter = Meter()

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, inputs: BatchInputs) -> Any:
        began = time.perf_counter()
        handle = self._runner.forward(inputs)
        self.meter.launch_s += time.perf_counter() - began
        return handle

    def sample(self, handle: Any, sampling: SamplingInputs) -> PendingTokens:
        began = time.perf_counter()
        pending = self._runner.sample(handle, sampling)
        self.meter.launch_s += time.perf_counter() - began
        self.meter.num_steps += 1
        return MeteredPending(pending, self.meter)

    def close(self) -> None:
        self._runner.close()


@dataclass
class ListChannel:
    """Requests that wait, and every message with the time when it came."""

    inbox: list[ToEngine] = field(default_factory=list)
    outbox: list[tuple[float, FromEngine]] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append((time.perf_counter(), message))


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, once."""

    seconds: float
    first_token_s: float  # the earliest of all requests
    num_steps: int
    launch_s: float
    wait_s: float
    deltas: tuple[TokenDelta, ...]

    @property
    def host_s(self) -> float:
        """What the device cannot be blamed for: scheduling, batches, launches, answers."""
        return self.seconds - self.wait_s

    def tokens(self, request: int) -> list[int]:
        name = str(request)
        return [each for d in self.deltas if d.request_id == name for each in d.token_ids]


class BenchEngine:
    """A loaded model and its loop, turned by hand."""

    def __init__(self, source: ModelSource, options: EngineOptions) -> None:
        runner, self.config, self.plan = load_runner(source, options)
        warm_up(runner)
        self._runner = MeteredRunner(runner)
        self._channel = ListChannel()
        self._loop = build_loop(self._runner, options, self.plan.bytes_per_token, self._channel)
        gc.collect()
        gc.freeze()  # as a served engine does: what was loaded stays

    def generate(self, requests: Sequence[GenerateRequest]) -> Run:
        """All requests at once, until the last token of the last one has come."""
        meter = self._runner.meter = Meter()
        self._channel.outbox.clear()
        self._channel.inbox.extend(requests)
        began = time.perf_counter()
        self._loop.turn(0.0)
        while self._loop.scheduler.has_work:
            self._loop.turn(0.0)
        seconds = time.perf_counter() - began
        self._loop.turn(0.0)  # takes in a step that was launched for nothing
        answers = [(at, m) for at, m in self._channel.outbox if isinstance(m, Deltas)]
        deltas = tuple(delta for _, message in answers for delta in message.deltas)
        failed = [d for d in deltas if d.finish_reason in ("error", "abort")]
        if failed:
            raise RuntimeError(f"request {failed[0].request_id} failed: {failed[0].error_message}")
        first = answers[0][0] - began
        return Run(seconds, first, meter.num_steps, meter.launch_s, meter.wait_s, deltas)

    def run(self, workload: Workload, **params: Any) -> Run:
        return self.generate(requests_of(workload, **params))

    def close(self) -> None:
        self._runner.close()


def requests_of(workload: Workload, **params: Any) -> list[GenerateRequest]:
    """Greedy requests of fixed length, named by their number."""
    return [
        GenerateRequest(
            request_id=str(number),
            prompt=tuple(prompt),
            params=SamplingParams(
                **{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
            ),
        )
        for number, (prompt, count) in enumerate(
            zip(workload.prompts, workload.num_new, strict=True)
        )
    ]


def shape_source(model: str) -> ModelSource:
    return random_model(SHAPES[model].config, Path(model))
