"""Runs one backend after the other. Each is started, warmed up, given all prompts, and stopped.

Two backends never run at the same time, because they would compete for the cores and distort the
times.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.backends.base import InferenceBackend
from engine.backends.factory import make_backend
from engine.core.errors import ConfigError, EngineError
from engine.core.interfaces.backend import GenerationContext, ModelCard, TextEvent
from engine.core.interfaces.request import SamplingParams
from engine.routing.shadow.compared_answer import ComparedAnswer
from engine_tools.compare.contenders import Contender
from engine_tools.compare.prompts import ComparedPrompt

NUM_ALTERNATIVES = 5  # requested alternatives per token; every kind of server supports this many
WARM_UP = "Water boils at"
WARM_UP_TOKENS = 8

Make = Callable[[Contender], InferenceBackend]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts that every backend gets, and the limits of each request."""

    prompts: Sequence[ComparedPrompt]
    max_tokens: int
    concurrency: int
    timeout_s: float  # seconds for one request


@dataclass(frozen=True, slots=True)
class ComparedOutcome:
    """The result for one prompt: an answer, or an error."""

    answer: ComparedAnswer
    ttft_s: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CompareTrial:
    """One backend's outcomes, in the order of the prompts. If the backend could not run, `failure`
    says why.
    """

    contender: Contender
    outcomes: tuple[ComparedOutcome, ...] = ()
    failure: EngineError | None = None
    card: ModelCard | None = None
    start_s: float = 0.0
    wall_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(each.answer.num_tokens for each in self.outcomes)


def make_contender(contender: Contender) -> InferenceBackend:
    return make_backend(contender.kind, contender.model, contender.options)


async def run_all(
    contenders: Sequence[Contender], plan: Plan, say: Say, make: Make = make_contender
) -> list[CompareTrial]:
    """Run all backends. The first is the reference.

    Raises if the reference fails, because then there is nothing to compare with. If a backend has
    invalid options, raises before the first backend starts.
    """
    backends = [make(contender) for contender in contenders]
    trials: list[CompareTrial] = []
    for contender, backend in zip(contenders, backends, strict=True):
        trial = await _try(contender, backend, plan, say)
        if not trials and trial.failure is not None:
            raise trial.failure
        trials.append(trial)
    return trials


async def _try(
    contender: Contender, backend: InferenceBackend, plan: Plan, say: Say
) -> CompareTrial:
    say(f"{contender.name}: starting")
    began = time.monotonic()
    try:
        await backend.start()
        started = time.monotonic()
        card = backend.models()[0]
        _check(card, plan.prompts)
        params, notes = _params(card, plan.max_tokens)
        say(f"{contender.name}: warming up")
        await _warm_up(backend, card, params, plan)
        measured = time.monotonic()
        outcomes = await _ask_all(contender.name, backend, params, plan, say)
        wall_s = time.monotonic() - measured
    except EngineError as error:
        return CompareTrial(contender, failure=error)
    finally:
        say(f"{contender.name}: stopping")
        await backend.stop()
    return CompareTrial(contender, outcomes, None, card, started - began, wall_s, notes)


def _check(card: ModelCard, prompts: Sequence[ComparedPrompt]) -> None:
    for prompt in prompts:
        if prompt.capability not in card.capabilities:
            hint = "use --chat" if prompt.capability == "completions" else "give it plain prompts"
            raise ConfigError(f"{card.id} ({card.backend}) does not do {prompt.capability}; {hint}")


def _params(card: ModelCard, max_tokens: int) -> tuple[SamplingParams, tuple[str, ...]]:
    notes = []
    if "temperature" in card.lacks:
        notes.append("it can't be told to be greedy")
    if "logprobs" in card.lacks:
        notes.append("it tells no logprobs: a near tie can't be told from a difference")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if "temperature" in card.lacks else 0.0,
        logprobs=None if "logprobs" in card.lacks else NUM_ALTERNATIVES,
    ), tuple(notes)


async def _warm_up(
    backend: InferenceBackend, card: ModelCard, params: SamplingParams, plan: Plan
) -> None:
    """Warm the backend up with as many concurrent requests as the measurement uses. Their text is
    not the start of a usual prompt, so the prompts find nothing of it in the prefix cache.
    """
    brief = SamplingParams(
        max_tokens=WARM_UP_TOKENS, temperature=params.temperature, logprobs=params.logprobs
    )
    is_chat = "completions" not in card.capabilities
    content = ({"role": "user", "content": WARM_UP},) if is_chat else WARM_UP
    prompt = ComparedPrompt("warm-up", content)
    asked = [_answer(backend, prompt, brief, plan.timeout_s) for _ in range(plan.concurrency)]
    for outcome in await asyncio.gather(*asked):
        if outcome.error is not None:
            raise EngineError(f"the first request failed: {outcome.error}")


async def _ask_all(
    name: str, backend: InferenceBackend, params: SamplingParams, plan: Plan, say: Say
) -> tuple[ComparedOutcome, ...]:
    free = asyncio.Semaphore(plan.concurrency)
    done = itertools.count(1)

    async def ask(prompt: ComparedPrompt) -> ComparedOutcome:
        async with free:
            outcome = await _answer(backend, prompt, params, plan.timeout_s)
        say(f"{name}: {next(done)} of {len(plan.prompts)}")
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(prompt)) for prompt in plan.prompts]
    return tuple(task.result() for task in tasks)


async def _answer(
    backend: InferenceBackend, prompt: ComparedPrompt, params: SamplingParams, timeout_s: float
) -> ComparedOutcome:
    context = GenerationContext(
        request_id=f"compare-{secrets.token_hex(8)}", params=params, timeout_s=timeout_s
    )
    answer = ComparedAnswer()
    ttft_s: float | None = None
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            async for event in prompt.ask(backend, context):
                if ttft_s is None and isinstance(event, TextEvent) and event.num_tokens:
                    ttft_s = time.monotonic() - began
                answer.add(event)
    except TimeoutError:
        return ComparedOutcome(answer, ttft_s, f"no end within {timeout_s:g} s")
    except EngineError as error:
        return ComparedOutcome(answer, ttft_s, str(error))
    return ComparedOutcome(answer, ttft_s)
