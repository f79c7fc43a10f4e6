"""Runs a recorded request again and compares the answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import ConflictError, NotFoundError
from engine.core.interfaces.request import RecordedRequest
from engine.servers.ops.admin import who_is
from engine.servers.ops.admin_control import EmptyBody
from engine.servers.ops.reload import audit_of
from engine.servers.serving.services import Services, json_response

HOW_TO_RECORD = (
    "Requests are not recorded. Set requests.record = true, or"
    " LLM_ENGINE_REQUESTS__RECORD=true, and start the server again."
)


def add_replay_routes(app: FastAPI, services: Services) -> None:
    audit = audit_of(services)

    @app.post("/v1/admin/requests/{request_id}/replay")
    async def replay(request: Request, request_id: str) -> Response:
        await services.read(request, EmptyBody)
        recorder = services.history.recorder
        if recorder is None:
            raise ConflictError(HOW_TO_RECORD)
        kept = await services.history.find(request_id, None)
        completion_id = request_id if kept is None else kept.completion_id or request_id
        await recorder.finish_writing()
        recorded = await asyncio.to_thread(recorder.read, completion_id)
        if recorded is None:
            raise NotFoundError(
                "This request was not recorded: it is too old, or its backend is not our own.",
                param="request_id",
            )
        async with audit.change(who_is(request), "replay", completion_id[:64]):
            results = [await _replayed(services, recorded.model, r) for r in recorded.requests]
        choices = [choice for result in results for choice in result["choices"]]
        return json_response(
            {
                "id": completion_id,
                "model": recorded.model,
                "same": all(each["differs_at"] is None for each in choices),
                "same_fingerprint": all(each["same_fingerprint"] for each in results),
                "choices": choices,
            }
        )


async def _replayed(services: Services, model: str, recorded: RecordedRequest) -> dict[str, Any]:
    # Answers that a stop string or their client ended are compared up to this end.
    longest = max(map(len, recorded.token_ids.values()))
    params = replace(recorded.request.params, max_tokens=max(longest, 1))
    request = replace(recorded.request, params=params, timeout_s=None, queue_timeout_s=None)
    again = await services.backend.replay(request, model=model)
    return {
        "same_fingerprint": again.fingerprint == recorded.fingerprint,
        "choices": [
            {
                "choice": choice,
                "tokens": len(tokens),
                "differs_at": first_difference(tokens, again.token_ids.get(choice, [])),
            }
            for choice, tokens in sorted(recorded.token_ids.items())
        ],
    }


def first_difference(recorded: Sequence[int], again: Sequence[int]) -> int | None:
    """Index of the first recorded token that differs or is missing. None: all are the same."""
    if list(again[: len(recorded)]) == list(recorded):
        return None
    pairs = enumerate(zip(recorded, again, strict=False))
    return next((index for index, (a, b) in pairs if a != b), len(again))
