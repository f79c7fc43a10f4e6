"""The whole result of a request, as a client gets it, and how two of them are compared."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.interfaces.backend import (
    Event,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.interfaces.timeline import MAX_CHUNKS, Timeline
from engine.core.observability.trace_phases import details_of, phases_of
from engine.core.observability.tracing import BackendWork

EXACT = 0.0


@dataclass
class Choice:
    """What a client has of one choice. The pieces of its events are joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)  # by index: the name, the arguments
    logprobs: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Result:
    """The whole result of a request. `error` is its error code, if it failed."""

    choices: dict[int, Choice] = field(default_factory=dict)
    error: str | None = None
    message: str = ""
    usage: UsageEvent | None = None
    captured: bytes | None = None
    submitted_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float = 0.0
    progress: list[int] = field(default_factory=list)  # prompt tokens that were computed
    timelines: list[Timeline] = field(default_factory=list)
    num_waits: int = 0  # how often it was told that its turn has come
    num_events_after_end: int = 0

    def take(self, event: Event) -> None:
        """Add an event of the answer."""
        if isinstance(event, UsageEvent):
            self.usage = event
            return
        choice = self.choices.setdefault(event.choice, Choice())
        self.num_events_after_end += choice.finish_reason is not None
        if isinstance(event, TextEvent):
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs or ()
        elif isinstance(event, ReasoningEvent):
            choice.reasoning += event.text
        elif isinstance(event, ToolCallEvent):
            call = choice.calls.setdefault(event.index, ["", ""])
            call[0] += event.name or ""
            call[1] += event.arguments
        elif isinstance(event, FinishEvent):
            choice.finish_reason, choice.stop_reason = event.reason, event.stop_reason


def differences(alone: Result, got: Result, tolerance: float = EXACT) -> Iterator[str]:
    """What differs in a request that must have succeeded, one line for each field. Empty: nothing.
    Logprobs and captured values may differ by `tolerance`.
    """
    if (alone.error, alone.message) != (got.error, got.message):
        yield f"error: {alone.error} {alone.message!r} alone, {got.error} {got.message!r} here"
        return
    if alone.error is not None:  # how much a client has by then depends on the other choices
        yield from begun_differences(alone, got, both_are_cut=True)
        return
    if got.num_events_after_end:
        yield f"{got.num_events_after_end} events after the end of a choice"
    if alone.choices.keys() != got.choices.keys():
        yield f"choices: {sorted(alone.choices)} alone, {sorted(got.choices)} here"
        return
    for index, choice in alone.choices.items():
        for told in _choice_differences(choice, got.choices[index], tolerance):
            yield f"choice {index}: {told}"
    yield from _usage_differences(alone.usage, got.usage)
    yield from captured_differences(alone.captured, got.captured, tolerance)


def _choice_differences(alone: Choice, got: Choice, tolerance: float) -> Iterator[str]:
    for name in ("token_ids", "text", "reasoning", "calls", "finish_reason", "stop_reason"):
        if (a := getattr(alone, name)) != (b := getattr(got, name)):
            yield f"{name}: {a!r} alone, {b!r} here"
    yield from logprob_differences(alone.logprobs, got.logprobs, tolerance)


def logprob_differences(
    alone: Sequence[TokenText], got: Sequence[TokenText], tolerance: float
) -> Iterator[str]:
    if len(alone) != len(got):
        yield f"logprobs: of {len(alone)} tokens alone, of {len(got)} here"
        return
    for place, (a, b) in enumerate(zip(alone, got, strict=True)):
        texts = [(each.token_id, each.token, each.token_bytes, each.in_text) for each in (a, b)]
        if texts[0] != texts[1]:
            yield f"logprobs: token {place} is {texts[0]} alone, {texts[1]} here"
        elif not _close(a.logprob, b.logprob, tolerance):
            yield f"logprobs: {a.logprob} of token {place} alone, {b.logprob} here"
        elif not _same_top(a, b, tolerance):
            yield f"logprobs: alternatives of token {place}: {a.top} alone, {b.top} here"
        else:
            continue
        return


def _same_top(a: TokenText, b: TokenText, tolerance: float) -> bool:
    """With a tolerance, alternatives whose values tie may be in another order."""
    if len(a.top) != len(b.top):
        return False
    pairs = list(zip(a.top, b.top, strict=True))
    if not tolerance and any(x.token_id != y.token_id for x, y in pairs):
        return False
    return all(_close(x.logprob, y.logprob, tolerance) for x, y in pairs)


