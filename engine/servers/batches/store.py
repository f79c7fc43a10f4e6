"""Stores batches and the lines of their input files in SQLite. Every change of state is one
transaction. So the server may be killed at any time, and the next process can continue.

The result of a line is stored only once. While a batch runs, results are in the database. Their
size counts for a reserved file, so that the storage limit holds. When all results are there, they
are written to that file and deleted from the database.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import fields, replace

import msgspec

from engine.core.errors import ConflictError, InvalidRequestError, NotFoundError, RateLimitError
from engine.servers.batches.lines import Line
from engine.servers.batches.schema import (
    ENDED,
    Batch,
    LineError,
    LineOutcome,
    LineUsage,
    NewBatch,
)
from engine.servers.files.expiry import unix_now
from engine.servers.files.store import (
    FileStore,
    StoredFile,
    Upload,
    check_num_files,
    delete_row,
    find_file,
    hold_file,
    insert_file,
)
from engine.servers.serving.storage import Database

# Of each tenant
MAX_OPEN_BATCHES = 100
MAX_KEPT_BATCHES = 2_000
RETRY_FULL_S = 30.0
OUTCOMES_PAGE = 256
OUTCOMES_BYTES = 4 * 2**20

SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    key TEXT NOT NULL DEFAULT '',
    pool TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    results_id TEXT NOT NULL,
    output_life_s INTEGER NOT NULL,
    metadata TEXT,
    model TEXT,
    status TEXT NOT NULL,
    errors TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    num_lines INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, seq);
CREATE TABLE IF NOT EXISTS batch_lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    start INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    succeeded INTEGER,
    result BLOB,
    PRIMARY KEY (batch_id, number)
);
"""
ADDED = (("batches", "key", "TEXT NOT NULL DEFAULT ''"),)
_COLUMNS = ", ".join(each.name for each in fields(Batch))
_OPEN = f"status NOT IN {ENDED}"


