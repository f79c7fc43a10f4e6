"""Runs an evaluation: one model after the other, and then the judge on the answers that need it.

Two models never run at the same time on this machine. Models of a server at an address are asked
one after the other too, so that their speed can be compared.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.core.errors import ConfigError, EngineError
from engine_tools.compare.contenders import Contender
from engine_tools.compare.run import make_contender
from engine_tools.evaluation.asking import Asker, Scored
from engine_tools.evaluation.items import ChoiceCheck, Item, JudgeCheck
from engine_tools.evaluation.results import Result, ResultFile

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    items: Sequence[Item]
    max_tokens: int
    concurrency: int
    timeout_s: float
    instruction: str
    judge: str = ""  # the name of the model that judges

    @property
    def settings(self) -> str:
        """What results depend on, besides the model and the question."""
        judge = f", judge {self.judge}" if self.judge else ""
        return f"{self.max_tokens} tokens, instruction {self.instruction!r}{judge}"


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """What one model did. `results` are in the order of the questions; None is an error."""

    name: str
    results: tuple[Result | None, ...]
    errors: tuple[str, ...]
    wall_s: float  # of the questions that were asked in this run
    num_tokens: int  # generated in this run


async def evaluate(
    contenders: Sequence[Contender],
    judge: Contender | None,
    plan: EvaluationPlan,
    file: ResultFile,
    say: Say,
) -> list[EvaluatedModel]:
    """Ask all models. Raises if a model does not start, or lacks what a question needs."""
    if judge is None and any(isinstance(each.check, JudgeCheck) for each in plan.items):
        raise ConfigError("questions with criteria need a judge: --judge MODEL", param="judge")
    found = []
    for contender in contenders:
        async with _started(contender, plan, say) as asker:
            found.append(await _ask_all(contender.name, asker, plan, file, say))
    if judge is not None and any(_undecided(each) for each in found):
        async with _started(judge, plan, say) as asker:
            found = [await _judge_all(each, asker, plan, file, say) for each in found]
    return found


@asynccontextmanager
async def _started(contender: Contender, plan: EvaluationPlan, say: Say) -> AsyncIterator[Asker]:
    backend = make_contender(contender)
    say(f"{contender.name}: starting")
    try:
        await backend.start()
        card = backend.models()[0]
        if any(isinstance(each.check, ChoiceCheck) for each in plan.items) and (
            "completions" not in card.capabilities or "logprobs" in card.lacks
        ):
            raise ConfigError(
                f"{contender.name} gives no log-probabilities of completions, which choices need"
            )
        yield Asker(backend, card, plan.max_tokens, plan.timeout_s, plan.instruction)
    finally:
        await backend.stop()


async def _ask_all(
    name: str, asker: Asker, plan: EvaluationPlan, file: ResultFile, say: Say
) -> EvaluatedModel:
    num_done, num_tokens, errors = 0, 0, []

    async def ask(item: Item) -> Result | None:
        nonlocal num_done, num_tokens
        result = file.found(name, item.digest)
        if result is None:
            try:
                result = _result(name, plan, item, await asker.ask(item))
            except (EngineError, TimeoutError) as error:
                errors.append(str(error) or f"no end within {plan.timeout_s:g} s")
            else:
                file.add(result)
                num_tokens += result.num_tokens
        num_done += 1
        say(f"{name}: {num_done} of {len(plan.items)}")
        return result

    began = time.monotonic()
    results = await _limited(plan, [ask(item) for item in plan.items])
    return EvaluatedModel(name, results, tuple(errors), time.monotonic() - began, num_tokens)


async def _judge_all(
    evaluated: EvaluatedModel, judge: Asker, plan: EvaluationPlan, file: ResultFile, say: Say
) -> EvaluatedModel:
    errors = list(evaluated.errors)

    async def decide(item: Item, result: Result | None) -> Result | None:
        if result is None or result.scores or not isinstance(item.check, JudgeCheck):
            return result
        try:
            is_right = await judge.judge(item, result.answer)
        except (EngineError, TimeoutError) as error:
            errors.append(f"judge: {str(error) or 'no end in time'}")
            return None
        scored = Scored(result.answer, {"judge": is_right}, result.num_tokens)
        decided = _result(evaluated.name, plan, item, scored)
        file.add(decided)
        return decided

    say(f"judging the answers of {evaluated.name}")
    pairs = zip(plan.items, evaluated.results, strict=True)
    results = await _limited(plan, [decide(item, result) for item, result in pairs])
    return EvaluatedModel(
        evaluated.name, results, tuple(errors), evaluated.wall_s, evaluated.num_tokens
    )


async def _limited(
    plan: EvaluationPlan, asked: Sequence[Awaitable[Result | None]]
) -> tuple[Result | None, ...]:
    free = asyncio.Semaphore(plan.concurrency)

    async def one(each: Awaitable[Result | None]) -> Result | None:
        async with free:
            return await each

    return tuple(await asyncio.gather(*map(one, asked)))


def _result(name: str, plan: EvaluationPlan, item: Item, scored: Scored) -> Result:
    return Result(
        model=name,
        settings=plan.settings,
        item=item.id,
        digest=item.digest,
        answer=scored.answer,
        scores=scored.scores,
        num_tokens=scored.num_tokens,
    )


def _undecided(evaluated: EvaluatedModel) -> bool:
    return any(each is not None and not each.scores for each in evaluated.results)
