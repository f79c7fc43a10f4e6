"""Profiles a model: time per kernel, time to first token by phase, and host overhead.

The same requests run four times. The first run is a warm-up. The second run is not disturbed and
measures the throughput. The third run syncs the device after every call, which measures the phases
of the time to first token. The framework's profiler records the fourth run, which measures the time
per kernel. Each run has its own salt, so that no run finds the prefixes of another run in the
cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from engine.backends.custom.frameworks.entry import framework_entry
from engine.backends.custom.options import EngineOptions
from engine.backends.custom.runtime.model_runner import KernelTime, Profiler
from engine.backends.custom.tools.driver import DrivenEngine, Run
from engine.backends.custom.weights.model import ModelSource
from engine.core.interfaces.request import GenerateRequest, SamplingParams, TokenDelta


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
