"""Runs an engine step by step without a frontend, and profiles it: time per kernel, time to first
token by phase, and host overhead.

Requests are passed as token ids. Scheduler, cache, loop and runner are the same as in the server.
Benchmarks use `DrivenEngine` too.

To profile a model, the same requests run four times. The first run is a warm-up. The second run is
not disturbed and measures the throughput. The third run syncs the device after every call, which
measures the phases of the time to first token. The framework's profiler records the fourth run,
which measures the time per kernel. Each run has its own salt, so that no run finds the prefixes of
another run in the cache.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.core.errors import InferenceError
from engine.core.interfaces.request import (
    Deltas,
    FromEngine,
    GenerateRequest,
    SamplingParams,
    ToEngine,
    TokenDelta,
)
from engine.ipc.options import EngineOptions
from engine.runners.entry import framework_entry
from engine.runtime.dummy_batch import warm_up
from engine.runtime.insight.profiler import KernelTime, Profiler
from engine.runtime.model_runner import (
    F32,
    I32,
    BatchInputs,
    ModelRunner,
    PendingTokens,
    RunnerConfig,
    RunnerSpec,
    SamplingInputs,
    StepOutput,
)
from engine.weights.model import ModelSource
from engine.worker.loading import load_runner
from engine.worker.main import build_loop, planned
from engine.worker.memory import MemoryPlan

# A function that returns a context manager to wrap a runner call. Its argument is the name of the
# call: "forward", "sample" or "wait".
Observe = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class StepTimes:
    """The seconds that the host spends in each of the three runner calls of a step."""

    num_tokens: int
    forward_s: float = 0.0
    sample_s: float = 0.0
    wait_s: float = 0.0
    ended_at: float = 0.0

    @property
    def launch_s(self) -> float:
        return self.forward_s + self.sample_s


@dataclass(frozen=True, slots=True)
class TimedPending:
    pending: PendingTokens
    times: StepTimes
    observe: Observe

    def wait(self) -> StepOutput:
        began = time.monotonic()
        with self.observe("wait"):
            output = self.pending.wait()
        self.times.ended_at = time.monotonic()
        self.times.wait_s = self.times.ended_at - began
        return output


class TimedRunner:
    """A runner that records the time of each call."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.steps: list[StepTimes] = []
        self.observe: Observe = lambda name: nullcontext()

    @property
    def spec(self) -> RunnerSpec:
        return self._runner.spec

    def forward(self, inputs: BatchInputs) -> tuple[Any, StepTimes]:
        times = StepTimes(len(inputs.token_ids))
        began = time.monotonic()
        with self.observe("forward"):
            handle = self._runner.forward(inputs)
        times.forward_s = time.monotonic() - began
        return handle, times

    def logits(self, handle: tuple[Any, StepTimes], rows: I32) -> F32:
        return self._runner.logits(handle[0], rows)

    def sample(self, handle: tuple[Any, StepTimes], sampling: SamplingInputs) -> TimedPending:
        inner, times = handle
        began = time.monotonic()
        with self.observe("sample"):
            pending = self._runner.sample(inner, sampling)
        times.sample_s = time.monotonic() - began
        self.steps.append(times)
        return TimedPending(pending, times, self.observe)

    def close(self) -> None:
        self._runner.close()


