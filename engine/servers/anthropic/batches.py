"""/v1/messages/batches: Anthropic's batches, as its SDK uses them.

They are run like batches of OpenAI's API. The requests of a batch are written to a file in the
format of OpenAI's batches, and the results come as one file in Anthropic's format. A request that
is invalid is an error among the results, and the others are still answered.
"""

import secrets
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import NotFoundError, UnavailableError
from engine.servers.access.auth import principal_of
from engine.servers.batches.lines import MAX_LINES, Line
from engine.servers.batches.run import Bench
from engine.servers.batches.runner import BatchRunner, pool_of
from engine.servers.batches.schema import MESSAGES, WINDOW_S, Batch, NewBatch
from engine.servers.files.expiry import unix_now
from engine.servers.files.routes import FileContent, bounded_life_s
from engine.servers.files.store import new_file_id
from engine.servers.http.errors import problem
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import Cursor, Query, list_body, parse_query
from engine.servers.http.request_log import record_of
from engine.servers.schema.body import validated
from engine.servers.serving.services import NOT_READY_RETRY_S, Services, json_response

PREFIX = "msgbatch_"
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class BatchedRequest(BaseModel):
    model_config = _STRICT

    custom_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(BaseModel):
    model_config = _STRICT

    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=MAX_LINES)]


class MessageBatchQuery(Query):
    after_id: Cursor | None = None
    before_id: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 20


def add_message_batches_routes(app: FastAPI, bench: Bench, runner: BatchRunner) -> None:
    store, services = bench.store, bench.services

    @app.post("/v1/messages/batches")
    async def create_message_batch(request: Request) -> Response:
        max_bytes = services.settings.server.body_limit_mb * 2**20
        lines = await read_parsed(request, max_bytes, _parse)
        new = _new_batch(request, services)
        async with bench.files.upload(new.owner) as upload:
            for line in lines:
                await upload.write(line.raw)
            placed = [line.place for line in lines]
            batch = await store.create_checked(upload, new, lines[0].model, placed)
        runner.notice(batch.id)
        return _answer(request, _body(request, batch))

    @app.get("/v1/messages/batches")
    async def list_message_batches(request: Request) -> Response:
        query = parse_query(MessageBatchQuery, request)
        if query.after_id is not None and query.before_id is not None:
            raise problem("before_id", "excludes after_id")
        found = await store.page(
            principal_of(request).name, PREFIX, query.after_id, query.limit + 1, query.before_id
        )
        has_more = len(found) > query.limit
        # One batch more than the page was read, to know `has_more`. It is the oldest of them, or
        # the newest if the page ends at `before_id`.
        page = found[-query.limit :] if query.before_id is not None else found[: query.limit]
        body = list_body([_body(request, batch) for batch in page], query.limit)
        del body["object"]
        return _answer(request, body | {"has_more": has_more})

    @app.get("/v1/messages/batches/{batch_id}")
    async def retrieve_message_batch(request: Request, batch_id: str) -> Response:
        batch = await store.find(batch_id, principal_of(request).name, PREFIX)
        return _answer(request, _body(request, batch))

    @app.post("/v1/messages/batches/{batch_id}/cancel")
    async def cancel_message_batch(request: Request, batch_id: str) -> Response:
        batch = await store.cancel(batch_id, principal_of(request).name, PREFIX)
        runner.notice(batch.id)
        return _answer(request, _body(request, batch))

    @app.delete("/v1/messages/batches/{batch_id}")
    async def delete_message_batch(request: Request, batch_id: str) -> Response:
        await store.delete(batch_id, principal_of(request).name, PREFIX)
        return _answer(request, {"id": batch_id, "type": "message_batch_deleted"})

    @app.get("/v1/messages/batches/{batch_id}/results", response_class=FileContent, status_code=200)
    async def message_batch_results(request: Request, batch_id: str) -> Response:
        batch = await store.find(batch_id, principal_of(request).name, PREFIX)
        if batch.output_file_id is None:
            raise NotFoundError("This batch has no results yet; see its processing_status.")
        file, content = await bench.files.open(batch.owner, batch.output_file_id)
        return FileContent(content, file.num_bytes, file.filename)


class _RequestLine(msgspec.Struct):
    """A request as a line of the batch's input file."""

    raw: bytes
    model: str
    place: Line


def _parse(raw: dict[str, Any]) -> list[_RequestLine]:
    body = validated(MessageBatchBody, raw)
    lines: list[_RequestLine] = []
    start, seen = 0, set[str]()
    for index, each in enumerate(body.requests):
        if each.custom_id in seen:
            raise problem(f"requests[{index}].custom_id", "is used by an earlier request")
        if each.params.get("stream"):
            raise problem(f"requests[{index}].params.stream", "a batch has nowhere to stream to")
        seen.add(each.custom_id)
        line = msgspec.json.encode({"custom_id": each.custom_id, "body": each.params}) + b"\n"
        place = Line(index + 1, each.custom_id, start, len(line))
        model = each.params.get("model")
        lines.append(_RequestLine(line, model if isinstance(model, str) else "", place))
        start += len(line)
    return lines


def _new_batch(request: Request, services: Services) -> NewBatch:
    cards = services.backend.models()
    if not cards:
        raise UnavailableError("The model is not loaded yet.", retry_after=NOT_READY_RETRY_S)
    now, principal = unix_now(), principal_of(request)
    return NewBatch(
        id=PREFIX + secrets.token_hex(16),
        owner=principal.name,
        key=principal.key,
        pool=pool_of(cards),
        endpoint=MESSAGES,
        input_file_id="",
        results_id=new_file_id(),
        output_life_s=bounded_life_s(request, services, "", None),
        metadata=None,
        created_at=now,
        expires_at=now + WINDOW_S,
    )


def _body(request: Request, batch: Batch) -> dict[str, Any]:
    """The batch object of Anthropic's API."""
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    results_url = None
    if batch.has_ended:
        status = "ended"
        results_url = f"{request.base_url}v1/messages/batches/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(next((each for each in ends if each is not None), None)),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": results_url,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """How many requests have which result. As at Anthropic, all of them count as processing until
    the batch has ended.
    """
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not batch.has_ended:
        return counts | {"processing": batch.num_lines}
    counts["succeeded"], counts["errored"] = batch.num_completed, batch.num_failed
    unanswered = {"cancelled": "canceled", "expired": "expired"}.get(batch.status, "errored")
    counts[unanswered] += batch.num_lines - batch.num_completed - batch.num_failed
    return counts


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _answer(request: Request, body: dict[str, Any]) -> Response:
    return json_response(body, {"request-id": record_of(request.scope).request_id})
