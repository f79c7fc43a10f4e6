"""Runs a history, runs each of its requests alone, and says what differs."""

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from engine.core.errors import InferenceError, InvalidRequestError, RequestTimeoutError
from engine.core.interfaces.request import GenerateRequest
from engine.frontend.prompts import Prepared
from tests.oracle.asking import Content, ask, prepare
from tests.oracle.clock import GivenLoop, given_clock, small_pieces
from tests.oracle.efficiency import excess, unusual_alone
from tests.oracle.histories import History, Shape
from tests.oracle.level import Level
from tests.oracle.requests import AROUND, DrawnRequest
from tests.oracle.results import (
    Result,
    begun_differences,
    broken_spans,
    broken_timelines,
    differences,
)
from tests.oracle.run import OVERDUE_TURNS, Outcome, Run, Submitted

MAX_ALONE = 4096  # results that are kept


@dataclass
class Report:
    """What a history showed. `wrong` is empty if nothing differs."""

    wrong: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


class Oracle:
    """Checks histories of one level. It keeps what requests give alone."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._alone: dict[str, Result] = {}
        self._prepared: dict[str, Prepared] = {}
        self._loop = GivenLoop()

    def close(self) -> None:
        self._loop.close()

    def check(self, history: History, seed: str) -> Report:
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # injected faults are logged like real ones
        try:
            submitted = self._submitted(history, seed)
            with small_pieces():
                outcome = self._run(history, submitted, seed)
        finally:
            logging.disable(before)
        wrong = [*outcome.wrong, *judged(submitted, outcome, self.level.tolerance)]
        return Report(wrong + [*excess(history, submitted, outcome)], outcome.seen)

    def _run(self, history: History, submitted: list[Submitted], seed: str) -> Outcome:
        with given_clock(seed) as clock:
            run = Run(self.level, history, submitted, clock, self._loop)
            return self._loop.run_until_complete(run.go())

    def _submitted(self, history: History, seed: str) -> list[Submitted]:
        """The requests of a history, and what each gives alone."""
        level, found = self.level, list[Submitted]()
        shape = level.alone_in(history.shape)
        for index, drawn in enumerate(history.requests):
            follows: tuple[int, ...] = ()
            if drawn["follows"] is not None:
                follows = _conversation(found[drawn["follows"]], level.max_follows)
            content = level.content(drawn, follows)
            key = f"{json.dumps(shape)} {content.prompt} {drawn.key}"
            prepared = self._prepared.get(key) or prepare(level.text, level.output, drawn, content)
            alone = self._alone.get(key) or self._run_alone(drawn, content, prepared, shape)
            self._keep(key, prepared, alone)
            expected = _prediction(drawn, alone, random.Random(f"{seed} {index}"))
            prepared = replace(prepared, expected=expected) if expected else prepared
            asked = ask(level.text, prepared, drawn, content, f"r{index}", level.max_seq_len)
            found.append(Submitted(drawn, content, asked, alone))
        return found

    def _keep(self, key: str, prepared: Prepared, alone: Result) -> None:
        if len(self._alone) >= MAX_ALONE:
            self._alone.clear()
            self._prepared.clear()
        self._alone[key], self._prepared[key] = alone, prepared

    def _run_alone(
        self, drawn: DrawnRequest, content: Content, prepared: Prepared, shape: Shape
    ) -> Result:
        level = self.level
        for name in AROUND:
            drawn = drawn.without(name)
        asked = ask(level.text, prepared, drawn, content, "r0", level.max_seq_len)
        history = History(shape, (drawn,), (("submit", 0),))
        alone = Submitted(drawn, content, asked, Result())
        outcome = self._run(history, [alone], "alone")
        alone.alone = outcome.results[0]
        if (bug := alone.alone).error == "BUG":
            outcome.wrong.append(bug.message)
        wrong = outcome.wrong + [*unusual_alone(alone, shape, outcome)]
        assert not wrong, f"{wrong} in {history}"
        return outcome.results[0]


def _conversation(before: Submitted, most: int) -> tuple[int, ...]:
    """The prompt of an earlier request and its answer, which a request continues."""
    if before.content.images or before.alone.error is not None:
        return ()
    answer = before.alone.choices[0].token_ids
    whole = (*before.content.prompt, *answer)
    return whole if len(whole) <= most else ()


def _prediction(drawn: DrawnRequest, alone: Result, rng: random.Random) -> tuple[int, ...]:
    """What the client expects: the right answer, with some wrong tokens."""
    share = drawn["prediction"]
    if share is None or alone.error is not None:
        return ()
    answer = alone.choices[0].token_ids
    return tuple(token if rng.random() < share else rng.choice(answer) for token in answer)


def judged(submitted: list[Submitted], outcome: Outcome, tolerance: float) -> Iterator[str]:
    """What is wrong with the results of a history, one line for each."""
    pardons = Counter(
        nonfinite=outcome.num_marked,
        crossed=outcome.num_crossed,
        deaths=(outcome.seen["kill"] + outcome.seen["lose_node"]) // 2 * len(submitted),
    )
    outcome.repeats = any(outcome.seen[kind] for kind in ("fault", "memory", "nan"))
    outcome.repeats |= any(each.drawn["poison"] for each in submitted)
    for index, result in outcome.results.items():
        each = submitted[index]
        if index in outcome.cancelled:
            found = list(begun_differences(each.alone, result))
        elif result.error is not None and result.message != each.alone.message:
            found = list(_failure(each, result, pardons))
        else:
            found = list(_success(each, result, outcome, tolerance))
        found += broken_timelines(result.timelines, repeats=outcome.repeats)
        found += broken_spans(result) if index not in outcome.cancelled else ()
        yield from (f"request {index}: {told}" for told in found)


def _failure(each: Submitted, result: Result, pardons: Counter[str]) -> Iterator[str]:
    """A request that fails in a history must do so in the documented way, and for a reason."""
    reason = ""
    if result.error == RequestTimeoutError.code and each.drawn["deadline"] is not None:
        reason = "deadline"
    elif result.error in (InferenceError.code, InvalidRequestError.code):
        reason = _REASONS.get(result.message, "")
    if reason == "deadline":
        pass
    elif pardons[reason]:
        pardons[reason] -= 1
    else:
        yield f"it fails for no reason: {result.error} {result.message!r}"
    yield from begun_differences(each.alone, result)


_REASONS = {
    "The model produced non-finite values for this request.": "nonfinite",
    "interp.edit: with these edits, the model produced non-finite values; use smaller vectors and"
    " scales.": "nonfinite",
    "The engine failed on this request.": "crossed",
    "The model failed on this request.": "crossed",
    "The engine died each time it ran this request.": "deaths",
}


def _begun_wrongly(each: Submitted, result: Result, outcome: Outcome) -> Iterator[str]:
    """A request is told that its turn has come by the first of several steps of its prompt. If
    there is only one, its token says the same.
    """
    name, timelines = each.asked.request.request_id, result.timelines
    first = next((line for line in timelines if not line.choice), None)
    assert result.usage is not None
    has_moved = outcome.seen["swap"] or result.usage.num_revivals
    if first is None or has_moved or first.num_pauses or outcome.repeats:
        return
    count = sum(engine.channel.begun[name] for engine in outcome.engines)
    if count != (len(first.chunks) > 1):
        yield f"its prompt took {len(first.chunks)} steps, and {count} told that its turn has come"


def _success(each: Submitted, result: Result, outcome: Outcome, tolerance: float) -> Iterator[str]:
    yield from differences(each.alone, result, tolerance)
    if each.num_overdue > OVERDUE_TURNS:
        yield f"it ran for {each.num_overdue} turns after its deadline"
    usage = result.usage
    if usage is None:
        return
    request: GenerateRequest = each.asked.request
    if not 0 <= usage.cached_tokens < len(request.prompt):
        yield f"{usage.cached_tokens} cached tokens of a prompt of {len(request.prompt)}"
    if not usage.num_accepted <= min(usage.num_drafted, usage.completion_tokens):
        yield f"drafts: {usage.num_accepted} of {usage.num_drafted} accepted"
    if usage.num_revivals > sum(outcome.seen[kind] for kind in ("kill", "lose_node", "swap")):
        yield f"{usage.num_revivals} revivals"
    if each.drawn["progress"]:
        if result.progress != sorted(set(result.progress)) or not result.progress:
            yield f"progress went back: {result.progress}"
        elif result.progress[-1] != len(request.prompt):
            yield f"progress ended at {result.progress[-1]} of {len(request.prompt)}"
        yield from _begun_wrongly(each, result, outcome)
        if result.num_waits != 1:
            yield f"it was told {result.num_waits} times that its turn has come"
