"""Explains why a request took as long as it did.

Each cause has the seconds that it cost. A cause that is not the request's own work is the main
cause if it cost a fifth of the time or more. Otherwise the main cause is the one that cost most.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from engine.core.interfaces.handover import PEERS, Prefilled, PrefillOutcome
from engine.core.interfaces.timeline import WAITS, Preparation, Timeline
from engine.servers.http.request_log import RequestRecord

# A cause that cost less than this share of the request's time is not mentioned.
MIN_SHARE = 0.05
# From this share on, a cause that is not the request's own work is the main cause.
MAIN_SHARE = 0.2
OWN_WORK = ("prefill_node", "cold", "divergence", "eviction", "cache_off", "decode", "backend")
# A prompt that leaves the cached one before this token has nothing in common with it.
MIN_COMMON = 16


class Cause(msgspec.Struct, frozen=True):
    kind: str
    seconds: float
    sentence: str


_WAITED = {
    "step": "for the step that was running when it arrived",
    "slots": "for a free place in the batch, which was full (performance.batch_size)",
    "budget": "for room in a step: running requests used the token budget of all steps",
    "blocks": "for KV blocks: running requests held too many of them"
    " (performance.memory_pool_size_mb)",
    "turn": "for its tenant's turn: other tenants had received fewer tokens",
    "priority": "for requests with a higher priority, which went first",
    "prefix": "for another request that was computing the same prefix",
    "tier": "for KV blocks that were loaded from a tier of the cache",
}


_PREFILLED: dict[PrefillOutcome, str] = {
    "done": "had computed the prompt",
    "refused": "refused the prompt",
    "lost": "was lost",
    "late": "was given up",
}


def causes_of(record: RequestRecord, decisions: Sequence[dict[str, Any]]) -> list[Cause]:
    """All causes of the request's duration, the main one first."""
    found = [each for each in _all_causes(record, decisions) if each.seconds > 0]
    found.sort(key=lambda each: -each.seconds)
    total = seconds_of(record)
    shown = [each for each in found if each.seconds >= MIN_SHARE * total]
    # The sort is stable, so causes stay ordered by their seconds.
    shown.sort(key=lambda each: not _is_foreign(each, total))
    return [*_refusal(record, total), *shown]


def _refusal(record: RequestRecord, total: float) -> Iterator[Cause]:
    """Why the request has no answer at all, in the words of the refusal itself."""
    if record.error_message is not None and record.ttft_s is None:
        what = f"It was refused after {_s(total)} ({record.error_code}): {record.error_message}"
        yield Cause("refused", total, what)


def _is_foreign(cause: Cause, total: float) -> bool:
    return cause.kind not in OWN_WORK and cause.seconds >= MAIN_SHARE * total


def seconds_of(record: RequestRecord) -> float:
    return max((record.ended_at or record.started) - record.started, 1e-9)


def slowest(timelines: Iterable[Timeline]) -> Timeline | None:
    """The choice that ended last."""
    return max(timelines, key=lambda each: each.ended_at, default=None)


def timeline_of(record: RequestRecord) -> Timeline | None:
    """The timeline of the choice that ended last, up to the end of the answer. The engine learns of
    a stop string, and of a client that left, from the frontend. So it ends such a choice later.
    """
    found, until = slowest(record.notes.timelines), record.answered_at or record.ended_at
    if found is None or until is None or found.ended_at <= until:
        return found
    started_at, first_at = found.started_at, found.first_token_at
    return msgspec.structs.replace(
        found,
        started_at=None if started_at is None or started_at > until else started_at,
        first_token_at=None if first_at is None or first_at > until else first_at,
        ended_at=until,
    )


