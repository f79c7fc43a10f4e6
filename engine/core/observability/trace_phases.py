"""Turns the times of a request into the parts that its trace shows: phases, and details inside.

A phase begins when the one before it ends, so the phases of a request add up to its duration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engine.core.interfaces.timeline import WAITS, Timeline
from engine.core.observability.tracing import Attribute, BackendWork


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    """A span that is not made yet."""

    name: str
    began_at: float
    ended_at: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)


def phases_of(
    work: BackendWork, started: float, remote: tuple[float, float] | None
) -> list[PlannedSpan]:
    """The phases of a request until its answer is complete. If another server has answered, the
    span of this call, at the times `remote`, takes the place of queue, prefill and decode.
    """
    submitted, first = work.submitted_at, work.first_token_at
    if remote is not None:
        return [PlannedSpan("prepare", started, remote[0])]
    if submitted is None:
        return []
    prepare = PlannedSpan("prepare", started, submitted)
    if first is None or work.usage is None:
        # The engine reports when prefill began only with the end of its answer.
        waited_until = work.ended_at if first is None else first
        phases = [prepare, PlannedSpan("wait", submitted, waited_until)]
        return phases if first is None else [*phases, PlannedSpan("decode", first, work.ended_at)]
    timeline = _first_timeline(work)
    if timeline is None or timeline.started_at is None or timeline.first_token_at is None:
        seated = first - work.usage.prefill_s
    else:
        seated, first = timeline.started_at, min(timeline.first_token_at, first)
    first = max(first, submitted)
    seated = min(max(seated, submitted), first)
    return [
        prepare,
        PlannedSpan("queue", submitted, seated, {} if timeline is None else _waits(timeline)),
        PlannedSpan(
            "prefill",
            seated,
            first,
            {
                "gen_ai.usage.input_tokens": work.usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": work.usage.cached_tokens,
            },
        ),
        PlannedSpan("decode", first, work.ended_at, {} if timeline is None else _decode(timeline)),
    ]


def details_of(work: BackendWork) -> list[PlannedSpan]:
    """Parts inside of the phases: what the backend did before the engine had the request, and each
    chunk of the prompt and each preemption in the engine.
    """
    details: list[PlannedSpan] = []
    for each in work.preparations:
        tokens = {"engine.prompt_tokens": each.num_prompt}
        details.append(PlannedSpan("tokenize", each.began_at, each.encoded_at, tokens))
        if each.checked_at - each.encoded_at > 0.001:
            details.append(PlannedSpan("check grammar", each.encoded_at, each.checked_at))
    timeline = _first_timeline(work)
    if timeline is None:
        return details
    if timeline.has_grammar:
        details.append(PlannedSpan("compile grammar", timeline.submitted_at, timeline.queued_at))
    for chunk in timeline.chunks:
        sizes = {
            "engine.chunk_tokens": chunk.count,
            "engine.step_tokens": chunk.num_tokens,
            "engine.step_sequences": chunk.num_rows,
        }
        details.append(PlannedSpan("chunk", chunk.began_at, chunk.ended_at, sizes))
    for pause in timeline.pauses:
        until = timeline.ended_at if pause.until is None else pause.until
        details.append(
            PlannedSpan("preempted", pause.at, until, {"engine.lost_tokens": pause.num_lost})
        )
    # The engine learns of a stop string from the frontend, so it may work beyond the end.
    end = work.ended_at
    begun = [each for each in details if each.began_at <= end]
    return [replace(each, ended_at=min(each.ended_at, end)) for each in begun]


def _first_timeline(work: BackendWork) -> Timeline | None:
    """The timeline of the choice that had the first token. None if a part of it is unknown, because
    the request was continued in another engine process.
    """
    known = [each for each in work.timelines if each.first_token_at is not None]
    if not known or any(each.num_resumed for each in known):
        return None
    return min(known, key=lambda each: each.first_token_at or 0.0)


def _waits(timeline: Timeline) -> dict[str, Attribute]:
    waits = zip(WAITS, timeline.waits, strict=True)
    return {f"engine.wait.{name}_s": seconds for name, seconds in waits if seconds > 0}


def _decode(timeline: Timeline) -> dict[str, Attribute]:
    steps = timeline.decode
    found: dict[str, Attribute] = {"engine.steps": steps.num_steps}
    if steps.num_steps:
        found["engine.mean_batch"] = steps.num_rows / steps.num_steps
    if steps.mask_s:
        found["engine.mask_s"] = steps.mask_s
    if timeline.num_pauses:
        found["engine.preemptions"] = timeline.num_pauses
    return found