def _close(a: float, b: float, tolerance: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance


def _usage_differences(alone: UsageEvent | None, got: UsageEvent | None) -> Iterator[str]:
    if alone is None or got is None:
        if alone is not got:
            yield f"usage: {alone} alone, {got} here"
        return
    for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        if (a := getattr(alone, name)) != (b := getattr(got, name)):
            yield f"usage: {name} is {a} alone, {b} here"


def captured_differences(alone: bytes | None, got: bytes | None, tolerance: float) -> Iterator[str]:
    """What differs in the activations that two requests read."""
    if alone is None or got is None or alone == got:
        if (alone is None) != (got is None):
            yield f"captured: {alone is not None} alone, {got is not None} here"
        return
    import numpy as np

    from engine.core.interp.results import InterpResult

    first, second = InterpResult(alone), InterpResult(got)
    if not _same_facts(first.facts, second.facts, tolerance):
        yield f"captured: {json.dumps(first.facts)} alone, {json.dumps(second.facts)} here"
        return
    for name, tensor in first.tensors.items():
        kind = np.int32 if tensor.dtype == "I32" else np.float32
        a, b = (np.frombuffer(each.data, kind) for each in (tensor, second.tensors[name]))
        if a.shape != b.shape or not np.allclose(a, b, rtol=tolerance, atol=tolerance):
            yield f"captured: the values of tensor {name} differ"


def _same_facts(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two values of JSON are equal, but for rounding."""
    if isinstance(a, float) and isinstance(b, float):
        return _close(a, b, tolerance)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_facts(a[k], b[k], tolerance) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            _same_facts(x, y, tolerance) for x, y in zip(a, b, strict=True)
        )
    return bool(a == b)


def begun_differences(alone: Result, got: Result, *, both_are_cut: bool = False) -> Iterator[str]:
    """What is wrong with a request that was cut short: all that its client has must be a beginning
    of what it gives alone. If both are cut, the shorter must be a beginning of the longer.
    """
    for index, choice in got.choices.items():
        whole = alone.choices.get(index, Choice() if both_are_cut else None)
        if whole is None:
            yield f"choice {index} is not there alone"
            continue
        for name in ("token_ids", "text", "reasoning"):
            a, b = getattr(whole, name), getattr(choice, name)
            shared = min(len(a), len(b)) if both_are_cut else len(b)
            if a[:shared] != b[:shared]:
                yield f"choice {index}: {name}: {b!r} is no beginning of {a!r}"
        if len(choice.logprobs) > len(whole.logprobs) and not both_are_cut:
            yield f"choice {index}: more logprobs than alone"


def broken_timelines(timelines: Iterable[Timeline], *, repeats: bool) -> Iterator[str]:
    """What is wrong with the explanation of a request: its times are in order, the parts of each
    wait sum to the wait, and the parts of the prompt to what was computed of it. With `repeats`,
    steps that failed were repeated.
    """
    for each in timelines:
        times = (each.submitted_at, each.queued_at, each.started_at, each.first_token_at)
        known = [at for at in (*times, each.ended_at) if at is not None]
        if known != sorted(known):
            yield f"explanation: times out of order: {known}"
        if each.started_at is not None:
            waited = each.started_at - each.queued_at
            if abs(sum(each.waits) - waited) > 1e-6:
                yield f"explanation: waits {each.waits} are not the {waited} s of the wait"
        if any(value < -1e-9 for value in each.waits):
            yield f"explanation: a negative wait: {each.waits}"
        if each.num_cached > each.num_prompt:
            yield f"explanation: {each.num_cached} of {each.num_prompt} prompt tokens were cached"
        if each.decode.seconds < 0 or each.decode.mixed_s - 1e-9 > each.decode.seconds:
            yield f"explanation: decode {each.decode}"
        yield from _broken_chunks(each, repeats)


def _broken_chunks(timeline: Timeline, repeats: bool) -> Iterator[str]:
    chunks = timeline.chunks
    if any(chunk.ended_at < chunk.began_at for chunk in chunks):
        yield f"explanation: a step ended before it began: {chunks}"
    # Of other sequences, some tokens are computed again.
    is_plain = not (timeline.num_pauses or timeline.num_resumed or repeats)
    if is_plain and timeline.first_token_at is not None and len(chunks) < MAX_CHUNKS:
        parts = [(chunk.start, chunk.start + chunk.count) for chunk in chunks]
        ends = [timeline.num_cached, *(end for _, end in parts)]
        if [start for start, _ in parts] != ends[:-1] or ends[-1] != timeline.num_prompt:
            yield f"explanation: parts {parts} of {timeline.num_prompt} prompt tokens"


def broken_spans(result: Result) -> Iterator[str]:
    """What is wrong with the trace of a request: its phases follow each other and fill its time,
    and each detail lies in this time.
    """
    if result.error is not None:
        return
    work = BackendWork(
        request=None,
        submitted_at=result.submitted_at,
        first_token_at=result.first_token_at,
        ended_at=result.ended_at,
        usage=result.usage,
        finish_reasons=(),
        timelines=result.timelines,
        longest=0,
        error_code=None,
    )
    phases = phases_of(work, result.submitted_at, None)
    times = [result.submitted_at, *(each.ended_at for each in phases)]
    if [each.began_at for each in phases] != times[:-1] or times[-1] != result.ended_at:
        yield f"trace: the phases do not fill the time: {phases}"
    for each in (*phases, *details_of(work)):
        if not result.submitted_at <= each.began_at <= each.ended_at <= result.ended_at:
            yield f"trace: {each} lies outside of the request, or ends before it begins"