def _all_causes(record: RequestRecord, decisions: Sequence[dict[str, Any]]) -> Iterator[Cause]:
    timeline = timeline_of(record)
    prepared = record.notes.preparations[-1] if record.notes.preparations else None
    if record.body_at is not None:
        upload_s = record.body_at - record.started
        what = f"The client took {_s(upload_s)} to send its {record.num_body_bytes} bytes."
        yield Cause("upload", upload_s, what)
    yield from _route_causes(record, decisions, prepared)
    if prepared is not None:
        yield from _preparation_causes(prepared, timeline)
    if timeline is not None:
        is_revived = _is_revived(record, timeline)
        # The engine reads a request that arrives during a step when the step has ended.
        unread_s = 0.0 if prepared is None else timeline.submitted_at - prepared.submitted_at
        if timeline.prefilled is not None:
            unread_s -= timeline.prefilled.seconds
            yield _prefill_node_cause(timeline, timeline.prefilled)
        yield from _queue_causes(timeline, 0.0 if is_revived else max(unread_s, 0.0))
        yield from _prefill_causes(timeline)
        yield from _decode_causes(timeline)
        if is_revived:
            what = f"The engine died. The request went on in the next one {_s(unread_s)} after"
            yield Cause("revival", unread_s, f"{what} it was first submitted.")
    elif record.accepted_at is not None:
        yield _backend_cause(record, record.accepted_at)
    if record.answered_at is not None and record.ended_at is not None:
        client_s = record.ended_at - record.answered_at
        what = f"The client read slowly: it took {_s(client_s)} longer than the model."
        yield Cause("client", client_s, what)


def _is_revived(record: RequestRecord, timeline: Timeline) -> bool:
    return bool(timeline.num_resumed or (record.usage and record.usage.num_revivals))


def _backend_cause(record: RequestRecord, accepted_at: float) -> Cause:
    until = record.answered_at or record.ended_at or accepted_at
    seconds = until - accepted_at
    who = ", ".join(record.backends) or "The backend"
    if record.ttft_s is None:
        return Cause("backend", seconds, f"{who} sent no token within {_s(seconds)}.")
    first_s = record.started + record.ttft_s - accepted_at
    what = f"{who} took {_s(first_s)} to its first token, and {_s(seconds)} to the last."
    if record.usage is not None and record.usage.num_revivals:
        # The engine that ended it died before it told what it had done.
        return Cause("revival", seconds, f"The engine died, and the request went on. {what}")
    return Cause("backend", seconds, what)


def _route_causes(
    record: RequestRecord, decisions: Sequence[dict[str, Any]], prepared: Preparation | None
) -> Iterator[Cause]:
    spent = 0.0
    for each in decisions[:1]:
        waited_s = each["waited_s"]
        what = f"It waited {_s(waited_s)} for a free place: all replicas were busy."
        yield Cause("replica_busy", waited_s, what)
        failed_s = sum(failed["seconds"] for failed in each["failed"])
        names = ", ".join(failed["backend"] for failed in each["failed"])
        what = f"{names} failed after {_s(failed_s)}, and another replica was tried."
        yield Cause("replica_failed", failed_s, what)
        spent = waited_s + failed_s
    if prepared is not None and record.accepted_at is not None:
        load_s = prepared.began_at - record.accepted_at - spent
        what = f"The request waited {_s(load_s)} until its backend could take it: the model was"
        yield Cause("load", load_s, f"{what} being loaded, or a plugin worked on it.")


def _preparation_causes(prepared: Preparation, timeline: Timeline | None) -> Iterator[Cause]:
    encode_s = prepared.encoded_at - prepared.began_at
    what = f"Rendering the chat template and tokenizing {prepared.num_prompt} tokens took"
    yield Cause("tokenize", encode_s, f"{what} {_s(encode_s)}.")
    grammar_s = prepared.checked_at - prepared.encoded_at
    held_s = 0.0 if timeline is None else timeline.queued_at - timeline.submitted_at
    if timeline is not None and timeline.has_grammar:
        grammar_s += held_s
    what = f"Compiling the grammar took {_s(grammar_s)}."
    yield Cause("grammar", grammar_s, what)
    if timeline is not None and not timeline.has_grammar:
        what = f"Encoding {timeline.num_images} images took {_s(held_s)}."
        yield Cause("images", held_s, what)


def _queue_causes(timeline: Timeline, unread_s: float) -> Iterator[Cause]:
    for reason, waited_s in zip(WAITS, timeline.waits, strict=True):
        seconds = waited_s + unread_s if reason == "step" else waited_s
        sentence = f"It waited {_s(seconds)} {_WAITED[reason]}."
        if reason in ("turn", "priority"):
            sentence += f" {timeline.num_overtaken} later requests overtook it."
        elif timeline.num_before:
            sentence += f" {timeline.num_before} requests were ahead of it in the queue."
        yield Cause(reason, seconds, sentence)


