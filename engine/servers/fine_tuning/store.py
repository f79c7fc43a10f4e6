"""Stores fine-tuning jobs and their events."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import msgspec

from engine.core.errors import ConflictError
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import check_input, hold_file
from engine.servers.fine_tuning.schema import ENDED, Job, JobEvent, Status
from engine.servers.http.listing import Order
from engine.servers.storage.tables import Db, Store, Table, having, page_of, transaction

# Of each tenant
MAX_OPEN_JOBS = 20
MAX_KEPT_JOBS = 200  # each has a folder with its adapters
RETRY_FULL_S = 60.0
PREFIX = "ftjob-"

SCHEMA = """
CREATE TABLE IF NOT EXISTS fine_tuning_jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    key TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL,
    suffix TEXT NOT NULL,
    status TEXT NOT NULL,
    method TEXT NOT NULL,
    hyperparameters TEXT NOT NULL,
    seed INTEGER NOT NULL,
    training_file TEXT NOT NULL,
    validation_file TEXT,
    metadata TEXT,
    created_at INTEGER NOT NULL,
    finished_at INTEGER,
    fine_tuned_model TEXT,
    trained_tokens INTEGER,
    error TEXT
);
CREATE INDEX IF NOT EXISTS fine_tuning_jobs_of_owner ON fine_tuning_jobs (owner, seq);
CREATE TABLE IF NOT EXISTS fine_tuning_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    step INTEGER,
    created_at INTEGER NOT NULL,
    level TEXT NOT NULL,
    kind TEXT NOT NULL,
    message TEXT NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (job_id, kind, step)
);
CREATE TABLE IF NOT EXISTS fine_tuning_results (
    job_id TEXT PRIMARY KEY,
    file_id TEXT NOT NULL
);
"""
ADDED = (("fine_tuning_jobs", "key", "TEXT NOT NULL DEFAULT ''"),)
JOBS = Table(
    "fine_tuning_jobs",
    Job,
    noun="job",
    param="fine_tuning_job_id",
    is_open=f"status NOT IN {ENDED}",
    derived={
        "result_file": "(SELECT file_id FROM fine_tuning_results"
        " WHERE job_id = fine_tuning_jobs.id)"
    },
)
_EVENT_COLUMNS = ", ".join(each.name for each in fields(JobEvent))


class JobStore(Store):
    @transaction
    def create(self, db: Db, job: Job) -> list[str]:
        """Add a job. Returns the ids of old jobs that were dropped for it. Their models stay."""
        files = (("training_file", job.training_file), ("validation_file", job.validation_file))
        _check(db, job.owner, files)
        _hold_files(db, job, 1)
        JOBS.insert(db, job)
        dropped = JOBS.drop_oldest(db, job.owner, MAX_KEPT_JOBS)
        for table in ("fine_tuning_events", "fine_tuning_results"):
            db.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(each,) for each in dropped])
        return dropped

    @transaction
    def check(self, db: Db, owner: str, files: Sequence[tuple[str, str | None]]) -> None:
        """Raise if the owner can't have another job, or if a file, given as (parameter, id), is not
        there or has another purpose.
        """
        _check(db, owner, files)

    @transaction
    def find(self, db: Db, job_id: str, owner: str | None = None) -> Job:
        return JOBS.find(db, job_id, owner)

    @transaction
    def page(
        self,
        db: Db,
        owner: str,
        after: str | None,
        limit: int,
        metadata: Mapping[str, str],
    ) -> list[Job]:
        """Jobs that have all pairs of `metadata`, the newest first."""
        if after is not None:
            JOBS.find(db, after, owner)
        return JOBS.page(db, owner, limit, *having(metadata), after=after)

    @transaction
    def last_step(self, db: Db, job_id: str) -> int:
        """The last step whose metrics are stored; 0 if there is none."""
        query = "SELECT MAX(step) FROM fine_tuning_events WHERE job_id = ?"
        return db.execute(query, (job_id,)).fetchone()[0] or 0

    @transaction
    def next_job(self, db: Db, turns: Mapping[str, int]) -> Job | None:
        """The job that is running, or the next one that waits: the oldest job of the tenant whose
        last turn, or else last end of a job, was longest ago. `turns` has the last turn of tenants,
        in seconds since 1970.
        """
        if running := JOBS.rows(db, "status = 'running'"):
            return running[0]
        query = "SELECT owner, MAX(finished_at) FROM fine_tuning_jobs GROUP BY owner"
        ends = {owner: end or 0 for owner, end in db.execute(query)}
        return min(
            JOBS.rows(db, "status = 'queued'"),
            key=lambda job: max(ends[job.owner], turns.get(job.owner, 0)),
            default=None,
        )

    @transaction
    def others_wait(self, db: Db, owner: str) -> bool:
        """Whether a job of another tenant waits."""
        query = "SELECT 1 FROM fine_tuning_jobs WHERE status = 'queued' AND owner != ? LIMIT 1"
        return db.execute(query, (owner,)).fetchone() is not None

    @transaction
    def counts(self, db: Db) -> dict[str, int]:
        """The number of jobs by status."""
        query = "SELECT status, COUNT(*) FROM fine_tuning_jobs GROUP BY status"
        return dict(db.execute(query).fetchall())

    @transaction
    def is_known(self, db: Db, job_id: str) -> bool:
        """Whether there is such a job that was not cancelled."""
        return bool(JOBS.rows(db, "id = ? AND status != 'cancelled'", (job_id,)))

    @transaction
    def move(
        self, db: Db, job_id: str, to: Status, allowed: Sequence[Status], owner: str | None = None
    ) -> Job:
        """Change the status of a job. Raises `ConflictError` if its status is none of `allowed`."""
        job = JOBS.find(db, job_id, owner)
        if job.status not in allowed:
            raise ConflictError(f"A job that is {job.status} can't become {to}.")
        finished = unix_now() if to in ENDED else None
        JOBS.update(db, job_id, status=to, finished_at=finished)
        if to in ENDED:
            _hold_files(db, job, -1)
        return JOBS.find(db, job_id)

    @transaction
    def end(
        self,
        db: Db,
        job: Job,
        *,
        model: str | None = None,
        result_file: str | None = None,
        error: str | None = None,
    ) -> None:
        """End a running job: with the name of its model, or with the reason of its failure."""
        if result_file is not None:
            query = "INSERT OR REPLACE INTO fine_tuning_results VALUES (?, ?)"
            db.execute(query, (job.id, result_file))
        status = "failed" if model is None else "succeeded"
        end = {"status": status, "finished_at": unix_now(), "error": error}
        if JOBS.update(db, job.id, JOBS.is_open, fine_tuned_model=model, **end):
            _hold_files(db, job, -1)

    @transaction
    def note(
        self,
        db: Db,
        job_id: str,
        message: str,
        *,
        step: int | None = None,
        level: str = "info",
        data: dict[str, Any] | None = None,
        trained_tokens: int | None = None,
    ) -> None:
        """Add an event. Metrics of a step that is there already replace it: the trainer repeats
        steps after its last checkpoint.
        """
        kind = "message" if step is None else "metrics"
        encoded = msgspec.json.encode(data or {}).decode()
        db.execute(
            "INSERT OR REPLACE INTO fine_tuning_events"
            " (job_id, step, created_at, level, kind, message, data)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (job_id, step, unix_now(), level, kind, message, encoded),
        )
        if trained_tokens is not None:
            JOBS.update(db, job_id, trained_tokens=trained_tokens)

    @transaction
    def events(
        self,
        db: Db,
        job_id: str,
        limit: int,
        *,
        before: int | None = None,
        after: int | None = None,
    ) -> list[JobEvent]:
        """Events of a job: the newest first, or with `after` the oldest first."""
        query = f"SELECT {_EVENT_COLUMNS} FROM fine_tuning_events WHERE job_id = ?"
        order: Order = "desc" if after is None else "asc"
        rows = page_of(db, query, (job_id,), limit, order, before if after is None else after)
        return [JobEvent(**dict(row)) for row in rows]


def _check(db: Db, owner: str, files: Sequence[tuple[str, str | None]]) -> None:
    JOBS.check_open(db, owner, MAX_OPEN_JOBS, "jobs wait or run", RETRY_FULL_S)
    for param, file_id in files:
        if file_id is not None:
            check_input(db, owner, file_id, "fine-tune", param)


def _hold_files(db: Db, job: Job, change: Literal[1, -1]) -> None:
    for file_id in (job.training_file, job.validation_file):
        if file_id is not None:
            hold_file(db, file_id, change)
