"""/v1/batches: many requests in one file, which are answered when there is capacity. This module
also adds the routes of /v1/files, /v1/uploads, /v1/messages/batches and /v1/fine_tuning, which
share its storage.
"""

import secrets
from functools import partial

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import UnavailableError
from engine.servers.access.auth import principal_of
from engine.servers.anthropic.batches import add_message_batches_routes
from engine.servers.batches import store as batch_store
from engine.servers.batches.caller import Caller
from engine.servers.batches.run import Bench
from engine.servers.batches.runner import BatchRunner, line_slots, pool_of
from engine.servers.batches.schema import WINDOW_S, BatchBody, BatchQuery, NewBatch
from engine.servers.batches.store import BatchStore
from engine.servers.files import store as file_store
from engine.servers.files import uploads
from engine.servers.files.expiry import unix_now
from engine.servers.files.routes import add_files_routes, bounded_life_s
from engine.servers.files.store import FileStore, new_file_id
from engine.servers.fine_tuning import store as job_store
from engine.servers.fine_tuning.routes import FineTuning, add_fine_tuning_routes
from engine.servers.fine_tuning.runner import JobRunner
from engine.servers.fine_tuning.store import JobStore
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import list_body, parse_query
from engine.servers.schema.body import validated
from engine.servers.serving.fair_slots import FairSlots
from engine.servers.serving.services import NOT_READY_RETRY_S, Services, json_response
from engine.servers.serving.storage import Database

MAX_BODY_BYTES = 65_536
PREFIX = "batch_"
# Input files that are checked at a time. Each takes a thread, of which the server has few.
MAX_READS = 2


def add_files_and_batches_routes(app: FastAPI, services: Services) -> None:
    settings = services.settings.storage
    db_path = settings.directory / "batches.db"
    schemas = file_store.SCHEMA + batch_store.SCHEMA + uploads.SCHEMA + job_store.SCHEMA
    database = Database(db_path, schemas, (*batch_store.ADDED, *job_store.ADDED))
    files = FileStore(settings.directory / "files", database, settings.max_size_mb * 2**20)
    store = BatchStore(database, files)
    reads = FairSlots(MAX_READS)
    bench = Bench(services, store, files, Caller(app), line_slots(services), reads)
    runner = BatchRunner(bench, database, settings.directory, db_path)
    jobs = JobStore(database)
    job_runner = JobRunner(services, jobs, files, settings.directory, db_path)
    services.components.extend((job_runner, runner))
    add_files_routes(app, services, files)
    uploads.add_uploads_routes(app, services, database, files)
    add_batches_routes(app, services, store, runner)
    add_message_batches_routes(app, bench, runner)
    add_fine_tuning_routes(app, FineTuning(services, jobs, files, job_runner, reads))


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