def _prefill_causes(timeline: Timeline) -> Iterator[Cause]:
    if timeline.started_at is None:
        return
    until = timeline.first_token_at or timeline.ended_at
    pauses_s, _ = _pauses(timeline, timeline.started_at, until)
    own_s = sum(
        (each.ended_at - each.began_at) * each.count / max(each.num_tokens, 1)
        for each in timeline.chunks
        if each.ended_at <= until
    )
    num_new = timeline.num_prompt - timeline.num_cached
    kind, why = _why_not_cached(timeline)
    what = f"Prefill of {num_new} of {timeline.num_prompt} prompt tokens took {_s(own_s)}. {why}"
    yield Cause(kind, own_s, what)
    shared_s = until - timeline.started_at - own_s - pauses_s
    what = f"Prefill took {_s(shared_s)} longer, because its {len(timeline.chunks)} steps were"
    yield Cause("shared_prefill", shared_s, f"{what} shared with other requests.")


def _prefill_node_cause(timeline: Timeline, done: Prefilled) -> Cause:
    after = f"{done.node} {_PREFILLED[done.outcome]} after {_s(done.seconds)}"
    fetched = timeline.loaded_from.get(PEERS, 0)
    if done.outcome == "done":
        more = f"{fetched} of {timeline.num_prompt} prompt tokens were fetched there."
    else:
        more = "The prompt was computed elsewhere."
    return Cause("prefill_node", done.seconds, f"The prefill node {after}. {more}")


def _why_not_cached(timeline: Timeline) -> tuple[str, str]:
    at = None if timeline.divergence is None else timeline.divergence.at
    if timeline.is_cache_off:
        return "cache_off", "It could not use the prefix cache."
    if timeline.num_evicted > (timeline.num_prompt - timeline.num_cached) // 2:
        what = f"{timeline.num_evicted} of them had been computed before, and were evicted from"
        return "eviction", f"{what} the cache since."
    if at is not None and at >= MIN_COMMON:
        return "divergence", f"The prompt differs from the nearest cached one at token {at}."
    return "cold", f"The cache had {timeline.num_cached} of its tokens."


def _decode_causes(timeline: Timeline) -> Iterator[Cause]:
    work = timeline.decode
    paused_s, num_lost = _pauses(timeline, 0.0, timeline.ended_at)
    first_at = timeline.first_token_at or timeline.ended_at
    again_s = sum(c.ended_at - c.began_at for c in timeline.chunks if c.ended_at > first_at)
    what = f"It was preempted {timeline.num_pauses} times, because no KV block was free, and did"
    again = f"{num_lost} tokens had to be computed again."
    yield Cause("preemption", paused_s + again_s, f"{what} not run for {_s(paused_s)}. {again}")
    if timeline.first_token_at is None:
        return
    paused_s, _ = _pauses(timeline, timeline.first_token_at, timeline.ended_at)
    wall_s = max(timeline.ended_at - timeline.first_token_at - paused_s - again_s, 0.0)
    whose = "its grammar's masks" if timeline.has_grammar else "the grammar masks of others"
    yield Cause("mask", work.mask_s, f"Its steps waited {_s(work.mask_s)} for {whose}.")
    num_pure = work.num_steps - work.num_mixed
    pure_s = (work.seconds - work.mixed_s) / num_pure if num_pure else 0.0
    mixed_s = max(work.mixed_s - work.num_mixed * pure_s, 0.0)
    what = f"{work.num_mixed} of its {work.num_steps} decode steps also computed the prompts of"
    yield Cause("mixed", mixed_s, f"{what} other requests, which took {_s(mixed_s)} longer.")
    own_s = max(wall_s - work.mask_s - mixed_s, 0.0)
    what = f"It generated {timeline.num_generated} tokens in {_s(wall_s)}"
    batch = work.num_rows / work.num_steps if work.num_steps else 1.0
    where = (
        f"in batches of {batch:.0f} sequences on average" if batch >= 1.5 else "alone in its steps"
    )
    yield Cause("decode", own_s, f"{what}, {where}.")


def _pauses(timeline: Timeline, since: float, until: float) -> tuple[float, int]:
    """The seconds of preemption between two times, and how many computed tokens were lost."""
    inside = [each for each in timeline.pauses if since <= each.at <= until]
    seconds = sum((each.until or timeline.ended_at) - each.at for each in inside)
    return seconds, sum(each.num_lost for each in inside)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