class BatchStore:
    def __init__(self, database: Database, files: FileStore) -> None:
        self._database = database
        self._files = files

    async def create(self, new: NewBatch) -> Batch:
        def work(db: sqlite3.Connection) -> Batch:
            _check_not_full(db, new.owner)
            try:
                file = find_file(db, new.owner, new.input_file_id)
            except NotFoundError:
                raise InvalidRequestError(
                    "There is no such file; upload it to /v1/files first.",
                    param="input_file_id",
                    code="file_not_found",
                ) from None
            if file.purpose != "batch":
                raise InvalidRequestError(
                    f"The file's purpose is {file.purpose}; it must be batch.",
                    param="input_file_id",
                )
            return _insert(db, new)

        return await self._database.run(work)

    async def create_checked(
        self, upload: Upload, new: NewBatch, model: str, lines: Sequence[Line]
    ) -> Batch:
        """Create a batch whose lines are checked already, and start it. `upload` is its input file.
        The file is hidden from its owner and deleted when the batch has ended: it has expired from
        the beginning, and only the batch's hold keeps it.
        """

        def begin(db: sqlite3.Connection, file: StoredFile) -> None:
            _check_not_full(db, new.owner)
            batch = _insert(db, replace(new, input_file_id=file.id))
            _start(db, batch, model, lines)

        await upload.keep("batch", f"{new.id}.jsonl", new.created_at, begin)
        return await self.find(new.id)

    async def find(self, batch_id: str, owner: str | None = None, prefix: str = "") -> Batch:
        """Find a batch by its id. If `owner` is given, only a batch of this owner is found."""
        return await self._database.run(lambda db: _find(db, batch_id, owner, prefix))

    async def page(
        self, owner: str, prefix: str, after: str | None, limit: int, before: str | None = None
    ) -> list[Batch]:
        """A page of the owner's batches whose ids begin with `prefix`: up to `limit` that are older
        than the batch `after`, or that are next newer than `before`. The newest is first.
        """

        def work(db: sqlite3.Connection) -> list[Batch]:
            query = f"SELECT {_COLUMNS} FROM batches WHERE owner = ? AND id GLOB ?"
            values: list[str | int] = [owner, prefix + "*"]
            for cursor, compare in ((after, "<"), (before, ">")):
                if cursor is not None:
                    _find(db, cursor, owner, prefix)
                    query += f" AND seq {compare} (SELECT seq FROM batches WHERE id = ?)"
                    values.append(cursor)
            direction = "DESC" if before is None else "ASC"
            rows = db.execute(f"{query} ORDER BY seq {direction} LIMIT ?", (*values, limit))
            found = [Batch(**dict(row)) for row in rows]
            return found if before is None else found[::-1]

        return await self._database.run(work)

    async def open_batches(self) -> list[Batch]:
        """All batches that have not ended, oldest first."""

        def work(db: sqlite3.Connection) -> list[Batch]:
            rows = db.execute(f"SELECT {_COLUMNS} FROM batches WHERE {_OPEN} ORDER BY seq")
            return [Batch(**dict(row)) for row in rows]

        return await self._database.run(work)

    async def start(self, batch: Batch, model: str, lines: Sequence[Line]) -> None:
        """Store the lines and change the batch's status from validating to in_progress. Does
        nothing if the batch was cancelled meanwhile.
        """

        await self._database.run(lambda db: _start(db, batch, model, lines))

    async def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Up to `limit` lines that have no result and follow line number `after`."""

        def work(db: sqlite3.Connection) -> list[Line]:
            rows = db.execute(
                "SELECT number, custom_id, start, num_bytes FROM batch_lines"
                " WHERE batch_id = ? AND number > ? AND succeeded IS NULL ORDER BY number LIMIT ?",
                (batch_id, after, limit),
            )
            return [Line(**dict(row)) for row in rows]

        return await self._database.run(work)

    async def record(
        self, batch: Batch, number: int, succeeded: bool, result: bytes, usage: LineUsage
    ) -> None:
        """Store the result of a line, unless it has one already. If there is no room, stores
        nothing and raises `StorageFullError`.
        """

        def work(db: sqlite3.Connection) -> None:
            changed = db.execute(
                "UPDATE batch_lines SET succeeded = ?, result = ?"
                " WHERE batch_id = ? AND number = ? AND succeeded IS NULL",
                (succeeded, result, batch.id, number),
            )
            if changed.rowcount == 0:
                return
            self._files.grow(db, batch.results_id, len(result))
            counter = "num_completed" if succeeded else "num_failed"
            db.execute(
                f"UPDATE batches SET {counter} = {counter} + 1,"
                " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?,"
                " output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ?"
                " WHERE id = ?",
                (
                    usage.input_tokens,
                    usage.cached_tokens,
                    usage.output_tokens,
                    usage.reasoning_tokens,
                    batch.id,
                ),
            )

        await self._database.run(work)

    async def cancel(self, batch_id: str, owner: str, prefix: str) -> Batch:
        def work(db: sqlite3.Connection) -> Batch:
            batch = _find(db, batch_id, owner, prefix)
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise ConflictError(
                    f"A batch that is {batch.status} cannot be cancelled.", param="batch_id"
                )
            db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? WHERE id = ?",
                (unix_now(), batch.id),
            )
            return _find(db, batch.id)

        return await self._database.run(work)

    async def note_errors(self, batch: Batch, errors: Sequence[LineError]) -> None:
        """Store the errors that make the batch fail. The batch ends as failed."""
        encoded = msgspec.json.encode(errors).decode()
        await self._database.run(
            lambda db: db.execute("UPDATE batches SET errors = ? WHERE id = ?", (encoded, batch.id))
        )

    async def finalize(self, batch: Batch) -> Batch:
        def work(db: sqlite3.Connection) -> Batch:
            db.execute(
                "UPDATE batches SET status = 'finalizing', finalizing_at = ?"
                " WHERE id = ? AND status = 'in_progress'",
                (unix_now(), batch.id),
            )
            return _find(db, batch.id)

        return await self._database.run(work)

    async def outcomes(self, batch_id: str, after: int) -> list[LineOutcome]:
        """A page of results, for lines after number `after`. The total size of a page is limited,
        because a result can be large.
        """

        def work(db: sqlite3.Connection) -> list[LineOutcome]:
            rows = db.execute(
                "SELECT number, custom_id, succeeded, result FROM batch_lines"
                " WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?",
                (batch_id, after, OUTCOMES_PAGE),
            )
            page: list[LineOutcome] = []
            num_bytes = 0
            for row in rows:
                page.append(
                    LineOutcome(
                        row["number"], row["custom_id"], bool(row["succeeded"]), row["result"]
                    )
                )
                num_bytes += len(row["result"] or b"")
                if num_bytes >= OUTCOMES_BYTES:
                    break
            return page

        return await self._database.run(work)

    async def end(
        self, batch: Batch, status: str, output: StoredFile | None, errors: StoredFile | None
    ) -> None:
        """End the batch in one transaction: set its final status, add the result files, delete the
        lines, and release the input file.
        """
        assert status in ENDED

        def work(db: sqlite3.Connection) -> None:
            changed = db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?,"
                f" error_file_id = ? WHERE id = ? AND {_OPEN}",
                (status, unix_now(), output and output.id, errors and errors.id, batch.id),
            )
            assert changed.rowcount == 1, batch.id
            delete_row(db, batch.results_id)
            for file in (output, errors):
                if file is not None:
                    insert_file(db, file, is_ready=True)
            db.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch.id,))
            hold_file(db, batch.input_file_id, -1)

        await self._database.run(work)

    async def delete(self, batch_id: str, owner: str, prefix: str) -> None:
        """Delete a batch that has ended, with its results."""

        def work(db: sqlite3.Connection) -> Batch:
            batch = _find(db, batch_id, owner, prefix)
            if not batch.has_ended:
                raise ConflictError(
                    "This batch has not ended. Cancel it first, or wait for its end.",
                    param="batch_id",
                )
            db.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
            return batch

        batch = await self._database.run(work)
        if batch.output_file_id is not None:
            with contextlib.suppress(NotFoundError):  # it may have expired
                await self._files.delete(owner, batch.output_file_id)

    async def sweep(self, ttl_s: float) -> None:
        """Delete batches that have ended and were created more than `ttl_s` seconds ago."""
        oldest = unix_now() - int(ttl_s)
        await self._database.run(
            lambda db: db.execute(
                f"DELETE FROM batches WHERE created_at < ? AND NOT ({_OPEN})", (oldest,)
            )
        )


def _insert(db: sqlite3.Connection, new: NewBatch) -> Batch:
    hold_file(db, new.input_file_id, 1)
    names = [each.name for each in fields(NewBatch)]
    values = [getattr(new, name) for name in names]
    marks = ", ".join("?" * len(names))
    db.execute(
        f"INSERT INTO batches ({', '.join(names)}, status) VALUES ({marks}, 'validating')",
        values,
    )
    return _find(db, new.id)


def _start(db: sqlite3.Connection, batch: Batch, model: str, lines: Sequence[Line]) -> None:
    changed = db.execute(
        "UPDATE batches SET status = 'in_progress', in_progress_at = ?, model = ?,"
        " num_lines = ? WHERE id = ? AND status = 'validating'",
        (unix_now(), model, len(lines), batch.id),
    )
    if changed.rowcount == 0:
        return
    db.executemany(
        "INSERT INTO batch_lines (batch_id, number, custom_id, start, num_bytes)"
        " VALUES (?, ?, ?, ?, ?)",
        ((batch.id, it.number, it.custom_id, it.start, it.num_bytes) for it in lines),
    )
    reserved = StoredFile(batch.results_id, batch.owner, "batch_output", "", 0, 0, 0)
    insert_file(db, reserved, is_ready=False)


def _find(
    db: sqlite3.Connection, batch_id: str, owner: str | None = None, prefix: str = ""
) -> Batch:
    """Find a batch whose id begins with `prefix`. The batches of each API have another prefix."""
    query = f"SELECT {_COLUMNS} FROM batches WHERE id = ? AND owner = COALESCE(?, owner)"
    row = db.execute(query, (batch_id, owner)).fetchone()
    if row is None or not batch_id.startswith(prefix):
        raise NotFoundError("There is no such batch.", param="batch_id", code="batch_not_found")
    return Batch(**dict(row))


def _check_not_full(db: sqlite3.Connection, owner: str) -> None:
    """Raise if too many batches of the owner have not ended, or if there is no room for the result
    files of another one. If too many that ended are kept, delete the oldest of them.
    """
    check_num_files(db, owner, 2)
    query = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND {_OPEN}"
    num_open = db.execute(query, (owner,)).fetchone()[0]
    if num_open >= MAX_OPEN_BATCHES:
        raise RateLimitError(
            f"{num_open} of your batches wait or run, which is as many as a tenant may have.",
            retry_after=RETRY_FULL_S,
        )
    db.execute(
        f"DELETE FROM batches WHERE seq IN (SELECT seq FROM batches WHERE owner = ?"
        f" AND NOT ({_OPEN}) ORDER BY seq DESC LIMIT -1 OFFSET ?)",
        (owner, MAX_KEPT_BATCHES),
    )