@dataclass
class ListChannel:
    """A channel that takes the place of the socket to a frontend. It holds the requests that the
    engine will read, and every answer with its arrival time.
    """

    inbox: list[ToEngine] = field(default_factory=list)
    answers: list[tuple[float, Deltas]] = field(default_factory=list)

    def poll(self, timeout_s: float) -> list[ToEngine]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            self.answers.append((time.monotonic(), message))


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run. In a run, all requests are submitted at the same time. The run ends
    with the last token of the last request.
    """

    seconds: float
    began_at: float
    steps: tuple[StepTimes, ...]
    answers: tuple[tuple[float, TokenDelta], ...]  # each with its arrival time

    @property
    def first_token_s(self) -> float:
        """Seconds from the start of the run to the first token of any request."""
        return self.answers[0][0] - self.began_at

    @property
    def wait_s(self) -> float:
        return sum(step.wait_s for step in self.steps)

    @property
    def launch_s(self) -> float:
        return sum(step.launch_s for step in self.steps)

    @property
    def host_s(self) -> float:
        """Seconds in which the host did not wait for the device. In this time, it schedules, builds
        batches, launches work and sends answers.
        """
        return self.seconds - self.wait_s


class DrivenEngine:
    """A loaded model with its engine loop, which runs in the calling thread."""

    def __init__(self, source: ModelSource, options: EngineOptions) -> None:
        self.plan: MemoryPlan
        self.config: RunnerConfig
        options = planned(options)
        self.runner, self.config, self.plan = load_runner(source, options)
        warm_up(self.runner)
        self._timed = TimedRunner(self.runner)
        self._channel = ListChannel()
        self._loop = build_loop(self._timed, options, self.plan.bytes_per_token, self._channel)

    def generate(self, requests: Sequence[GenerateRequest], observe: Observe | None = None) -> Run:
        self._timed.steps = []
        self._timed.observe = observe or (lambda name: nullcontext())
        self._channel.answers.clear()
        self._channel.inbox.extend(requests)
        began_at = time.monotonic()
        self._loop.turn(0.0)
        while self._loop.scheduler.has_work:
            self._loop.turn(0.0)
        seconds = time.monotonic() - began_at
        self._loop.turn(0.0)  # finish a step that was launched early but is no longer needed
        answers = tuple((at, d) for at, message in self._channel.answers for d in message.deltas)
        for _, delta in answers:
            if delta.finish_reason in ("error", "abort"):
                raise InferenceError(f"request {delta.request_id} failed: {delta.error_message}")
        return Run(seconds, began_at, tuple(self._timed.steps), answers)

    def close(self) -> None:
        self.runner.close()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The time to first token by phase, in seconds, averaged over the requests."""

    tokenize_s: float | None  # None: the prompt was given as token ids
    queue_s: float  # from submission to the first step that computes part of the request
    # From the start of that step until the logits of the last prompt token are computed.
    prefill_s: float
    first_sample_s: float  # sampling the first token, and copying it to the host

    @property
    def total_s(self) -> float:
        return (self.tokenize_s or 0.0) + self.queue_s + self.prefill_s + self.first_sample_s


@dataclass(frozen=True, slots=True)
class Profile:
    device: str
    dtype: str
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float  # wall time of all requests, in a run without profiling
    num_steps: int
    host_s: float  # part of `seconds` in which the host did not wait for the device
    first_token: FirstToken
    recorded_s: float  # wall time of the same requests while the profiler recorded them
    kernels: tuple[KernelTime, ...]


def profile_model(
    source: ModelSource,
    options: EngineOptions,
    prompts: Sequence[tuple[int, ...]],
    num_new: int,
    tokenize_s: float | None,
    trace: Path | None = None,
) -> Profile:
    """Load a model and profile it on the prompts. Each request generates `num_new` tokens with
    greedy sampling.
    """
    engine = DrivenEngine(source, options)
    framework = framework_entry(options.framework)
    try:
        profiler: Profiler = framework.profiler(engine.runner, source, engine.config)
        engine.generate(_requests(prompts, num_new, "warm-up"))
        plain = engine.generate(_requests(prompts, num_new, "plain"))
        waited = engine.generate(_requests(prompts, 1, "waited"), profiler.barrier)
        with profiler:
            recorded = engine.generate(_requests(prompts, num_new, "recorded"), profiler.span)
        if trace is not None:
            profiler.write_trace(trace)
        return Profile(
            device=engine.config.device,
            dtype=engine.config.dtype,
            num_prompt_tokens=sum(map(len, prompts)),
            num_new_tokens=num_new * len(prompts),
            seconds=plain.seconds,
            num_steps=len(plain.steps),
            host_s=plain.host_s,
            first_token=_first_token(waited, tokenize_s),
            recorded_s=recorded.seconds,
            kernels=tuple(profiler.kernels()),
        )
    finally:
        engine.close()


def _requests(prompts: Sequence[tuple[int, ...]], num_new: int, run: str) -> list[GenerateRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=str(number), prompt=prompt, params=params, salt=f"{run} {number}"
        )
        for number, prompt in enumerate(prompts)
    ]


def _first_token(run: Run, tokenize_s: float | None) -> FirstToken:
    firsts = [(at, delta) for at, delta in run.answers if delta.token_ids]
    samples = [_sample_s(run, at) for at, _ in firsts]
    deltas: list[TokenDelta] = [delta for _, delta in firsts]
    sampling = fmean(samples)
    return FirstToken(
        tokenize_s,
        queue_s=fmean(delta.queue_s for delta in deltas),
        prefill_s=max(0.0, fmean(delta.prefill_s for delta in deltas) - sampling),
        first_sample_s=sampling,
    )


def _sample_s(run: Run, answered_at: float) -> float:
    """The sampling time of the step that produced an answer, in seconds. This is the last step that
    had ended by `answered_at`.
    """
    step = max(
        (step for step in run.steps if step.ended_at <= answered_at), key=lambda step: step.ended_at
    )
    return step.sample_s + step.wait_s
