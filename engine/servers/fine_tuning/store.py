"""Stores jobs and their events in SQLite. Every change of state is one transaction, so the server
may be killed at any time.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import msgspec

from engine.core.errors import ConflictError, InvalidRequestError, NotFoundError, RateLimitError
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import find_file, hold_file
from engine.servers.fine_tuning.schema import ENDED, Job, JobEvent, Status
from engine.servers.serving.storage import Database

# Of each tenant
MAX_OPEN_JOBS = 20
MAX_KEPT_JOBS = 1_000
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
_STORED = tuple(each.name for each in fields(Job) if each.name != "result_file")
_COLUMNS = ", ".join(
    (
        *_STORED,
        "(SELECT file_id FROM fine_tuning_results WHERE job_id = fine_tuning_jobs.id)"
        " AS result_file",
    )
)
_EVENT_COLUMNS = ", ".join(each.name for each in fields(JobEvent))
_OPEN = f"status NOT IN {ENDED}"


class JobStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, job: Job) -> list[str]:
        """Add a job. Returns the ids of old jobs that were dropped for it."""

        def work(db: sqlite3.Connection) -> list[str]:
            _check_not_full(db, job.owner)
            for param in ("training_file", "validation_file"):
                file_id = getattr(job, param)
                if file_id is not None:
                    _check_file(db, job.owner, file_id, param)
                    hold_file(db, file_id, 1)
            marks = ", ".join("?" * len(_STORED))
            values = [getattr(job, name) for name in _STORED]
            db.execute(
                f"INSERT INTO fine_tuning_jobs ({', '.join(_STORED)}) VALUES ({marks})", values
            )
            return _drop_oldest(db, job.owner)

        return await self._database.run(work)

    async def check(self, owner: str, files: Sequence[tuple[str, str | None]]) -> None:
        """Raise if the owner can't have another job, or if a file, given as (parameter, id), is not
        there or has another purpose.
        """

        def work(db: sqlite3.Connection) -> None:
            _check_not_full(db, owner)
            for param, file_id in files:
                if file_id is not None:
                    _check_file(db, owner, file_id, param)

        await self._database.run(work)

    async def find(self, job_id: str, owner: str | None = None) -> Job:
        return await self._database.run(lambda db: _find(db, job_id, owner))

    async def page(
        self, owner: str, after: str | None, limit: int, metadata: dict[str, str] | None = None
    ) -> list[Job]:
        """Jobs, the newest first. With `metadata`, only those that have all of its pairs."""
        wanted = (metadata or {}).items()

        def work(db: sqlite3.Connection) -> list[Job]:
            query = f"SELECT {_COLUMNS} FROM fine_tuning_jobs WHERE owner = ?"
            values: list[Any] = [owner]
            if after is not None:
                _find(db, after, owner)
                query += " AND seq < (SELECT seq FROM fine_tuning_jobs WHERE id = ?)"
                values.append(after)
            rows = db.execute(f"{query} ORDER BY seq DESC", values)
            jobs = (Job(**dict(row)) for row in rows)
            found = (job for job in jobs if wanted <= job.labels.items())
            return list(islice(found, limit))

        return await self._database.run(work)

    async def last_step(self, job_id: str) -> int:
        """The last step whose metrics are stored; 0 if there is none."""
        query = "SELECT MAX(step) FROM fine_tuning_events WHERE job_id = ?"
        return await self._database.run(lambda db: db.execute(query, (job_id,)).fetchone()[0] or 0)

    async def next_job(self, turns: Mapping[str, int]) -> Job | None:
        """The job that is running, or the next one that waits: the oldest job of the tenant whose
        last turn, or else last end of a job, was longest ago. `turns` has the last turn of tenants,
        in seconds since 1970.
        """

        def work(db: sqlite3.Connection) -> Job | None:
            rows = db.execute(
                f"SELECT {_COLUMNS}, (SELECT MAX(ended.finished_at) FROM fine_tuning_jobs AS ended"
                "  WHERE ended.owner = fine_tuning_jobs.owner) AS last_end FROM fine_tuning_jobs"
                " WHERE status IN ('running', 'queued') ORDER BY status = 'queued', seq"
            )
            found = [(row.pop("last_end") or 0, Job(**row)) for row in map(dict, rows)]
            if found and found[0][1].status == "running":
                return found[0][1]
            last = {job.owner: max(end, turns.get(job.owner, 0)) for end, job in found}
            return min((job for _, job in found), key=lambda job: last[job.owner], default=None)

        return await self._database.run(work)

    async def others_wait(self, owner: str) -> bool:
        """Whether a job of another tenant waits."""
        query = "SELECT 1 FROM fine_tuning_jobs WHERE status = 'queued' AND owner != ? LIMIT 1"
        return await self._database.run(
            lambda db: db.execute(query, (owner,)).fetchone() is not None
        )

    async def counts(self) -> dict[str, int]:
        """The number of jobs by status."""
        query = "SELECT status, COUNT(*) FROM fine_tuning_jobs GROUP BY status"
        return await self._database.run(
            lambda db: {row[0]: row[1] for row in db.execute(query).fetchall()}
        )

    async def is_known(self, job_id: str) -> bool:
        """Whether there is such a job that was not cancelled."""
        query = "SELECT 1 FROM fine_tuning_jobs WHERE id = ? AND status != 'cancelled'"
        return await self._database.run(
            lambda db: db.execute(query, (job_id,)).fetchone() is not None
        )

    async def move(
        self, job_id: str, to: Status, allowed: Sequence[Status], owner: str | None = None
    ) -> Job:
        """Change the status of a job. Raises `ConflictError` if its status is none of `allowed`."""

        def work(db: sqlite3.Connection) -> Job:
            job = _find(db, job_id, owner)
            if job.status not in allowed:
                raise ConflictError(f"A job that is {job.status} can't become {to}.")
            finished = unix_now() if to in ENDED else None
            db.execute(
                "UPDATE fine_tuning_jobs SET status = ?, finished_at = ? WHERE id = ?",
                (to, finished, job_id),
            )
            if to in ENDED:
                _release(db, job)
            return _find(db, job_id, None)

        return await self._database.run(work)

    async def end(
        self,
        job: Job,
        *,
        model: str | None = None,
        result_file: str | None = None,
        error: str | None = None,
    ) -> None:
        """End a running job: with the name of its model, or with the reason of its failure."""

        def work(db: sqlite3.Connection) -> None:
            if result_file is not None:
                db.execute(
                    "INSERT OR REPLACE INTO fine_tuning_results VALUES (?, ?)",
                    (job.id, result_file),
                )
            changed = db.execute(
                "UPDATE fine_tuning_jobs SET status = ?, finished_at = ?, fine_tuned_model = ?,"
                f" error = ? WHERE id = ? AND {_OPEN}",
                ("failed" if model is None else "succeeded", unix_now(), model, error, job.id),
            )
            if changed.rowcount:
                _release(db, job)

        await self._database.run(work)

    async def note(
        self,
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

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT OR REPLACE INTO fine_tuning_events"
                " (job_id, step, created_at, level, kind, message, data)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (job_id, step, unix_now(), level, kind, message, encoded),
            )
            if trained_tokens is not None:
                db.execute(
                    "UPDATE fine_tuning_jobs SET trained_tokens = ? WHERE id = ?",
                    (trained_tokens, job_id),
                )

        await self._database.run(work)

    async def events(
        self, job_id: str, limit: int, *, before: int | None = None, after: int | None = None
    ) -> list[JobEvent]:
        """Events of a job: the newest first, or with `after` the oldest first."""

        def work(db: sqlite3.Connection) -> list[JobEvent]:
            query = f"SELECT {_EVENT_COLUMNS} FROM fine_tuning_events WHERE job_id = ?"
            values: list[Any] = [job_id]
            for bound, compare in ((before, "<"), (after, ">")):
                if bound is not None:
                    query += f" AND seq {compare} ?"
                    values.append(bound)
            direction = "DESC" if after is None else "ASC"
            rows = db.execute(f"{query} ORDER BY seq {direction} LIMIT ?", (*values, limit))
            return [JobEvent(**dict(row)) for row in rows]

        return await self._database.run(work)


def _check_not_full(db: sqlite3.Connection, owner: str) -> None:
    query = f"SELECT COUNT(*) FROM fine_tuning_jobs WHERE owner = ? AND {_OPEN}"
    if db.execute(query, (owner,)).fetchone()[0] >= MAX_OPEN_JOBS:
        raise RateLimitError(
            f"{MAX_OPEN_JOBS} of your jobs wait or run, which is as many as a tenant may have.",
            retry_after=RETRY_FULL_S,
        )


def _drop_oldest(db: sqlite3.Connection, owner: str) -> list[str]:
    """Delete the owner's oldest jobs that have ended, if there are too many. Their models stay."""
    old = db.execute(
        f"DELETE FROM fine_tuning_jobs WHERE seq IN (SELECT seq FROM fine_tuning_jobs"
        f" WHERE owner = ? AND NOT ({_OPEN}) ORDER BY seq DESC LIMIT -1 OFFSET ?) RETURNING id",
        (owner, MAX_KEPT_JOBS),
    ).fetchall()
    for table in ("fine_tuning_events", "fine_tuning_results"):
        db.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(row["id"],) for row in old])
    return [row["id"] for row in old]


def _check_file(db: sqlite3.Connection, owner: str, file_id: str, param: str) -> None:
    try:
        file = find_file(db, owner, file_id)
    except NotFoundError:
        raise InvalidRequestError(
            "There is no such file; upload it to /v1/files first.",
            param=param,
            code="file_not_found",
        ) from None
    if file.purpose != "fine-tune":
        raise InvalidRequestError(
            f"The file's purpose is {file.purpose}; it must be fine-tune.", param=param
        )


def _release(db: sqlite3.Connection, job: Job) -> None:
    for file_id in (job.training_file, job.validation_file):
        if file_id is not None:
            hold_file(db, file_id, -1)


def _find(db: sqlite3.Connection, job_id: str, owner: str | None) -> Job:
    query = f"SELECT {_COLUMNS} FROM fine_tuning_jobs WHERE id = ? AND owner = COALESCE(?, owner)"
    row = db.execute(query, (job_id, owner)).fetchone()
    if row is None:
        raise NotFoundError("There is no such job.", param="fine_tuning_job_id")
    return Job(**dict(row))
