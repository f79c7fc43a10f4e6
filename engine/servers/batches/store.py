"""Stores batches and the lines of their input files.

The result of a line is stored only once. While a batch runs, results are in the database. Their
size counts for a reserved file, so that the storage limit holds. When all results are there, they
are written to that file and deleted from the database.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace

import msgspec

from engine.core.errors import ConflictError, NotFoundError
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
    FILES,
    FileStore,
    StoredFile,
    Upload,
    check_input,
    check_num_files,
    hold_file,
)
from engine.servers.storage.tables import Db, Store, Table, transaction

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
BATCHES = Table(
    "batches",
    Batch,
    noun="batch",
    param="batch_id",
    code="batch_not_found",
    is_open=f"status NOT IN {ENDED}",
)


class BatchStore(Store):
    def __init__(self, files: FileStore) -> None:
        super().__init__(files.database)
        self._files = files

    @transaction
    def create(self, db: Db, new: NewBatch) -> Batch:
        _make_room(db, new.owner)
        check_input(db, new.owner, new.input_file_id, "batch", "input_file_id")
        return _insert(db, new)

    async def create_checked(
        self, upload: Upload, new: NewBatch, model: str, lines: Sequence[Line]
    ) -> Batch:
        """Create a batch whose lines are checked already, and start it. `upload` is its input file.
        The file is hidden from its owner and deleted when the batch has ended: it has expired from
        the beginning, and only the batch's hold keeps it.
        """

        def begin(db: Db, file: StoredFile) -> None:
            _make_room(db, new.owner)
            batch = _insert(db, replace(new, input_file_id=file.id))
            _start(db, batch, model, lines)

        await upload.keep("batch", f"{new.id}.jsonl", new.created_at, begin)
        return await self.find(new.id)

    @transaction
    def find(self, db: Db, batch_id: str, owner: str | None = None, prefix: str = "") -> Batch:
        """Find a batch by its id. If `owner` is given, only a batch of this owner is found."""
        return _find(db, batch_id, owner, prefix)

    @transaction
    def page(
        self,
        db: Db,
        owner: str,
        prefix: str,
        after: str | None,
        limit: int,
        before: str | None = None,
    ) -> list[Batch]:
        """A page of the owner's batches whose ids begin with `prefix`: up to `limit` that are older
        than the batch `after`, or that are next newer than `before`. The newest is first.
        """
        for cursor in (after, before):
            if cursor is not None:
                _find(db, cursor, owner, prefix)
        return BATCHES.page(
            db, owner, limit, "id GLOB ?", (prefix + "*",), after=after, before=before
        )

    @transaction
    def open_batches(self, db: Db) -> list[Batch]:
        """All batches that have not ended, oldest first."""
        return BATCHES.rows(db, BATCHES.is_open)

    @transaction
    def start(self, db: Db, batch: Batch, model: str, lines: Sequence[Line]) -> None:
        """Store the lines and change the batch's status from validating to in_progress. Does
        nothing if the batch was cancelled meanwhile.
        """
        _start(db, batch, model, lines)

    @transaction
    def pending(self, db: Db, batch_id: str, after: int, limit: int) -> list[Line]:
        """Up to `limit` lines that have no result and follow line number `after`."""
        rows = db.execute(
            "SELECT number, custom_id, start, num_bytes FROM batch_lines"
            " WHERE batch_id = ? AND number > ? AND succeeded IS NULL ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(**dict(row)) for row in rows]

    @transaction
    def record(
        self, db: Db, batch: Batch, number: int, succeeded: bool, result: bytes, usage: LineUsage
    ) -> None:
        """Store the result of a line, unless it has one already. If there is no room, stores
        nothing and raises `StorageFullError`.
        """
        changed = db.execute(
            "UPDATE batch_lines SET succeeded = ?, result = ?"
            " WHERE batch_id = ? AND number = ? AND succeeded IS NULL",
            (succeeded, result, batch.id, number),
        )
        if changed.rowcount == 0:
            return
        self._files.grow(db, batch.results_id, len(result))
        counts = asdict(usage) | {"num_completed" if succeeded else "num_failed": 1}
        changes = ", ".join(f"{name} = {name} + ?" for name in counts)
        db.execute(f"UPDATE batches SET {changes} WHERE id = ?", (*counts.values(), batch.id))

    @transaction
    def cancel(self, db: Db, batch_id: str, owner: str, prefix: str) -> Batch:
        batch = _find(db, batch_id, owner, prefix)
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise ConflictError(
                f"A batch that is {batch.status} cannot be cancelled.", param="batch_id"
            )
        BATCHES.update(db, batch.id, status="cancelling", cancelling_at=unix_now())
        return _find(db, batch.id)

    @transaction
    def note_errors(self, db: Db, batch: Batch, errors: Sequence[LineError]) -> None:
        """Store the errors that make the batch fail. The batch ends as failed."""
        BATCHES.update(db, batch.id, errors=msgspec.json.encode(errors).decode())

    @transaction
    def finalize(self, db: Db, batch: Batch) -> Batch:
        is_running = "status = 'in_progress'"
        BATCHES.update(db, batch.id, is_running, status="finalizing", finalizing_at=unix_now())
        return _find(db, batch.id)

    @transaction
    def outcomes(self, db: Db, batch_id: str, after: int) -> list[LineOutcome]:
        """A page of results, for lines after number `after`. The total size of a page is limited,
        because a result can be large.
        """
        rows = db.execute(
            "SELECT number, custom_id, succeeded, result FROM batch_lines"
            " WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?",
            (batch_id, after, OUTCOMES_PAGE),
        )
        page: list[LineOutcome] = []
        num_bytes = 0
        for number, custom_id, succeeded, result in rows:
            page.append(LineOutcome(number, custom_id, bool(succeeded), result))
            num_bytes += len(result or b"")
            if num_bytes >= OUTCOMES_BYTES:
                break
        return page

    @transaction
    def end(
        self,
        db: Db,
        batch: Batch,
        status: str,
        output: StoredFile | None,
        errors: StoredFile | None,
    ) -> None:
        """End the batch: set its final status, add the result files, delete the lines, and release
        the input file.
        """
        assert status in ENDED
        columns = {"status": status, f"{status}_at": unix_now()}
        columns |= {"output_file_id": output and output.id, "error_file_id": errors and errors.id}
        is_ended = BATCHES.update(db, batch.id, BATCHES.is_open, **columns)
        assert is_ended, batch.id
        FILES.delete(db, "id = ?", (batch.results_id,))
        for file in (output, errors):
            if file is not None:
                FILES.insert(db, file, is_ready=True)
        db.execute("DELETE FROM batch_lines WHERE batch_id = ?", (batch.id,))
        hold_file(db, batch.input_file_id, -1)

    async def delete(self, batch_id: str, owner: str, prefix: str) -> None:
        """Delete a batch that has ended, with its results."""
        batch = await self._delete_row(batch_id, owner, prefix)
        if batch.output_file_id is not None:
            with contextlib.suppress(NotFoundError):  # it may have expired
                await self._files.delete(owner, batch.output_file_id)

    @transaction
    def _delete_row(self, db: Db, batch_id: str, owner: str, prefix: str) -> Batch:
        batch = _find(db, batch_id, owner, prefix)
        if not batch.has_ended:
            raise ConflictError(
                "This batch has not ended. Cancel it first, or wait for its end.",
                param="batch_id",
            )
        BATCHES.delete(db, "id = ?", (batch.id,))
        return batch

    @transaction
    def sweep(self, db: Db, ttl_s: float) -> None:
        """Delete batches that have ended and were created more than `ttl_s` seconds ago."""
        oldest = unix_now() - int(ttl_s)
        BATCHES.delete(db, f"NOT ({BATCHES.is_open}) AND created_at < ?", (oldest,))


def _insert(db: Db, new: NewBatch) -> Batch:
    hold_file(db, new.input_file_id, 1)
    BATCHES.add(db, asdict(new) | {"status": "validating"})
    return _find(db, new.id)


def _start(db: Db, batch: Batch, model: str, lines: Sequence[Line]) -> None:
    is_started = BATCHES.update(
        db,
        batch.id,
        "status = 'validating'",
        status="in_progress",
        in_progress_at=unix_now(),
        model=model,
        num_lines=len(lines),
    )
    if not is_started:
        return
    db.executemany(
        "INSERT INTO batch_lines (batch_id, number, custom_id, start, num_bytes)"
        " VALUES (?, ?, ?, ?, ?)",
        ((batch.id, it.number, it.custom_id, it.start, it.num_bytes) for it in lines),
    )
    reserved = StoredFile(batch.results_id, batch.owner, "batch_output", "", 0, 0, 0)
    FILES.insert(db, reserved, is_ready=False)


def _find(db: Db, batch_id: str, owner: str | None = None, prefix: str = "") -> Batch:
    """Find a batch whose id begins with `prefix`. The batches of each API have another prefix."""
    return BATCHES.find(db, batch_id, owner, "id GLOB ?", (prefix + "*",))


def _make_room(db: Db, owner: str) -> None:
    """Raise if too many batches of the owner have not ended, or if there is no room for the result
    files of another one. If too many that ended are kept, delete the oldest of them.
    """
    check_num_files(db, owner, 2)
    BATCHES.check_open(db, owner, MAX_OPEN_BATCHES, "batches wait or run", RETRY_FULL_S)
    BATCHES.drop_oldest(db, owner, MAX_KEPT_BATCHES)
