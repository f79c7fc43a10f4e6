"""`/v1/admin/requests`: what happened to the last requests, and why each took as long as it did.

A client sees the requests of its own tenant, and an administrator those of all tenants. Neither
sees a prompt, unless `requests.show_text` is set. Then a few words are shown at which a prompt
leaves the cached one.
"""

import time
from itertools import islice, pairwise
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import EngineError, InvalidRequestError, NotFoundError
from engine.core.interfaces.timeline import BATCH_EDGES, WAITS, PromptDivergence, Timeline
from engine.routing.report import describe_decisions
from engine.routing.router import Router
from engine.servers.access.auth import may_administer, may_read_routes, principal_of
from engine.servers.http.request_log import RequestRecord
from engine.servers.ops.explain import causes_of, seconds_of, slowest, timeline_of
from engine.servers.serving.services import Services, json_response

DEFAULT_SHOWN = 50
MAX_SHOWN = 1000


def add_requests_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/admin/requests")
    async def requests(request: Request) -> Response:
        limit = _limit(request.query_params.get("limit"))
        seen = services.history.newest(_tenant(services, request))
        newest = islice((each for each in seen if _may_see(request, each)), limit)
        return json_response(
            {"requests": [summary(services, each) for each in newest], "kept": _kept(services)}
        )

    @app.get("/v1/admin/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        record = await services.history.find(request_id, _tenant(services, request))
        if record is None or not _may_see(request, record):
            raise NotFoundError(
                f"There is no such request: it still runs, or it is not among the last"
                f" {_kept(services)} that the server keeps (requests.keep).",
                param="request_id",
            )
        told = await _explained(services, record)
        if not may_read_routes(request, services.keys):
            told["decisions"] = []
        return json_response(told)


def _kept(services: Services) -> int:
    return services.settings.requests.keep


def _tenant(services: Services, request: Request) -> str | None:
    """The tenant whose requests the client may see. None: those of all tenants."""
    return None if may_administer(request, services.keys) else principal_of(request).name


def _may_see(request: Request, record: RequestRecord) -> bool:
    """Whether the key may know of the request. Another key of its tenant may use other models."""
    models = principal_of(request).models
    return models is None or record.model is None or record.model in models


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_SHOWN
    if not (given.isdecimal() and len(given) < 6 and 1 <= int(given) <= MAX_SHOWN):
        raise InvalidRequestError(f"limit must be within 1..{MAX_SHOWN}.", param="limit")
    return int(given)


def decisions_on(services: Services, record: RequestRecord) -> list[dict[str, Any]]:
    backend = services.backend.unwrapped
    if not isinstance(backend, Router) or record.completion_id is None:
        return []
    return describe_decisions(backend, record.completion_id)


def summary(services: Services, record: RequestRecord) -> dict[str, Any]:
    """One line of the list of requests."""
    usage = record.usage
    causes = causes_of(record, decisions_on(services, record))
    return {
        "id": record.completion_id,
        "request_id": record.request_id,
        "at": round(time.time() - (time.monotonic() - record.started), 3),
        "route": record.route,
        "model": record.model,
        "backend": ", ".join(record.backends),
        "status": record.status,
        "error_code": record.error_code,
        "seconds": round(seconds_of(record), 6),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "cause": causes[0].kind if causes else None,
        "explanation": causes[0].sentence if causes else "It took no measurable time.",
    }


async def _explained(services: Services, record: RequestRecord) -> dict[str, Any]:
    decisions = decisions_on(services, record)
    causes = causes_of(record, decisions)
    timeline = slowest(record.notes.timelines)
    shown = await _shown_divergence(services, record, timeline)
    return summary(services, record) | {
        "causes": [msgspec.to_builtins(each) for each in causes],
        "spans": spans_of(record),
        "cache": None if timeline is None else _cache(timeline) | shown,
        "choices": [_choice(each, record.started) for each in record.notes.timelines],
        "decisions": decisions,
        "warnings": record.warnings,
        "num_revivals": 0 if record.usage is None else record.usage.num_revivals,
        "metadata": record.metadata,
    }


def _cache(timeline: Timeline) -> dict[str, Any]:
    at = None if timeline.divergence is None else timeline.divergence.at
    return {
        "prompt_tokens": timeline.num_prompt,
        "cached_tokens": timeline.num_cached,
        "loaded_tokens": timeline.loaded_from,
        "prefill_node": None
        if timeline.prefilled is None
        else msgspec.structs.asdict(timeline.prefilled),
        "evicted_tokens": timeline.num_evicted,
        "is_off": timeline.is_cache_off,
        "diverges_at": at,
    }


async def _shown_divergence(
    services: Services, record: RequestRecord, timeline: Timeline | None
) -> dict[str, Any]:
    """The words at which the prompt leaves the cached one, if the settings allow to show them."""
    found: PromptDivergence | None = None if timeline is None else timeline.divergence
    if found is None or not services.settings.requests.show_text:
        return {}
    texts: list[str | None] = []
    for ids in (found.token_ids, found.cached_ids):
        known = tuple(each for each in ids if each >= 0)  # the tokens of an image have no text
        try:
            texts.append(await services.backend.detokenize(known, model=record.model))
        except EngineError:
            texts.append(None)
    return {"prompt_goes_on": texts[0], "cached_goes_on": texts[1]}


def spans_of(record: RequestRecord) -> list[dict[str, Any]]:
    """The waterfall: consecutive stages of the request, in seconds since it arrived."""
    marks = [("receive", record.started), ("check", record.body_at), ("route", record.accepted_at)]
    if record.notes.preparations:
        last = record.notes.preparations[-1]
        marks += [("tokenize", last.began_at), ("grammar check", last.encoded_at)]
        marks += [("hand over", last.checked_at)]
    timeline = timeline_of(record)
    if timeline is not None:
        held = "compile grammar" if timeline.has_grammar else "encode images"
        marks += [(held, timeline.submitted_at), ("queue", timeline.queued_at)]
        marks += [("prefill", timeline.started_at), ("decode", timeline.first_token_at)]
        marks += [("finish", timeline.ended_at)]
    elif record.ttft_s is not None:
        marks += [("answer", record.started + record.ttft_s)]
    marks += [("send", record.answered_at), ("", record.ended_at)]
    known = [(name, at) for name, at in marks if at is not None]
    return [
        {"name": name, "start_s": _at(start, record.started), "end_s": _at(end, record.started)}
        for (name, start), (_, end) in pairwise(known)
        if end - start >= 1e-6
    ]


def _at(when: float | None, since: float) -> float | None:
    return None if when is None else round(when - since, 6)


def _choice(timeline: Timeline, since: float) -> dict[str, Any]:
    """The timeline of one choice, with times in seconds since the request arrived."""
    work = timeline.decode
    edges = [str(edge) for edge in BATCH_EDGES] + [f">{BATCH_EDGES[-1]}"]
    waits = zip(WAITS, timeline.waits, strict=True)
    return {
        "choice": timeline.choice,
        "finish_reason": timeline.finish_reason,
        "submitted_s": _at(timeline.submitted_at, since),
        "queued_s": _at(timeline.queued_at, since),
        "started_s": _at(timeline.started_at, since),
        "first_token_s": _at(timeline.first_token_at, since),
        "ended_s": _at(timeline.ended_at, since),
        "waits": {reason: round(seconds, 6) for reason, seconds in waits if seconds > 0},
        "num_before": timeline.num_before,
        "num_overtaken": timeline.num_overtaken,
        "generated_tokens": timeline.num_generated,
        "resumed_tokens": timeline.num_resumed,
        "prefill": [
            {
                "start_s": _at(each.began_at, since),
                "end_s": _at(each.ended_at, since),
                "first_token": each.start,
                "tokens": each.count,
                "batch_size": each.num_rows,
                "batch_tokens": each.num_tokens,
            }
            for each in timeline.chunks
        ],
        "preemptions": [
            {
                "start_s": _at(each.at, since),
                "end_s": _at(each.until, since),
                "lost_tokens": each.num_lost,
            }
            for each in timeline.pauses
        ],
        "decode": {
            "steps": work.num_steps,
            "seconds": round(work.seconds, 6),
            "mixed_steps": work.num_mixed,
            "mixed_s": round(work.mixed_s, 6),
            "mask_s": round(work.mask_s, 6),
            "by_batch_size": {
                edge: count for edge, count in zip(edges, work.by_rows, strict=False) if count
            },
        },
    }
