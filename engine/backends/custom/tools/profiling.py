"""Where a model's time goes: kernels, the way to a first token, and what the host adds.

The same requests are run several times: to warm up, undisturbed for the rates, with a wait for the
device behind every call for the way to the first token, and recorded for the kernels. Each run has
a cache namespace of its own, so that none finds the work of another.
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
    """The way of a request to its first token, in seconds, on average."""

    tokenize_s: float | None  # None: the prompt was given as ids
    queue_s: float  # from submission to the first step that has it
    prefill_s: float  # until its logits are there
    first_sample_s: float  # drawing the token, and its way to the host

    @property
    def total_s(self) -> float:
        return (self.tokenize_s or 0.0) + self.queue_s + self.prefill_s + self.first_sample_s


@dataclass(frozen=True, slots=True)
class Profile:
    device: str
    dtype: str
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float  # undisturbed, for all requests
    num_steps: int
    host_s: float  # of these seconds: the host did not wait for the device
    first_token: FirstToken
    recorded_s: float  # the same work while it was recorded
    kernels: tuple[KernelTime, ...]


def profile_model(
    source: ModelSource,
    options: EngineOptions,
    prompts: Sequence[tuple[int, ...]],
    num_new: int,
    tokenize_s: float | None,
    trace: Path | None = None,
) -> Profile:
    """Load the model and run the prompts, `num_new` tokens each, greedily."""
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
    """Of the step behind an answer: the last one that had ended by then."""
    step = max(
        (step for step in run.steps if step.ended_at <= answered_at), key=lambda step: step.ended_at
    )
    return step.sample_s + step.wait_s
