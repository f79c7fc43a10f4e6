"""Runs fine-tuning jobs one after the other, each in a training process, beside the requests.

A job whose training process or server was killed continues from its last checkpoint. The training
process is held while requests are open (`hold.py`), and else gets CPU time that no other process
wants. So requests hardly notice it.
"""

import asyncio
import contextlib
import logging
import math
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import (
    AuthenticationError,
    ConflictError,
    EngineError,
    NotFoundError,
    ResourceError,
    UnavailableError,
)
from engine.core.sandbox.liveness import Headway
from engine.core.store.adapter_store import keep_adapter
from engine.finetuning.folder import JobFolder, TrainingEvent, step_of
from engine.finetuning.jobs import adapter_name
from engine.finetuning.process import TrainerProcess, how_it_ended, log_tail
from engine.servers.access.auth import Principal
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import FileStore, StorageFullError
from engine.servers.fine_tuning.hold import Hold
from engine.servers.fine_tuning.progress import JobMetrics, Pace, event_data, step_metrics
from engine.servers.fine_tuning.schema import Job
from engine.servers.fine_tuning.store import PREFIX, JobStore
from engine.servers.storage.job_queue import JobQueue

if TYPE_CHECKING:
    from engine.servers.serving.services import Services

logger = logging.getLogger(__name__)

POLL_S = 0.25  # seconds between looks at a process that trains
REST_S = 1.0  # seconds between looks at the queue, or at a process that is held
STILL_S = 60.0  # seconds after which a process that does nothing is told to go on
STALLED_S = 900.0  # seconds after which it is killed
FAULT_S = 10.0  # seconds after a failure of the storage, such as a full disk
TURN_S = 1800.0  # seconds that a job trains while jobs of other tenants wait
MAX_DEATHS = 3  # of the training process at the same step
LOCK = "fine_tuning"


