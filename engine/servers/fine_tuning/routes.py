"""/v1/fine_tuning/jobs, as OpenAI's clients use it: create, list, retrieve, cancel, pause, resume,
events and checkpoints.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from engine.core.errors import InvalidRequestError, NotFoundError
from engine.core.store.adapter_store import records
from engine.finetuning.jobs import TrainingRequest, adapter_name, make_job
from engine.finetuning.plan import Decided, TrainingPlan
from engine.servers.access.auth import Principal, principal_of
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StorageFullError
from engine.servers.fine_tuning.progress import by_step, figures_of
from engine.servers.fine_tuning.runner import JobRunner, served_checkpoints
from engine.servers.fine_tuning.schema import EventQuery, Job, JobBody, JobListQuery, JobQuery
from engine.servers.fine_tuning.store import PREFIX, JobStore
from engine.servers.http.limits import read_parsed
from engine.servers.http.listing import following, list_body, parse_query
from engine.servers.schema.body import validated
from engine.servers.serving.followers import Followers
from engine.servers.serving.services import Services, json_response
from engine.servers.storage.fair_slots import FairSlots

MAX_BODY_BYTES = 65_536
EVENT_PREFIX = "ftevent-"
STREAM_POLL_S = 0.5
MAX_MODELS = 200  # of each tenant; a job adds up to four
JOBS = "/v1/fine_tuning/jobs"


class FineTuning:
    """What the routes share."""

    def __init__(
        self,
        services: Services,
        store: JobStore,
        files: FileStore,
        runner: JobRunner,
        reads: FairSlots,
    ) -> None:
        self._services = services
        self._files = files
        self.store = store
        self.runner = runner
        self._reads = reads  # limits how many files are checked at a time
        self.followers = Followers()

    def body_of(self, job: Job) -> dict[str, Any]:
        return job.body(self.runner.estimated_finish(job.id))

    async def create(self, body: JobBody, principal: Principal) -> Job:
        owner = principal.name
        files = (("training_file", body.training_file), ("validation_file", body.validation_file))
        await self.store.check(owner, files)
        base = self._base_path(body.model, principal)
        self._check_rank(body)
        await asyncio.to_thread(_check_num_models, owner)
        job_id = f"{PREFIX}{secrets.token_hex(12)}"
        settings = self._services.settings.finetuning
        request = TrainingRequest(
            base=base,
            training_file=self._files.path_of(body.training_file),
            validation_file=(
                None if body.validation_file is None else self._files.path_of(body.validation_file)
            ),
            method=body.kind,
            hyperparameters=body.stated(),
            lora=body.lora.shape(),
            seed=body.seed,
            device=settings.device,
            threads=settings.threads,
            memory_bytes=None if settings.memory_mb is None else settings.memory_mb * 2**20,
            is_idle_only=True,
            checkpoint_s=settings.checkpoint_s,
        )
        folder = self.runner.folder_of(job_id)
        async with self._reads.slot(owner):
            await self.store.check(owner, files)  # more jobs may have been created meanwhile
            _, plan = await asyncio.to_thread(make_job, request, folder.path)
        try:
            job = _job_of(job_id, principal, body, plan)
            dropped = await self.store.create(job)
        except BaseException:
            folder.remove()
            raise
        for each in dropped:
            await asyncio.to_thread(self.runner.folder_of(each).remove)
        await self.store.note(job.id, f"Created fine-tuning job: {job.id}")
        self.runner.wake()
        return job

    def _base_path(self, model: str, principal: Principal) -> Path:
        path = None
        with contextlib.suppress(NotFoundError):
            card = self._services.find_model(model, principal)
            path = None if card.parent else self._services.backend.files_of(model)
        if path is None:
            raise InvalidRequestError(
                f"'{model}' can't be fine-tuned here: give a model that our own engine serves, and"
                " no adapter of one.",
                param="model",
                code="model_not_available",
            )
        return path

    def _check_rank(self, body: JobBody) -> None:
        """The result could not be served if its rank were higher."""
        limit = self._services.settings.performance.max_adapter_rank
        if body.lora.rank > limit:
            raise InvalidRequestError(
                f"The rank is above {limit}, which is the highest that this server serves"
                " (performance.max_adapter_rank).",
                param="lora.rank",
            )

    async def stream(self, job: Job) -> AsyncIterator[bytes]:
        """All events of a job, as server-sent events, until the job ends."""
        last = 0
        while True:
            ended = (await self.store.find(job.id)).has_ended
            events = await self.store.events(job.id, 100, after=last)
            for event in events:
                last = event.seq
                yield b"data: " + msgspec.json.encode(event.body()) + b"\n\n"
            if ended and not events:
                yield b"data: [DONE]\n\n"
                return
            if not events:
                await asyncio.sleep(STREAM_POLL_S)


def _check_num_models(owner: str) -> None:
    num_models = sum(kept.tenant == owner for kept in records())
    if num_models >= MAX_MODELS:
        raise StorageFullError(
            f"You have {num_models} fine-tuned models, with those of checkpoints; a tenant may have"
            f" {MAX_MODELS}. Delete some with DELETE /v1/models/MODEL.",
            param="model",
        )


def add_fine_tuning_routes(app: FastAPI, tuning: FineTuning) -> None:
    store, runner = tuning.store, tuning.runner

    @app.post(JOBS)
    async def create_job(request: Request) -> Response:
        body = await read_parsed(request, MAX_BODY_BYTES, partial(validated, JobBody))
        return json_response(tuning.body_of(await tuning.create(body, principal_of(request))))

    @app.get(JOBS)
    async def list_jobs(request: Request) -> Response:
        query = parse_query(JobListQuery, request)
        owner = principal_of(request).name
        found = await store.page(owner, query.after, query.limit + 1, query.metadata)
        return json_response(list_body([tuning.body_of(job) for job in found], query.limit))

    @app.get(JOBS + "/{job_id}")
    async def retrieve_job(request: Request, job_id: str) -> Response:
        job = await store.find(job_id, principal_of(request).name)
        return json_response(tuning.body_of(job))

    @app.post(JOBS + "/{job_id}/cancel")
    async def cancel_job(request: Request, job_id: str) -> Response:
        owner = principal_of(request).name
        job = await store.move(job_id, "cancelled", ("queued", "running", "paused"), owner)
        await store.note(job.id, "The job was cancelled.")
        await runner.forget(job)
        return json_response(job.body())

    @app.post(JOBS + "/{job_id}/pause")
    async def pause_job(request: Request, job_id: str) -> Response:
        owner = principal_of(request).name
        job = await store.move(job_id, "paused", ("queued", "running"), owner)
        await store.note(job.id, "The job is paused.")
        runner.wake()
        return json_response(job.body())

    @app.post(JOBS + "/{job_id}/resume")
    async def resume_job(request: Request, job_id: str) -> Response:
        job = await store.move(job_id, "queued", ("paused",), principal_of(request).name)
        await store.note(job.id, "The job is queued again.")
        runner.wake()
        return json_response(job.body())

    @app.get(JOBS + "/{job_id}/events")
    async def list_events(request: Request, job_id: str) -> Response:
        query = parse_query(EventQuery, request)
        job = await store.find(job_id, principal_of(request).name)
        if query.stream:
            events = tuning.followers.follow(job.owner, tuning.stream(job))
            return StreamingResponse(events, media_type="text/event-stream")
        found = await store.events(job.id, query.limit + 1, before=_event_number(query.after))
        return json_response(list_body([event.body() for event in found], query.limit))

    @app.get(JOBS + "/{job_id}/checkpoints")
    async def list_checkpoints(request: Request, job_id: str) -> Response:
        query = parse_query(JobQuery, request)
        job = await store.find(job_id, principal_of(request).name)
        bodies = following(await asyncio.to_thread(checkpoint_bodies, job, runner), query.after)
        return json_response(list_body(bodies[: query.limit + 1], query.limit))


def checkpoint_bodies(job: Job, runner: JobRunner) -> list[dict[str, Any]]:
    """The newest checkpoint first. Their models are served once the job has succeeded."""
    folder = runner.folder_of(job.id)
    events, _ = folder.events()
    steps = by_step(events)
    name = adapter_name(job.model, job.suffix, job.id.removeprefix(PREFIX)[:8])
    bodies: list[dict[str, Any]] = []
    for step, path in reversed(served_checkpoints(folder)):
        figures = figures_of(steps[step]) if step in steps else {}
        # The whole validation file is used each time.
        full = {f"full_{name}": each for name, each in figures.items() if name.startswith("valid_")}
        bodies.append(
            {
                "id": f"ftckpt-{job.id.removeprefix(PREFIX)[:8]}-{step}",
                "object": "fine_tuning.job.checkpoint",
                "created_at": int(path.stat().st_mtime),
                "fine_tuned_model_checkpoint": f"{name}:ckpt-step-{step}",
                "fine_tuning_job_id": job.id,
                "step_number": step,
                "metrics": {"step": step} | figures | full,
            }
        )
    return bodies


def _event_number(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    digits = cursor.removeprefix(EVENT_PREFIX)
    if not digits.isdecimal() or len(digits) > 18:
        raise InvalidRequestError("after is the id of no event.", param="after")
    return int(digits)


def _job_of(job_id: str, principal: Principal, body: JobBody, plan: TrainingPlan) -> Job:
    decided = Decided(
        n_epochs=plan.n_epochs,
        batch_size=plan.batch_size,
        learning_rate_multiplier=plan.learning_rate_multiplier,
        beta=plan.beta,
    )
    return Job(
        id=job_id,
        owner=principal.name,
        key=principal.key,
        model=body.model,
        suffix=body.suffix or "tuned",
        status="queued",
        method=body.kind,
        hyperparameters=msgspec.json.encode(decided).decode(),
        seed=plan.seed,
        training_file=body.training_file,
        validation_file=body.validation_file,
        metadata=None if body.metadata is None else msgspec.json.encode(body.metadata).decode(),
        created_at=unix_now(),
    )
