"""/v1/batches: many requests in one file, which are answered when there is capacity."""

import secrets
from functools import partial

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import UnavailableError
from engine.servers.access.auth import principal_of
from engine.servers.batches.runner import BatchRunner, pool_of
from engine.servers.batches.schema import WINDOW_S, BatchBody, BatchQuery, NewBatch
from engine.servers.batches.store import BatchStore
from engine.servers.files.expiry import unix_now
from engine.servers.files.routes import bounded_life_s
from engine.servers.files.store import new_file_id
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import list_body, parse_query
from engine.servers.schema.body import validated
from engine.servers.serving.services import NOT_READY_RETRY_S, Services, json_response

MAX_BODY_BYTES = 65_536
PREFIX = "batch_"


def add_batches_routes(
    app: FastAPI, services: Services, store: BatchStore, runner: BatchRunner
) -> None:
    @app.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        body = await read_parsed(request, MAX_BODY_BYTES, partial(validated, BatchBody))
        batch = await store.create(_new_batch(request, services, body))
        runner.notice(batch.id)
        return json_response(batch.body())

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        query = parse_query(BatchQuery, request)
        owner = principal_of(request).name
        found = await store.page(owner, PREFIX, query.after, query.limit + 1)
        return json_response(list_body([batch.body() for batch in found], query.limit))

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> Response:
        batch = await store.find(batch_id, principal_of(request).name, PREFIX)
        return json_response(batch.body())

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        batch = await store.cancel(batch_id, principal_of(request).name, PREFIX)
        runner.notice(batch.id)
        return json_response(batch.body())


def _new_batch(request: Request, services: Services, body: BatchBody) -> NewBatch:
    cards = services.backend.models()
    if not cards:
        raise UnavailableError("The model is not loaded yet.", retry_after=NOT_READY_RETRY_S)
    life_s = bounded_life_s(request, services, "output_expires_after", body.output_expires_after)
    now, principal = unix_now(), principal_of(request)
    return NewBatch(
        id=PREFIX + secrets.token_hex(16),
        owner=principal.name,
        key=principal.key,
        pool=pool_of(cards),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        results_id=new_file_id(),
        output_life_s=life_s,
        metadata=None if body.metadata is None else msgspec.json.encode(body.metadata).decode(),
        created_at=now,
        expires_at=now + WINDOW_S,
    )