class JobRunner(JobQueue):
    """Runs one job at a time."""

    def __init__(self, services: "Services", store: JobStore, files: FileStore) -> None:
        super().__init__("fine-tuning", store.database, REST_S, FAULT_S)
        self._services = services
        self._store = store
        self._files = files
        self._folders = store.database.path.parent / "fine_tuning"
        self._has_swept = False
        self._training: str | None = None  # id of the job that trains
        self._pace = Pace()
        self._turns: dict[str, int] = {}  # when each tenant's last turn ended

    @cached_property
    def _metrics(self) -> JobMetrics:
        return JobMetrics(self._services.metrics.registry)

    def folder_of(self, job_id: str) -> JobFolder:
        return JobFolder(self._folders / job_id)

    def estimated_finish(self, job_id: str) -> int | None:
        """When the job will end, in seconds since 1970. None if it does not train, or if it is too
        early to say.
        """
        return self._pace.finish if job_id == self._training else None

    async def _sweep(self) -> None:
        """Remove the folders of jobs that are gone or cancelled."""
        for path in await asyncio.to_thread(lambda: list(self._folders.glob(f"{PREFIX}*"))):
            if not await self._store.is_known(path.name):
                await asyncio.to_thread(JobFolder(path).remove)

    async def look(self) -> None:
        if not self.holds(LOCK):
            return
        if not self._has_swept:
            await self._sweep()
            self._has_swept = True
        await self._count()
        job = await self._store.next_job(self._turns)
        if job is None:
            return
        if job.status == "queued":
            try:
                job = await self._store.move(job.id, "running", ("queued",))
            except ConflictError:  # it was paused or cancelled meanwhile
                self.wake()
                return
            await self._store.note(job.id, "Training has started.")
        else:
            await self._store.note(job.id, "Training continues from the last checkpoint.")
        self._training = job.id
        try:
            self._check_key(job)
            await self._train(job)
        except (ResourceError, UnavailableError):  # of the storage; it goes on when that works
            raise
        except EngineError as error:
            await self._fail(job, str(error))
        except Exception:  # a bug; the job ends, so that it is not tried forever
            logger.exception("job %s failed unexpectedly", job.id)
            await self._fail(job, "The server failed to run this job. Its log says why.")
        finally:
            self._training = None
            self._turns[job.owner] = unix_now()
        await self._tidy(job)
        await self._count()

    def _check_key(self, job: Job) -> None:
        """Raise if the key that made the job was removed, or may not use the model any more."""
        principal = self._services.keys.current(Principal(job.owner, key=job.key))
        if principal is None:
            raise AuthenticationError("The API key that made this job was removed.")
        if principal.models is not None and job.model not in principal.models:
            raise NotFoundError("The API key that made this job may not use its model any more.")

    async def _count(self) -> None:
        if counts := await self._store.counts():
            self._metrics.count(counts)

    async def _tidy(self, job: Job) -> None:
        """Remove the files that nothing needs after a job has ended."""
        now, folder = await self._store.find(job.id), self.folder_of(job.id)
        if now.status == "cancelled":
            await asyncio.to_thread(folder.remove)
        elif now.has_ended:
            await asyncio.to_thread(folder.remove_state)

    async def forget(self, job: Job) -> None:
        """Called when a job was cancelled. If it is training, the training process ends first."""
        self.wake()
        if job.id != self._training:
            await asyncio.to_thread(self.folder_of(job.id).remove)

    async def _fail(self, job: Job, reason: str) -> None:
        await self._store.note(job.id, reason, level="error")
        await self._store.end(job, error=reason)

    async def _train(self, job: Job) -> None:
        """Run the training process until it ends, and again if it dies."""
        folder, num_deaths, best = self.folder_of(job.id), 0, 0
        last, start = await self._catch_up(job, folder)
        while last is None or last.kind != "succeeded":
            last, start, status = await self._attend(job, folder, start)
            if last is None:  # paused or cancelled
                return
            if last.kind == "succeeded":
                break
            if last.kind == "failed":
                raise EngineError(last.message)
            self._metrics.deaths.inc()
            num_deaths = 1 if last.step > best else num_deaths + 1
            best = max(best, last.step)
            death = f"The training process {how_it_ended(status)}."
            if num_deaths >= MAX_DEATHS:
                raise EngineError(f"{death} It died {num_deaths} times. {log_tail(folder.path)}")
            await self._store.note(
                job.id, f"{death} It continues from the last checkpoint.", level="warn"
            )
        await self._serve(job, folder)

    async def _catch_up(self, job: Job, folder: JobFolder) -> tuple[TrainingEvent | None, int]:
        """Record the steps that a server which was killed did not see. Returns the last event, and
        the byte after it.
        """
        events, start = await asyncio.to_thread(folder.events)
        recorded = await self._store.last_step(job.id)
        for event in events:
            if event.kind == "metrics" and event.step > recorded:
                await self._record(job, event)
        return (events[-1] if events else None), start

    async def _attend(
        self, job: Job, folder: JobFolder, start: int
    ) -> tuple[TrainingEvent | None, int, int]:
        """Run a training process, which is held while requests are open."""
        process = TrainerProcess(folder)
        self._pace = Pace()
        hold = None
        if self._services.settings.finetuning.yield_to_requests:
            hold = Hold(self._services.lifecycle, process)
        self._metrics.begin(hold)
        try:
            return await self._follow(job, folder, process, hold, start)
        finally:
            if hold is not None:
                await hold.end()
            await asyncio.to_thread(process.kill)  # the kernel may need a while for its memory
            self._metrics.end()

    async def _follow(
        self, job: Job, folder: JobFolder, process: TrainerProcess, hold: Hold | None, start: int
    ) -> tuple[TrainingEvent | None, int, int]:
        """Record events until the process ends. Returns the last event, or None if the job was
        paused or cancelled; the byte after it; and the exit status.
        """
        last, is_pausing, headway = TrainingEvent(kind="loading"), False, Headway(process.pid)
        turn_ends_at = time.monotonic() + TURN_S
        while True:
            status = process.exit_status()
            events, start = await asyncio.to_thread(folder.events, start)
            for event in events:
                last = event
                await self._record(job, event)
            now = (await self._store.find(job.id)).status
            if status is not None:
                is_over = now == "running" or last.kind in ("succeeded", "failed")
                return (last if is_over else None), start, status
            await self._count()
            if now == "cancelled":
                return None, start, 0
            if now == "queued" and not is_pausing:  # resumed before the process heard of the pause
                with contextlib.suppress(ConflictError):  # it has changed again
                    await self._store.move(job.id, "running", ("queued",))
            if now == "running" and time.monotonic() >= turn_ends_at:
                is_pausing = await self._gives_turn(job)
            is_pausing = is_pausing or now == "paused"
            if is_pausing:
                if hold is not None:
                    await hold.end()
                process.pause()
            is_held = hold is not None and hold.is_held
            if not is_held:
                await asyncio.to_thread(_urge, process, headway)
            await self.pause(REST_S if is_held else POLL_S)

    async def _gives_turn(self, job: Job) -> bool:
        """Let the job wait again if jobs of other tenants wait. Returns whether it does."""
        if not await self._store.others_wait(job.owner):
            return False
        try:
            await self._store.move(job.id, "queued", ("running",))
        except ConflictError:  # it was paused or cancelled meanwhile
            return False
        await self._store.note(job.id, "The job waits: it is another tenant's turn.")
        return True

    async def _record(self, job: Job, event: TrainingEvent) -> None:
        if event.kind == "notice":
            await self._store.note(job.id, event.message, level="warn")
        if event.kind == "metrics":
            self._metrics.observe(event)
            self._pace.observe(event)
            text = f"Step {event.step}/{event.num_steps}: training loss={event.loss:.4f}"
            if event.validation_loss is not None:
                text += f", validation loss={event.validation_loss:.4f}"
            await self._store.note(
                job.id,
                text,
                step=event.step,
                data=event_data(event),
                trained_tokens=event.trained_tokens,
            )

    async def _serve(self, job: Job, folder: JobFolder) -> None:
        """Add the adapter to the store, serve it at once, and end the job."""
        if (await self._store.find(job.id)).has_ended:  # cancelled in its last moment
            return
        name = adapter_name(job.model, job.suffix, job.id.removeprefix(PREFIX)[:8])
        try:
            for step, checkpoint in served_checkpoints(folder):
                await self._offer(job, f"{name}:ckpt-step-{step}", checkpoint)
            await self._offer(job, name, folder.adapter)
        except EngineError as error:  # the adapter is kept, so the work is not lost
            logger.warning("the adapter in %s is not served: %s", folder.adapter, error)
            text = f"The server keeps the adapter of this job, but it is not served: {error}"
            await self._store.note(job.id, text, level="warn")
        await self._store.note(job.id, f"New fine-tuned model created: {name}")
        await self._store.note(job.id, "The job has successfully completed.")
        await self._store.end(job, model=name, result_file=await self._results(job, folder))

    async def _results(self, job: Job, folder: JobFolder) -> str | None:
        """Store the result file of the job. Returns its id, or None if the owner has no room for
        it: the jobs of other tenants don't wait until there is some.
        """
        events, _ = await asyncio.to_thread(folder.events)
        expires_at = unix_now() + math.ceil(self._services.settings.storage.file_ttl_s)
        try:
            async with self._files.upload(job.owner) as upload:
                await upload.write(step_metrics(events))
                file = await upload.keep("fine-tune-results", "step_metrics.csv", expires_at)
        except StorageFullError as error:
            text = f"The result file of this job is not stored: {error}"
            await self._store.note(job.id, text, level="warn")
            return None
        return file.id

    async def _offer(self, job: Job, name: str, adapter: Path) -> None:
        path = await asyncio.to_thread(
            keep_adapter, name, adapter, job.model, replaces=True, tenant=job.owner
        )
        await self._services.backend.load_adapter(name, str(path), base=job.model, replaces=True)


def _urge(process: TrainerProcess, headway: Headway) -> None:
    """Let a process go on that something else has stopped. One that still does nothing is killed,
    and then continues from its last checkpoint like any that died.
    """
    headway.look()
    if headway.idle_s > STALLED_S:
        logger.error("a training process did nothing for %.0f s; killing it", headway.idle_s)
        process.kill()
    elif headway.idle_s > STILL_S:
        process.go_on()


def served_checkpoints(folder: JobFolder) -> list[tuple[int, Path]]:
    """The checkpoints of a job by step, without a last one that equals the finished adapter."""
    found = [(step_of(each), each) for each in folder.checkpoints()]
    events, _ = folder.events()
    last = max((event.step for event in events if event.kind == "succeeded"), default=-1)
    return [(step, path) for step, path in found if step != last]
